"""What writing a checkpoint takes beside training: resident memory of each of two ranks, in shares of what it writes.

    python benchmarks/checkpoint_memory.py        # -> benchmarks/results/checkpoint-memory.json

Moments: when `save` has returned, which is when training goes on; and the most until the checkpoint counts. A
synchronous one may take 0.1 shards, one in the background, which stages a copy, 1.1. On a GPU the tensor that is being
written is copied to the host: the largest one stands beside. Then steps are taken with and without checkpoints.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

RESULT = Path(__file__).parent / "results" / "checkpoint-memory.json"
SHAPE = {"layers": 8, "hidden_size": 512, "heads": 8}
VOCABULARY, CONTEXT, ROWS = 4096, 16, 2
STEPS, EVERY = 16, 4
CASES = [{"zero": zero, "background": background} for zero in (0, 3) for background in (False, True)]
ALLOWED = {False: 0.1, True: 1.1}


def measure(zero: int, background: bool, ranks: Any, folder: Path) -> dict[str, Any]:
    """One layout on this rank."""
    import torch

    from hasten.data import Batch
    from hasten.machine import peak_memory, process_memory, reset_peak_memory
    from hasten.model.initialize import initialize
    from hasten.training import build, checkpoints
    from hasten.training.checkpoint_state import RandomState, TrainingState
    from hasten.training.recipe import Data, Parallel, Recipe, Shape, Techniques

    techniques = Techniques(precision="float32", compile=False, keep_memory=False)
    data = Data(batch_size=ROWS, context=CONTEXT)
    recipe = Recipe(name="memory", model=Shape(**SHAPE), data=data, techniques=techniques)
    recipe = replace(recipe, parallel=Parallel(zero=zero))  # type: ignore[arg-type]
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=CONTEXT)
    step = build.training_step(initialize(config, seed=0), recipe, ranks=ranks)
    tokens = torch.randint(VOCABULARY, (ranks.rows(ROWS), CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)]
    step.run(batches)
    values = {"progress": TrainingState(step=1).to_json(), "data": "", "scaler": {}, "recipe": recipe.to_json()}
    random = RandomState.capture(torch.device("cpu"))

    def save() -> checkpoints.Pending | None:
        about = {"placement": step.where, "optimizer": step.optimizer, "random": random, "values": values}
        return checkpoints.save(folder, **about, background=background)  # type: ignore[arg-type]

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap would hide what is taken
    reset_peak_memory()
    before = process_memory()
    pending = save()
    returned = process_memory()
    sizes = [] if pending is None else [part.data.nbytes for own in pending.files.values() for part in own]
    if pending is not None:
        pending.finish()
    peak = peak_memory() - before
    written = sum(path.stat().st_size for path in folder.glob(f"*-{ranks.rank}.safetensors"))
    found = {"zero": zero, "background": background, "rank": ranks.rank, "shard": written, "peak": peak}
    found |= {"returned": returned - before} | ({"largest": max(sizes)} if sizes else {})
    alone, _ = steps(step, batches, lambda: None, every=STEPS + 1)
    waits: list[float] = []

    def timed() -> checkpoints.Pending | None:
        start, pending = time.perf_counter(), save()
        waits.append(time.perf_counter() - start)
        return pending

    together, meanwhile = steps(step, batches, timed, every=EVERY)
    step_seconds, lost = alone / STEPS, (together - alone) / len(waits)
    return found | {"seconds": median(waits), "steps": meanwhile, "step_seconds": step_seconds, "lost_seconds": lost}


def steps(step: Any, batches: Any, save: Callable[[], Any], *, every: int) -> tuple[float, int]:
    """Seconds of `STEPS` steps with a checkpoint after each `every` of them, and how many were taken while one was
    written. As in the loop of training, one counts after the first step that finds it written."""
    start, pending, meanwhile = time.perf_counter(), None, 0
    for number in range(1, STEPS + 1):
        step.run(batches)
        if pending is not None:
            meanwhile += 1
            if pending.written():
                pending = pending.finish()
        if number % every == 0:
            if pending is not None:
                pending.finish()
            pending = save()
    if pending is not None:
        pending.finish()
    return time.perf_counter() - start, meanwhile


def child(out: str) -> None:
    """One rank: every case, and a file with its lines."""
    import torch

    from hasten.distributed.launch import joined

    torch.set_num_threads(1)
    with joined() as ranks:
        found = []
        for number, case in enumerate(CASES):
            found.append(measure(**case, ranks=ranks, folder=Path(out) / str(number)))  # type: ignore[arg-type]
            gc.collect()
        (Path(out) / f"{ranks.rank}.json").write_text(json.dumps(found))


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for docs/distributed.md, of the rank that takes more."""
    rows = []
    for case in CASES:
        own = [row for row in report["rows"] if all(row[key] == value for key, value in case.items())]
        worst = max(own, key=lambda row: row["peak"] / row["shard"])
        shown = [f"{worst[key] / worst['shard']:.2f}" for key in ("returned", "peak")]
        how = "in the background" if case["background"] else "synchronous"
        shown += [f"{ALLOWED[bool(case['background'])]}", f"{worst['step_seconds']:.2f} s"]
        shown += [f"{worst['seconds']:.2f} s", f"{worst['lost_seconds']:.2f} s", str(worst["steps"])]
        rows.append([f"zero {case['zero']}, {how}", f"{worst['shard'] / 1e6:.0f}", *shown])
    head = ["two ranks", "shard, MB", "when training goes on, shards", "at the peak, shards", "at most"]
    return [*head, "a step", "training waits", "lost in all", f"steps while {STEPS // EVERY} are written"], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*command, __file__, "--child", folder], check=True, env=os.environ | {"HASTEN_MEASURE": "0"})
        rows = [row for rank in range(2) for row in json.loads((Path(folder) / f"{rank}.json").read_text())]
    arguments.json.write_text(json.dumps({"kind": "checkpoint memory", "shape": SHAPE, "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row["peak"] > ALLOWED[row["background"]] * row["shard"]]
    print(*rows, sep="\n")
    if wrong:
        raise SystemExit(f"more than allowed: {wrong}")


if __name__ == "__main__":
    main()
