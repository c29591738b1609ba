"""What training while rounded gets back of what rounding costs, beside the best ways that do not train.

    python benchmarks/qat.py --model runs/code-25m/model --output benchmarks/results/qat.json

A finished model is trained on for the same few steps with plain weights (the side that all are compared with) and while
rounded, from rounding to nearest and from what gptq makes of it. The plain one is then rounded to nearest, and by the
other methods, with calibration text that it was trained on. "taught": what gptq makes of the plain one is trained while
rounded, on the same tokens again, with the plain one as its teacher; "taught once": what gptq makes of the given model,
so that it sees the tokens once. All are scored on the same held-out files; the cost is their loss above the plain
one's.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

from precision import held_out

from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import hasten_json
from quantization import METHODS, seen, write_texts

CASES = {"int3 g32": (3, 32), "int4 row": (4, 0), "int2 g32": (2, 32)}
BEGUN = "qat from gptq"  # which begins with the integers and scales of the given model by gptq
TAUGHT = "taught"  # which begins with those of the plain one that was trained on
ONCE = "taught once"  # which has that teacher, but begins as BEGUN does
FIRST = ("qat", BEGUN, ONCE, "gptaq")  # are measured with the first seed only


@dataclass(frozen=True, kw_only=True)
class QatBenchmark(Script):
    """Train on, round, and score."""

    result = "qat"
    model: Path
    """The model's folder, in plain weights."""
    recipe: str = "code-25m"
    """The recipe it was trained with: it says on which text, and which files are held out."""
    steps: int = 80
    """Steps of further training."""
    batch_size: int = 8
    optimizer: str = "adamw"
    """Optimizer of the further training."""
    learning_rate: float = 5e-5
    """Falling to none."""
    qat_rate: float | None = None
    """While rounded, where it is another."""
    taught_rate: float = 2e-4
    """Learning rate with a teacher."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """int2 is measured with the first only."""
    cases: tuple[str, ...] = tuple(CASES)
    trained: tuple[str, ...] = ("qat", BEGUN, ONCE, TAUGHT)
    """Ways of training while rounded."""
    methods: tuple[str, ...] = ("rtn", "gptq", "gptaq")
    """Without training."""
    threads: int | None = None
    """CPU threads of training; by default as many as are free."""
    compile: bool = True
    """Compile training's blocks: not worth it for a small model and few steps."""
    kilobytes: int = 150
    """Size of the held-out text."""
    samples: int = 64
    """Calibration samples."""
    length: int = 512
    """Tokens of a sample."""
    work: Path | None = None
    """Where the trained models are kept, so that another run goes on; a temporary folder by default."""
    minutes: float = 1e9
    """Begin nothing after this many; the next run with the same output and work folder goes on."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-qat-") as name:
            place = self.work or Path(name)
            place.mkdir(parents=True, exist_ok=True)
            measuring = Measuring(self, place)
            if measuring.all():
                print(f"--minutes {self.minutes:g} are over: the same command goes on", flush=True)
            return measuring.found()

    def settings(self) -> dict[str, Any]:
        """All but where things lie."""
        names = ("recipe", "steps", "batch_size", "optimizer", "learning_rate", "qat_rate", "taught_rate", "kilobytes")
        names += ("samples", *(["length"] if self.length != 512 else []))
        return {name: getattr(self, name) for name in names}


class Measuring:
    """The rows so far, and how the next one is made."""

    def __init__(self, options: QatBenchmark, place: Path) -> None:
        self.options, self.place, self.rows = options, place, []
        self.end = time.monotonic() + 60 * options.minutes
        before = options.before()
        if before:
            if before["settings"] != options.settings():
                raise SystemExit(f"{options.output} has rows of other settings: move it away, or give the same")
            self.rows: list[dict[str, Any]] = before["rows"]
        self.held = write_texts(place / "held-out.jsonl", held_out(options.kilobytes * 1000, options.recipe))
        self.known = write_texts(place / "calibration.jsonl", seen(4_000_000, options.recipe))

    def all(self) -> bool:
        """Make what is missing; whether the minutes ended before."""
        for seed in self.options.seeds:
            for case in ("plain", *self.options.cases):
                if seed != self.options.seeds[0] and case.startswith("int2"):
                    continue
                for way in self.ways(case, first=seed == self.options.seeds[0]):
                    if any((row["case"], row["way"], row["seed"]) == (case, way, seed) for row in self.rows):
                        continue
                    if time.monotonic() > self.end:
                        return True
                    self.add({"case": case, "way": way, "seed": seed} | self.measured(case, way, seed))
        return False

    def ways(self, case: str, *, first: bool) -> list[str]:
        """The ways to measure of a case, with the first seed or a further one."""
        if case == "plain":
            return ["trained"]
        ways = [*self.options.trained, *self.options.methods]
        if CASES[case][0] == 2:  # which has levels of its own
            ways = [way for way in ways if way not in (BEGUN, ONCE, TAUGHT)]
        return [way for way in ways if first or way not in FIRST]

    def measured(self, case: str, way: str, seed: int) -> dict[str, Any]:
        """The loss, that of the plain model beside it, and what training took."""
        if case == "plain":
            return self.trained(self.options.model, f"plain-{seed}", seed, self.options.learning_rate, [])
        (bits, group), plain = CASES[case], self.place / "runs" / f"plain-{seed}" / "model"
        base = {"plain": next(row["loss"] for row in self.rows if (row["case"], row["seed"]) == ("plain", seed))}
        if way in self.options.trained:
            options = ["--qat.bits", str(bits), "--qat.group-size", str(group)]
            options += ["--qat.activations", "float"] if bits != 3 else []  # 3 bits run as plain weights
            rate, model = self.options.qat_rate or self.options.learning_rate, self.options.model
            begin = self.place / f"begin-{bits}-{group}-{self.options.samples}"
            if way in (ONCE, TAUGHT):
                rate = self.options.taught_rate
                options += ["--teacher", str(plain)]
            if way == TAUGHT:
                model, begin = plain, self.rounded_plain(case, "gptq", seed)
            if way != "qat":
                if not begin.exists():
                    self.quantized(model, begin, case, "gptq")
                options += ["--qat.init", str(begin)]
            return self.trained(model, f"{way.replace(' ', '-')}-{bits}-{group}-{seed}", seed, rate, options) | base
        folder = self.rounded_plain(case, way, seed)
        took = folder.with_name(folder.name + ".json")  # of a folder that was made before they were kept: not known
        return {"loss": scored(folder, self.held)} | (json.loads(took.read_text()) if took.exists() else {}) | base

    def rounded_plain(self, case: str, method: str, seed: int) -> Path:
        """The plain model by a method without training, to be scored and trained on."""
        bits, group = CASES[case]
        out = self.place / f"{method}-{bits}-{group}-{self.options.samples}-plain-{seed}"
        if not out.exists():
            self.quantized(self.place / "runs" / f"plain-{seed}" / "model", out, case, method)
        return out

    def quantized(self, model: Path, out: Path, case: str, method: str) -> None:
        """Without training."""
        bits, group = CASES[case]
        options = ["--scheme", f"int{bits}", "--group-size", str(group), "--lm-head", "none", *METHODS[method]]
        options += ["--activations", "float", "--output", str(out)]
        if method != "rtn":
            options += ["--calibration", str(self.known), "--samples", str(self.options.samples)]
            options += ["--length", str(self.options.length)]
        found = hasten_json(["quantize", str(model), *options])
        facts = {"seconds": found["seconds"], "peak_memory_bytes": found["peak_memory_bytes"]}
        out.with_name(out.name + ".json").write_text(json.dumps(facts))

    def add(self, row: dict[str, Any]) -> None:
        """Print and write."""
        self.rows.append(row)
        print(row, flush=True)
        self.options.write(self.found())

    def found(self) -> Report:
        return {"rows": self.rows, "recovered": recovered(self.rows)}

    def trained(self, model: Path, name: str, seed: int, rate: float, options: list[str]) -> dict[str, Any]:
        """Train a model further: its loss, the seconds of its steps, and the process's peak memory."""
        asked, runs = self.options, self.place / "runs"
        shutil.rmtree(runs / name, ignore_errors=True)
        own: dict[str, Any] = {
            "--init": model,
            "--name": name,
            "--data.batch-size": asked.batch_size,
            "--optimizer.kind": asked.optimizer,
            "--optimizer.learning-rate": rate,
            "--schedule.warmup-steps": min(20, asked.steps // 4),
            "--schedule.kind": "cosine",
            "--schedule.final-fraction": 0.0,
            "--run.steps": asked.steps,
            "--run.validate-every": asked.steps,
            "--run.validation-batches": 1,
            "--run.checkpoint-every": asked.steps,
            "--run.seed": seed,
            "--run.folder": runs,
        }
        own["--run.threads"] = asked.threads
        given = [str(one) for pair in own.items() if pair[1] is not None for one in pair]
        given += [] if asked.compile else ["--techniques.no-compile"]
        child = subprocess.Popen([sys.executable, "-m", "hasten", "train", asked.recipe, *given, *options])
        _, status, used = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"training {name} ended with status {status}")
        last = json.loads((runs / name / "train.jsonl").read_text().splitlines()[-1])
        loss = scored(runs / name / "model", self.held)
        return {"loss": loss, "seconds": last["seconds"], "peak_memory_bytes": used.ru_maxrss * 1024}


