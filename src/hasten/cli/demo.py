"""`hasten demo`: the whole road on text that is already on the machine."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hasten.cli.options import Threads, thread_count
from hasten.errors import ConfigError

PROMPT = 'def read_lines(path):\n    """'
# How the time after training is spent, chosen so that the whole demo with the default minutes stays below ten.
EVALUATION_BYTES = 200_000
LADDER_ROUNDS = 3
LADDER_TEXT_BYTES = 40_000  # that each rung scores


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small model on Python's standard library, evaluate it, let it write, and measure it: runs/demo/."""

    minutes: float = 4.0
    """Minutes of training; the rest (text, evaluation, ladder) takes one or two more."""
    again: Literal["resume", "fresh"] = "resume"
    """If runs/demo is there: go on from its last checkpoint (a finished one is kept as it is), or start over."""
    folder: Path = Path("runs")
    """Where demo/ is made."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    ladder: bool = True
    """Measure the generation ladder of the trained model at the end."""

    def run(self) -> None:
        started = time.perf_counter()
        from hasten.training.recipes import RECIPES

        recipe = RECIPES["demo"]
        recipe = replace(
            recipe,
            run=replace(recipe.run, minutes=self.minutes, folder=str(self.folder), threads=thread_count(self.threads)),
        )
        _say(1, "train a model of about 10 M parameters on the standard library of this Python")
        from hasten.training.session import train

        try:
            result = train(recipe, resume="auto" if self.again == "resume" else "never")
        except ConfigError as error:
            if self.again == "resume" and "another recipe" in str(error):
                raise ConfigError(f"{error} (for the demo: hasten demo --again fresh)") from None
            raise
        if result.stopped_by is not None:
            print(f"stopped after step {result.steps} and saved; `hasten demo` goes on from there", file=sys.stderr)
            raise SystemExit(128 + result.stopped_by)
        if result.validation_loss is not None:
            print(f"  {result.steps} steps, {result.tokens:,} tokens, validation loss {result.validation_loss:.3f}")
        run = result.folder
        _say(2, "evaluate it on files it has not seen")
        model = _load(result.model_folder, thread_count(self.threads))
        held_out = _held_out(recipe)
        scores = _evaluate(model, held_out, run)
        print(f"  perplexity {scores['perplexity']:.2f}, {scores['bits_per_byte']:.3f} bits per byte")
        _say(3, "let it write Python")
        _write(model)
        if self.ladder:
            _say(4, "measure each technique of generation on it")
            _measure(result.model_folder, run, held_out, threads=thread_count(self.threads))
        _finish(run, time.perf_counter() - started)


def _say(step: int, text: str) -> None:
    print(f"\n[{step}] {text}", flush=True)


def _load(folder: Path, threads: int | None) -> Any:
    from hasten.machine import configure
    from hasten.model.load import load

    configure(threads=threads)
    return load(folder)


def _held_out(recipe: Any) -> list[str]:
    """Files that training has not seen, at most EVALUATION_BYTES of them."""
    from hasten.training.setup import prepare_data

    documents: list[str] = []
    size = 0
    for _, text in prepare_data(recipe, init=None, progress=False).validation_documents():
        documents.append(text)
        size += len(text.encode())
        if size > EVALUATION_BYTES:
            break
    return documents


def _evaluate(model: Any, documents: list[str], run: Path) -> dict[str, Any]:
    """Score held-out files; also written to evaluation.json."""
    from dataclasses import asdict

    from hasten.cli.progress import share
    from hasten.generation.perplexity import perplexity
    from hasten.machine.files import write_json

    with share("scored tokens") as progress:
        scores = asdict(perplexity(model, documents, progress=progress))
    write_json(run / "evaluation.json", scores | {"documents": len(documents)})
    return scores


def _write(model: Any) -> None:
    from hasten.generation.generate import stream
    from hasten.generation.params import SamplingParams

    params = SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=120, seed=0)
    print(PROMPT, end="")
    for piece in stream(model, PROMPT, params):
        print(piece, end="", flush=True)
    print()


def _measure(folder: Path, run: Path, documents: list[str], *, threads: int | None) -> None:
    """The ladder; each rung also scores the beginning of what was held out, so that speed has its price beside it."""
    from hasten.bench.draw import draw_ladder
    from hasten.bench.generate import GenerateLadder
    from hasten.bench.shapes import Subject
    from hasten.bench.table import print_ladder
    from hasten.machine.files import write_json

    with tempfile.TemporaryDirectory(prefix="hasten-demo-") as place:
        text = Path(place) / "held-out.txt"
        text.write_text("\n".join(documents).encode()[:LADDER_TEXT_BYTES].decode(errors="ignore"))
        ladder = GenerateLadder(
            subject=Subject(folder=str(folder)),
            prompt_tokens=128,
            new_tokens=64,
            rounds=LADDER_ROUNDS,
            threads=threads,
            text=str(text),
        )
        report = ladder.run()
    write_json(run / "ladder.json", report)
    draw_ladder(report, run / "ladder.png", title="Generation ladder of the demo model")
    print_ladder(report)


def _finish(run: Path, seconds: float) -> None:
    lines = sum(1 for _ in (run / "train.jsonl").open())
    made = {
        "model/": "a Hugging Face folder; transformers loads it too",
        "train.jsonl": f"{lines} lines, one a step",
        "loss.png": "the loss",
        "evaluation.json": "perplexity on held-out files",
        "ladder.json": "what each technique gave, with the machine and the limits measured beside it",
        "ladder.png": "the same as a picture",
    }
    print(f"\n[done] in {seconds / 60:.1f} minutes; {run}/ holds")
    for name, text in made.items():
        if (run / name).exists():
            print(f"  {name:<16} {text}")
    model = json.dumps(str(run / "model"))[1:-1]
    print(
        f"""
next:
  hasten generate {model} --prompt "import " --temperature 0.7
  hasten eval {model} --text FILE
  hasten train demo --minutes 30 --name longer
  hasten train finetune --init {model} --data.source FOLDER
  hasten bench generate --shape llama-120m
  hasten doctor"""
    )
