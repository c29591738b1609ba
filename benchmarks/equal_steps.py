"""Techniques that make a step learn less, after equally many steps: one-bit optimizers and layer dropping.

    python benchmarks/equal_steps.py onebit --output benchmarks/results/onebit-steps.json
    python benchmarks/equal_steps.py layer-dropping --output benchmarks/results/layer-dropping-steps.json
    python benchmarks/equal_steps.py layer-dropping --hidden-size 512 --vocab-size 8192 --context 256 --steps 240 \
        --learning-rate 1e-3 --precision auto                                             # 43 M parameters

Each run is a process of its own, on Python's standard library. What is compared are losses after equal
steps, or equal FLOPs, so nothing depends on how fast or busy the machine is.

- onebit: 1-bit Adam (arXiv 2102.02888) and 1-bit LAMB (arXiv 2104.06069) beside the optimizers that they compress, by
  the share of the steps that warms up; "exact" freezes the variance as 1-bit Adam does, and sends the momentum whole,
  which tells the two causes of a gap apart; "paper" sends the momentum itself and keeps small variances.
- layer-dropping: progressive layer dropping (arXiv 2010.13369) and none, at several learning rates: as many steps, and
  as many more as the same FLOPs allow.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from ranks_in_turn import BASES, CompressedInTurn, train_in_turn
from torch import Tensor

from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import child_command
from hasten.planning.cost import training_flops_per_token
from hasten.training import onebit
from hasten.training.build import shape_config
from hasten.training.journal import read
from hasten.training.layer_drop import keep_probabilities, theta
from hasten.training.recipe import Data, Optimizer, PrecisionName, Recipe, Run, Schedule, Shape, Techniques
from hasten.training.session import train

CHECKS = 10  # measurements of the validation loss in a run
LAST = 0.05  # share of the steps over which the training loss at the end is averaged


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A run: what differs, and what the report says of it. change: what a child replaces in hasten before it trains."""

    name: str
    recipe: Recipe
    facts: Mapping[str, Any]
    ranks: int = 1
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class EqualSteps(Script):
    """Runs of some contestants with several seeds; those that the output has already are not run again."""

    of_this_machine: ClassVar[tuple[str, ...]] = ("minutes", "only", "rates", "seeds", "threads")
    layers: int = 4
    hidden_size: int = 64
    vocab_size: int = 512
    context: int = 128
    """Tokens of a row."""
    batch_size: int = 4
    """Rows of a step, of all ranks together."""
    steps: int = 2000
    learning_rate: float = 2e-3
    precision: PrecisionName = "float32"
    """Dtype of matrix products."""
    seeds: tuple[int, ...] = (0,)
    only: tuple[str, ...] = ()
    """Contestants to run; all by default."""
    work: Path | None = None
    """Where the runs are kept; a temporary folder by default."""
    threads: int = 1
    """CPU threads of a run; more do not pay for models of this size."""
    minutes: float = 1e9
    """Begin nothing after this many; the same command goes on."""

    def contestants(self) -> Iterator[Contestant]:
        raise NotImplementedError

    def recipe(self, steps: int, optimizer: Optimizer, layer_drop: float | None = None) -> Recipe:
        """A run of some steps: rises for a tenth of them at most, and falls to zero over the last two fifths."""
        shape = Shape(layers=self.layers, hidden_size=self.hidden_size, heads=max(1, self.hidden_size // 32))
        data = Data(vocab_size=self.vocab_size, context=self.context, batch_size=self.batch_size)
        schedule = Schedule(kind="wsd", warmup_steps=steps // 20, final_fraction=0.0, decay_fraction=0.4)
        run = Run(
            steps=steps,
            validate_every=steps // CHECKS,
            validation_batches=40,
            checkpoint_every=10 * steps,
            export="last",
            device="cpu",
        )
        techniques = Techniques(precision=self.precision, layer_drop=layer_drop)
        parts: dict[str, Any] = {"model": shape, "data": data, "optimizer": optimizer, "schedule": schedule}
        return Recipe(name="run", techniques=techniques, run=run, **parts)

    def measure(self) -> Report:
        before, end = self.before(), time.monotonic() + 60 * self.minutes
        if before and before["settings"] != self.settings():
            raise SystemExit(f"{self.output} has rows of other settings: move it away, or give the same")
        rows: list[dict[str, Any]] = before.get("rows", [])
        for seed in self.seeds:
            for one in self.contestants():
                done = any((row["name"], row["seed"]) == (one.name, seed) for row in rows)
                if done or (self.only and one.name not in self.only):
                    continue
                if time.monotonic() > end:
                    print(f"--minutes {self.minutes:g} are over: the same command goes on", flush=True)
                    return {"rows": rows}
                rows.append({"name": one.name, "seed": seed, **one.facts} | self.trained(one, seed))
                print({key: value for key, value in rows[-1].items() if key != "losses"}, flush=True)
                self.write({"rows": rows})
        return {"rows": rows}

    def trained(self, one: Contestant, seed: int) -> dict[str, Any]:
        """Validation losses by step, the training loss at the end, and the share of the blocks that ran."""
        with TemporaryDirectory(prefix="hasten-equal-steps-") as temporary:
            place = (self.work or Path(temporary)) / f"{one.name.replace(' ', '-').replace(',', '')}-{seed}"
            run = replace(one.recipe.run, folder=str(place), seed=seed, threads=self.threads)
            place.mkdir(parents=True, exist_ok=True)
            file = place / "asked.json"
            file.write_text(json.dumps(replace(one.recipe, run=run).to_json()))
            command = child_command(__file__, "train", file, one.ranks, one.change)
            subprocess.run(command, check=True, env=os.environ | {"HASTEN_MEASURE": "0"})
            lines = read(place / "run" / "train.jsonl")
        last = lines[-max(1, round(LAST * len(lines))) :]
        losses = [[line["step"], line["validation_loss"]] for line in lines if "validation_loss" in line]
        return {
            "steps": len(lines),
            "tokens": lines[-1]["tokens"],
            "loss": losses[-1][1],
            "training_loss": mean(line["loss"] for line in last),
            "kept_blocks": mean(line.get("kept_blocks", 1.0) for line in lines),
            "losses": losses,
        }


def train_child(file: str, ranks: str, change: str = "") -> None:
    """In a process of its own: one run."""
    recipe = Recipe.from_json(json.loads(Path(file).read_text()))
    if change:
        CHANGES[change]()
    if ranks == "1":
        train(recipe, progress=False, resume="never")
    else:
        train_in_turn(recipe, ranks=int(ranks))


def send_whole() -> None:
    """Average momenta exactly: only the variance is frozen."""

    def exact(self: CompressedInTurn, xs: Sequence[Tensor], kept: Tensor) -> Tensor:
        return torch.stack(list(xs)).mean(0) * kept

    CompressedInTurn.__call__ = exact  # type: ignore[method-assign]


def send_as_in_the_paper() -> None:
    """Send the momentum itself, not in units of its steps, and freeze the variance as it is."""
    onebit._LEAST = 0.0
    onebit.OneBitOptimizer._scaling = lambda self, state, group: torch.ones(())  # type: ignore[method-assign]


CHANGES = {"exact": send_whole, "paper": send_as_in_the_paper}


@dataclass(frozen=True, kw_only=True)
class OneBit(EqualSteps):
    """One-bit optimizers by the length of their warm-up, as two ranks would run them."""

    result = "onebit-steps"
    share: float = 0.164
    """Share of the steps after which the variance is frozen; the papers' for BERT by default."""
    lamb_rate: float = 1e-2

    def contestants(self) -> Iterator[Contestant]:
        yield self.contestant("adamw", None)
        for change in ("", "exact", "paper"):
            yield self.contestant("onebit-adam", self.share, change)
        yield self.contestant("onebit-adam", 0.5)
        yield self.contestant("lamb", None)
        yield self.contestant("onebit-lamb", self.share)

    def contestant(self, kind: Any, share: float | None, change: str = "") -> Contestant:
        freeze = None if share is None else round(share * self.steps)
        rate = self.lamb_rate if kind.endswith("lamb") else self.learning_rate
        optimizer = Optimizer(kind=kind, learning_rate=rate, beta2=0.999, freeze_after=freeze)
        name = " ".join([kind, *([] if share is None else [f"{share:.1%}"]), *([change] if change else [])])
        facts = {"kind": kind, "share": share, "change": change}
        return Contestant(name=name, recipe=self.recipe(self.steps, optimizer), facts=facts, ranks=2, change=change)


@dataclass(frozen=True, kw_only=True)
class Dropping(EqualSteps):
    """Layer dropping and none, at several rates, for equal steps and for equal FLOPs."""

    result = "layer-dropping-steps"
    layers: int = 12
    batch_size: int = 8
    steps: int = 400
    rates: tuple[float, ...] = (1.0, 2.0)
    """Times the learning rate."""
    theta: float = 0.5

    def contestants(self) -> Iterator[Contestant]:
        longer = round(self.steps / self.cost())
        for rate in self.rates:
            yield self.contestant("no dropping", rate, self.steps, None)
            yield self.contestant("dropping", rate, self.steps, self.theta)
            yield self.contestant("dropping, equal FLOPs", rate, longer, self.theta)

    def contestant(self, name: str, rate: float, steps: int, theta: float | None) -> Contestant:
        optimizer = Optimizer(learning_rate=rate * self.learning_rate)
        recipe = self.recipe(steps, optimizer, theta)
        facts = {"way": name, "rate": optimizer.learning_rate, "layer_drop": theta}
        return Contestant(name=f"{name}, rate × {rate:g}", recipe=recipe, facts=facts)

    def cost(self) -> float:
        """FLOPs of a step with dropping over those of one without, of a whole run."""
        decay = Techniques().layer_drop_decay
        now = [theta(step, total=self.steps, floor=self.theta, decay=decay) for step in range(self.steps)]
        kept = mean(mean(keep_probabilities(self.layers, theta=one)) for one in now)
        shape = self.recipe(self.steps, Optimizer()).model
        config = shape_config(shape, vocab_size=self.vocab_size, positions=self.context)
        whole = training_flops_per_token(config, self.context)
        return training_flops_per_token(config, self.context, kept=kept) / whole


def at(row: Mapping[str, Any], share: float) -> float:
    """The validation loss after a share of the steps, at which it was measured."""
    return next(loss for step, loss in row["losses"] if step == round(share * row["steps"]))


POINTS = (0.2, 0.4, 0.6, 0.8, 1.0)


def onebit_table(report: Report) -> str:
    """Gaps to the optimizer without compression, of the same seed, by the share of the steps."""
    rows, found = [], {(row["name"], row["seed"]): row for row in report["rows"]}
    for (name, seed), row in found.items():
        cells = [name, str(seed), "" if row["share"] is None else f"{round(row['share'] * row['steps']):,}"]
        base = found.get((BASES.get(row["kind"], ""), seed))
        gaps = [""] * len(POINTS) if base is None else [f"{at(row, one) / at(base, one) - 1:+.2%}" for one in POINTS]
        rows.append([*cells, f"{row['loss']:.4f}", *gaps])
    head = ["", "seed", "frozen after", "loss at the end", *(f"gap at {one:.0%}" for one in POINTS)]
    return markdown(head, rows)


def dropping_table(report: Report) -> str:
    """Losses at the end, means over seeds, beside those of the best run without dropping."""
    names: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        names.setdefault(row["name"], []).append(row)
    best = min(mean(one["loss"] for one in own) for own in names.values() if own[0]["layer_drop"] is None)
    rows = []
    for name, own in names.items():
        loss = mean(one["loss"] for one in own)
        cells = [name, f"{own[0]['rate']:.0e}", f"{mean(one['kept_blocks'] for one in own):.0%}"]
        cells += [f"{own[0]['steps']:,}", f"{own[0]['tokens']:,}", f"{loss:.4f}", f"{loss / best - 1:+.2%}"]
        rows.append([*cells, " ".join(f"{one['loss']:.3f}" for one in own)])
    head = ["", "rate", "blocks run", "steps", "tokens", "validation loss", "to the best without", "by seed"]
    return markdown(head, rows)


TABLES: dict[str, Table] = {
    "onebit-steps": onebit_table,
    "onebit-steps-long": onebit_table,
    "layer-dropping-steps": dropping_table,
    "layer-dropping-steps-43m": dropping_table,
}


if __name__ == "__main__":
    main({"onebit": OneBit, "layer-dropping": Dropping}, TABLES, {"train": train_child})