def scored(folder: Path, held: Path) -> float:
    """Held-out loss in nats a token, through the kernels that serve it."""
    return log(hasten_json(["eval", str(folder), "--text", str(held)])["perplexity"])


def recovered(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The share of rounding's added loss that each way gets back, by case and way, over seeds."""
    nearest = {(row["case"], row["seed"]): row["loss"] for row in rows if row["way"] == "rtn"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["way"] not in ("trained", "rtn") and (row["case"], row["seed"]) in nearest:
            cost = nearest[row["case"], row["seed"]]
            share = (cost - row["loss"]) / (cost - row["plain"])
            found.setdefault(row["case"], {}).setdefault(row["way"], []).append(share)
    return {case: {way: mean(shares) for way, shares in ways.items()} for case, ways in found.items()}


WAYS = ("trained", "rtn", "gptq", "gptaq", "qat", "qat from gptq", "taught", "taught once")


def loss_table(report: Report) -> str:
    """Held-out losses, means over the seeds, and what of rounding's loss each way gets back."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in report["rows"]:
        if row["way"] in WAYS:  # the file has ways that hasten had once
            found.setdefault(row["case"], {}).setdefault(row["way"], []).append(row)
    plain = [row["loss"] for row in found["plain"]["trained"]]
    rows = [["plain, trained on", "", f"{sum(plain) / len(plain):.4f}", "", ""]]
    for case, ways in found.items():
        if case == "plain":
            continue
        nearest = {row["seed"]: row["loss"] for row in ways["rtn"]}
        for way, own in ways.items():
            loss = sum(row["loss"] for row in own) / len(own)
            shares = [(nearest[row["seed"]] - row["loss"]) / (nearest[row["seed"]] - row["plain"]) for row in own]
            share = "" if way == "rtn" else f"{sum(shares) / len(shares):.0%}"
            spread = "" if way == "rtn" or len(shares) == 1 else f"{min(shares):.0%} to {max(shares):.0%}"
            rows.append([case, way, f"{loss:.4f}", share, spread])
    return markdown(["weights", "way", "held-out loss", "of rounding's loss got back", "over seeds"], rows, left=2)


def cost_table(report: Report) -> str:
    """Seconds and memory of training, plain and while rounded: of each the seed that other programs disturbed least.

    All that is taught costs the same, from wherever it begins.
    """
    ways: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["rows"]:
        name = row["case"], row["way"]
        own = "seconds" in row and not row["way"].startswith("taught ")
        if own and (name not in ways or row["seconds"] < ways[name]["seconds"]):
            ways[name] = row
    rows, plain = [], ways["plain", "trained"]
    for (case, way), row in ways.items():
        cells = [f"{case}, {way}"]
        for field, unit in (("seconds", "{:.0f}"), ("peak_memory_bytes", "{:.2f}")):
            size = row[field] / (1 if field == "seconds" else 1e9)
            cells += [unit.format(size), f"{row[field] / plain[field]:.2f}×"]
        rows.append(cells)
    return markdown(["", "seconds", "to plain", "peak, GB", "to plain"], rows)


TABLES: dict[str, Table] = {
    **dict.fromkeys(("qat", "qat-128", "qat-bits"), loss_table),
    "qat cost": cost_table,
}


if __name__ == "__main__":
    main({"compare": QatBenchmark}, TABLES)
