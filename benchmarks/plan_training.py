"""Ways to train that `hasten plan` proposes, beside the memory that `hasten train` takes with them under a limit.

    python benchmarks/plan_training.py --output benchmarks/results/plan-training.json
    python benchmarks/plan_training.py --cases "QLoRA" "ZeRO 1" --output …            # some of them again

Each case asks for the ways as `hasten plan MODEL --goal throughput` does and runs the first one with `hasten train`,
to its written model. The processes may have no more than the plan says, 15%, and what a plan sets aside for a process
(in a control group, else RLIMIT_DATA). Measured is the peak of private memory (RssAnon and RssShmem, read every 5 ms)
of the process that has most, above that of a process which has imported torch; predicted are the bytes of the plan.
"""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
from zero import BASELINE, group_of, held_to, private_memory

from hasten.bench.plan import PlanOptions
from hasten.bench.training_choices import Way, choose_training
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import child_command, last_json
from hasten.planning.cost import parameters
from hasten.planning.memory import PROCESS_BYTES
from hasten.training.recipe import Parallel, Techniques

NEAR = 0.15  # how far a prediction may be off
SHAPE = "--model.layers 8 --model.hidden-size 1024 --model.heads 16 --model.feed-forward 2752 --model.max-positions 512"
DATA = ("--data.source", Path(__file__).resolve().parents[1] / "src" / "hasten", "--data.validation-fraction", "0")
VOCABULARY = 4096
RECOMPUTE = {name: Techniques(compile=False, checkpointing=name) for name in ("none", "selective", "full")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a plan is asked for. begins: with random weights, with those of a folder, or with a folder's in int4."""

    options: PlanOptions
    begins: Literal["random", "folder", "int4"] = "random"


def case(use: str, rows: int, length: int, *, recompute: str = "none", begins: Any = None, **options: Any) -> Case:
    """A case of these rows of a rank."""
    made = {"use": use, "batch_size": rows, "length": length, "techniques": RECOMPUTE[recompute], "goal": "throughput"}
    return Case(options=PlanOptions(**made | options), begins=begins or "random")


CASES = {
    "all weights": case("train", 4, 256),
    "16-bit weights, float32 masters": case("train", 4, 256, parallel=Parallel(policy="float32-masters")),
    "selective recomputation, 2 micro-batches": case("train", 4, 256, recompute="selective", accumulation=2),
    "finetuning, full recomputation": case("finetune", 8, 256, recompute="full", begins="folder"),
    "ZeRO 1": case("train", 4, 256, gpus=2, parallel=Parallel(zero=1)),
    "ZeRO 2, 2 micro-batches": case("train", 4, 256, gpus=2, accumulation=2, parallel=Parallel(zero=2)),
    "ZeRO 3, masters, full recomputation": case(
        "train", 8, 256, gpus=2, recompute="full", parallel=Parallel(zero=3, policy="float32-masters")
    ),
    "ZeRO 3, optimizer offloaded": case("train", 4, 256, gpus=2, parallel=Parallel(zero=3, offload="optimizer")),
    "LoRA": case("lora", 8, 256, begins="folder"),
    "QLoRA": case("lora", 8, 256, begins="int4"),
    "QLoRA, ZeRO 3": case("lora", 8, 256, gpus=2, begins="int4", parallel=Parallel(zero=3)),
}


@dataclass(frozen=True, kw_only=True)
class PlannedTraining(Script):
    """Compare the memory of proposed ways to train with what they take, each under its limit."""

    result = "plan-training"
    cases: tuple[str, ...] = ()
    """Some of the cases, measured again; all by default."""
    predictions: bool = False
    """Only predict again, beside what was measured before (after the count has changed)."""

    def measure(self) -> Report:
        found = self.before()
        rows = {row["case"]: row for row in found.get("rows", [])}
        baseline = last_json([sys.executable, "-c", BASELINE])
        with TemporaryDirectory(prefix="hasten-plan-") as place:
            folders = made_folders(Path(place))
            for name in self.cases or CASES:
                way = choose_training(str(folders[CASES[name].begins]), CASES[name].options).best
                row = {"case": name, **predicted(way)}
                if not self.predictions:
                    row |= measured(CASES[name], row, folders, Path(place), baseline)
                rows[name] = rows.get(name, {}) | row
                ratio = rows[name]["predicted_bytes"] / rows[name].get("measured_bytes", 1)
                print(f"{ratio:.2f} {name}: {way.options}", flush=True)
                found = {"config": way.plan.config.source, "rows": [rows[name] for name in CASES if name in rows]}
                self.write(found)
        return found


def predicted(way: Way) -> dict[str, Any]:
    """The proposal and its bytes."""
    memory = way.plan.memory
    return {
        "options": way.options,
        "processes": way.devices,
        "parameters": parameters(way.plan.config).total,
        "predicted_bytes": memory.peak,
        "moment": memory.moment,
        "use": asdict(way.use),
        "parts": memory.at_peak,
        "allowed_bytes": int((1 + NEAR) * memory.peak) + PROCESS_BYTES,
    }


def made_folders(place: Path) -> dict[str, Path]:
    """A model of one step with its tokenizer, the same in int4, and its config alone."""
    data = [*DATA, "--data.vocab-size", VOCABULARY, "--data.batch-size", 1, "--steps", 1]
    run = ["--run.folder", place, "--name", "base", "--techniques.no-compile"]
    hasten("train", "demo", *SHAPE.split(), *data, *run)
    folders = {"folder": place / "base" / "model", "int4": place / "int4", "random": place / "random"}
    hasten("quantize", folders["folder"], "--output", folders["int4"], "--scheme", "int4")
    folders["random"].mkdir()
    shutil.copy(folders["folder"] / "config.json", folders["random"])
    return folders


def hasten(*arguments: object) -> None:
    """Run a command of hasten, with its output only where it fails."""
    command = [sys.executable, "-m", "hasten", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def measured(
    case: Case, proposal: dict[str, Any], folders: dict[str, Path], place: Path, baseline: int
) -> dict[str, Any]:
    """Train two steps as proposed; the peak of the process that has most, in bytes above the baseline."""
    recipe = ["finetune", "--init", str(folders[case.begins])]
    if case.begins == "random":
        recipe = ["demo", "--data.tokenizer", str(folders["folder"]), *SHAPE.split()]
    count = proposal["processes"]
    recipe += [*proposal["options"].split(), "--techniques.no-compile", "--no-progress", *map(str, DATA)]
    recipe += ["--run.folder", str(place), "--name", "measured", "--run.threads", str(2 // count), "--steps", "2"]
    # Beside the ranks there is the process that starts them, which imports torch too.
    limit = count * (baseline + proposal["allowed_bytes"]) + (baseline if count > 1 else 0)
    begun, how = time.monotonic(), place / "held"
    command = child_command(__file__, "held", how, limit, "train", *recipe, "--resume", "never")
    with (place / "words").open("w+") as words:
        with subprocess.Popen(command, stdout=words, stderr=words) as process:
            peak = peak_of(process)
        if process.returncode:
            words.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{words.read()[-2000:]}")
    with suppress(OSError):
        group_of(process.pid).rmdir()
    found = {"measured_bytes": peak - baseline, "baseline": baseline, "limit": limit, "held_by": how.read_text()}
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def peak_of(process: subprocess.Popen[bytes]) -> int:
    """The most private memory that one of a process's family has until it ends, in bytes."""
    peak = 0
    while process.poll() is None:
        family = [process.pid]
        with suppress(psutil.Error):
            family += [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        for _ in range(50):
            for one in family:
                with suppress(OSError):
                    peak = max(peak, private_memory(one))
            time.sleep(0.005)
    return peak


def held(place: str, limit: str, *command: str) -> None:
    """A command of hasten in this process, which may have no more than `limit` bytes."""
    Path(place).write_text(held_to(int(limit)))
    os.execv(sys.executable, [sys.executable, "-m", "hasten", *command])


def table(report: Report) -> str:
    """Predicted and measured bytes of a process, in MB."""
    rows, near = [], []
    for row in report["rows"]:
        ratio = row["predicted_bytes"] / row["measured_bytes"]
        near.append(abs(ratio - 1) <= NEAR)
        sizes = [f"{row[key] / 1e6:,.0f}" for key in ("predicted_bytes", "measured_bytes")]
        shown = f"{ratio:.2f}" if near[-1] else f"**{ratio:.2f}**"
        rows.append([row["case"], str(row["processes"]), row["moment"], *sizes, shown])
    head = ["", "processes", "peak", "predicted, MB", "measured, MB", "ratio"]
    return f"{markdown(head, rows, left=3)}\n\n{sum(near)} of {len(near)} within {NEAR:.0%}."


TABLES: dict[str, Table] = {"plan-training": table}


if __name__ == "__main__":
    main({"compare": PlannedTraining}, TABLES, {"held": held})
