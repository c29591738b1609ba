"""`hasten demo`: the whole road on text that is already on the machine."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hasten.errors import ConfigError
from hasten.generation.params import SamplingParams
from hasten.machine import configure
from hasten.machine.files import write_json
from hasten.machine.progress import share
from hasten.machine.threads import Threads
from hasten.training.recipe import Recipe, differences

if TYPE_CHECKING:
    from hasten.data import TokenData

PROMPT = 'def read_lines(path):\n    """'
# How the time after training is spent, chosen so that the whole demo with the default minutes stays below ten.
EVALUATION_BYTES = 200_000
LADDER_ROUNDS = 3
LADDER_TEXT_BYTES = 40_000  # that each rung scores
GUESSING = 0.9  # a loss above this share of log(vocabulary) is that of a model which has hardly begun


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
        own = replace(recipe.run, minutes=self.minutes, folder=str(self.folder), threads=self.threads)
        recipe = replace(recipe, run=own)
        recipe.check()
        _say(1, "train a small model on the standard library of this Python")
        recipe = _chosen(recipe, resume=self.again == "resume")
        from hasten.model.load import load
        from hasten.training.session import train
        from hasten.training.setup import prepare_data

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
        configure(threads=self.threads)
        model = load(result.model_folder)
        data = prepare_data(recipe, init=None, progress=False)
        held_out = _held_out(data)
        scores = _evaluate(model, held_out, data, run)
        print(f"  perplexity {scores['perplexity']:.2f}, {scores['bits_per_byte']:.3f} bits per byte")
        print(f"  loss {scores['loss']:.3f} a token; a bigram model of the same text has {scores['bigram_loss']:.3f}")
        wrong = noise(scores["loss"], scores["bigram_loss"], recipe.data.vocab_size, steps=result.steps)
        if wrong is None:
            _say(3, "let it write Python")
            _write(model)
        else:
            _say(3, f"no text is shown: {wrong}")
        if self.ladder:
            _say(4, "measure each technique of generation on it")
            _measure(result.model_folder, run, held_out, threads=self.threads)
        _finish(run, time.perf_counter() - started)


def _say(step: int, text: str) -> None:
    print(f"\n[{step}] {text}", flush=True)


def noise(loss: float, bigram: float, vocab_size: int, *, steps: int) -> str | None:
    """Why a model of this loss (nats a token) is no use, or None where it knows more than a bigram model does."""
    if loss < bigram:
        return None
    like = "that of a bigram model or worse"
    if loss > GUESSING * math.log(vocab_size):
        like = f"close to that of guessing among {vocab_size:,} tokens ({math.log(vocab_size):.2f})"
    return (
        f"the model has learned nothing usable, and what it would write is noise. Its loss is {like}, because "
        f"{steps:,} steps were too few; give it more time (hasten demo --minutes 20 --again fresh)"
    )


def _chosen(recipe: Recipe, *, resume: bool) -> Recipe:
    """The recipe with the size of model that this machine is fast enough for in the precision that it trains in."""
    from hasten.training.checkpoint_state import find
    from hasten.training.fitting import fit
    from hasten.training.precision import choose_precision
    from hasten.training.recipes import DEMO_SIZES
    from hasten.training.run_folder import RunFolder

    configure(threads=recipe.run.threads)
    stored = find(RunFolder(path=Path(recipe.run.folder).expanduser() / recipe.name).last) if resume else None
    if stored is not None:  # what was chosen then
        before = stored.recipe
        return min((size.of(recipe) for size in DEMO_SIZES), key=lambda made: len(differences(before, made)))
    chosen, told = fit(choose_precision(recipe)[0], DEMO_SIZES)
    if told is not None:
        print(f"  {told}")
    return replace(chosen, techniques=replace(chosen.techniques, precision=recipe.techniques.precision))


def _held_out(data: TokenData) -> list[str]:
    """Files that training has not seen, at most EVALUATION_BYTES of them."""
    documents: list[str] = []
    size = 0
    for _, text in data.validation_documents():
        documents.append(text)
        size += len(text.encode())
        if size > EVALUATION_BYTES:
            break
    return documents


def _evaluate(model: Any, documents: list[str], data: TokenData, run: Path) -> dict[str, Any]:
    """Score held-out files, beside a bigram model of all the training text; also written to evaluation.json."""
    from dataclasses import asdict

    from hasten.data.bigram import bigram_loss
    from hasten.generation.perplexity import perplexity

    with share("scored tokens") as progress:
        scores = asdict(perplexity(model, documents, progress=progress))
    tokens = [data.tokenizer.encode(text) for text in documents]
    scores["loss"] = math.log(scores["perplexity"])
    scores["bigram_loss"] = bigram_loss(data.train.tokens, tokens, vocab_size=data.tokenizer.vocab_size)
    write_json(run / "evaluation.json", scores | {"documents": len(documents)})
    return scores


def _write(model: Any) -> None:
    from hasten.generation.generate import stream

    params = SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=120, seed=0)
    print(PROMPT, end="")
    for piece in stream(model, PROMPT, params):
        print(piece, end="", flush=True)
    print()


def _measure(folder: Path, run: Path, documents: list[str], *, threads: Threads) -> None:
    """The ladder; each rung also scores the beginning of what was held out, so that speed has its price beside it."""
    from hasten.bench.draw import draw_ladder
    from hasten.bench.generate import GenerateLadder
    from hasten.bench.table import print_ladder

    with tempfile.TemporaryDirectory(prefix="hasten-demo-") as place:
        text = Path(place) / "held-out.txt"
        text.write_text("\n".join(documents).encode()[:LADDER_TEXT_BYTES].decode(errors="ignore"))
        options: dict[str, Any] = {"rounds": LADDER_ROUNDS, "threads": threads, "text": str(text)}
        report = GenerateLadder(model=str(folder), prompt_tokens=128, new_tokens=64, **options).run()
    write_json(run / "ladder.json", report)
    draw_ladder(report, run / "ladder.png", title="Generation ladder of the demo model")
    print_ladder(report)


def _finish(run: Path, seconds: float) -> None:
    lines = sum(1 for _ in (run / "train.jsonl").open())
    made = {
        "model/": "a Hugging Face folder; transformers loads it too",
        "train.jsonl": f"{lines} lines, one a step",
        "loss.png": "the loss",
        "evaluation.json": "perplexity on held-out files, and the loss of a bigram model on them",
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
