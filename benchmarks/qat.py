"""What training while rounded gets back of what rounding costs, beside the best ways that do not train.

    python benchmarks/qat.py --model runs/code-25m/model --output benchmarks/results/qat.json

A finished model is trained on for the same few steps with plain weights (the side that all are held against) and while
rounded, three seeds each. The plain one is then rounded to nearest, and by gptq and sign rounding, with calibration
text that it was trained on. All are scored on the same held-out files; the cost is their loss above the plain one's.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from quantize_perplexity import held_out
from quantize_quality import METHODS, command, seen, write_texts

CASES = {"int3 g32": (3, 32), "int4 row": (4, 0), "int2 g32": (2, 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QatBenchmark:
    """Measure, print, and write."""

    model: Path
    """The model's folder, in plain weights."""

    recipe: str = "code-25m"
    """The recipe it was trained with: it says on which text, and which files are held out."""

    steps: int = 80
    """Of training on."""

    batch_size: int = 8
    learning_rate: float = 2e-4
    """Of AdamW, falling to none."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """int2 is measured with the first only."""

    cases: tuple[str, ...] = tuple(CASES)
    methods: tuple[str, ...] = ("rtn", "gptq", "sign")
    """Without training; the others than rtn with the first seed's model only."""

    kilobytes: int = 150
    """Of held-out text."""

    samples: int = 64
    """Of calibration, of 512 tokens."""

    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        rows: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="hasten-qat-") as name:
            place = Path(name)
            held = write_texts(place / "held-out.jsonl", held_out(self.kilobytes * 1000, self.recipe))
            known = write_texts(place / "calibration.jsonl", seen(4_000_000, self.recipe))
            for seed in self.seeds:
                plain, seconds, peak = self.trained(place, f"plain-{seed}", seed, [])
                base = scored(plain, held)
                rows.append({"case": "plain", "way": "trained", "seed": seed, "loss": base, "seconds": seconds})
                rows[-1]["peak_memory_bytes"] = peak
                print(rows[-1], flush=True)
                for case in self.cases:
                    bits, group = CASES[case]
                    if seed != self.seeds[0] and bits == 2:
                        continue
                    options = ["--qat.bits", str(bits), "--qat.group-size", str(group), "--qat.activations", "float"]
                    folder, seconds, peak = self.trained(place, f"qat{bits}-{seed}", seed, options)
                    row = {"case": case, "way": "qat", "seed": seed, "loss": scored(folder, held), "plain": base}
                    rows.append(row | {"seconds": seconds, "peak_memory_bytes": peak})
                    print(rows[-1], flush=True)
                    for method in self.methods if seed == self.seeds[0] else self.methods[:1]:
                        options = ["--scheme", f"int{bits}", "--group-size", str(group), "--lm-head", "none"]
                        options += [*METHODS[method], "--activations", "float", "--output", str(place / "out")]
                        if method != "rtn":
                            options += ["--calibration", str(known), "--samples", str(self.samples)]
                        command(["quantize", str(plain), *options])
                        loss = scored(place / "out", held)
                        rows.append({"case": case, "way": method, "seed": seed, "loss": loss, "plain": base})
                        print(rows[-1], flush=True)
                        shutil.rmtree(place / "out")
        result = {"schema": 1, "machine": describe().to_json(), "settings": self.settings(), "rows": rows}
        result["recovered"] = recovered(rows)
        print(json.dumps(result["recovered"], indent=1))
        if self.output is not None:
            write_json(self.output, result)

    def settings(self) -> dict[str, Any]:
        """All but where things lie."""
        names = ("recipe", "steps", "batch_size", "learning_rate", "kilobytes", "samples")
        return {name: getattr(self, name) for name in names}

    def trained(self, place: Path, name: str, seed: int, options: list[str]) -> tuple[Path, float, int]:
        """The folder of a model that is trained on, the seconds of its steps, and the process's peak memory."""
        own = {
            "--init": self.model,
            "--name": name,
            "--data.batch-size": self.batch_size,
            "--optimizer.kind": "adamw",
            "--optimizer.learning-rate": self.learning_rate,
            "--schedule.warmup-steps": 5,
            "--run.steps": self.steps,
            "--run.validate-every": self.steps,
            "--run.validation-batches": 1,
            "--run.checkpoint-every": self.steps,
            "--run.seed": seed,
            "--run.folder": place / "runs",
        }
        given = [str(one) for pair in own.items() for one in pair]
        child = subprocess.Popen([sys.executable, "-m", "hasten", "train", self.recipe, *given, *options])
        _, status, used = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"training {name} ended with status {status}")
        folder = place / "runs" / name
        last = json.loads((folder / "train.jsonl").read_text().splitlines()[-1])
        return folder / "model", last["seconds"], used.ru_maxrss * 1024


def scored(folder: Path, held: Path) -> float:
    """Held-out loss in nats a token, through the kernels that serve it."""
    from math import log

    return log(command(["eval", str(folder), "--text", str(held)])["perplexity"])


def recovered(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the loss that rounding to nearest adds, the share that each way gets back: by case and way, over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["way"] in ("trained", "rtn"):
            continue
        nearest = next(
            one["loss"] for one in rows if (one["case"], one["seed"], one["way"]) == (row["case"], row["seed"], "rtn")
        )
        share = (nearest - row["loss"]) / (nearest - row["plain"])
        found.setdefault(row["case"], {}).setdefault(row["way"], []).append(share)
    return {case: {way: mean(shares) for way, shares in ways.items()} for case, ways in found.items()}


if __name__ == "__main__":
    import tyro

    tyro.cli(QatBenchmark).run()
