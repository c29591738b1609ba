"""Two ranks beside one: how much of twice the speed is left, by stage, and what was to be expected.

    python benchmarks/scaling.py        # -> benchmarks/results/scaling.json, ten minutes

Each process has one thread and as many rows as the one alone. Expected is the step of two processes that have nothing
to do with each other (they share the machine's memory), and after it what a rank sends over the rate of each
collective, measured between the same processes: over gloo nothing is hidden behind computing. The same sum for GPUs,
on paper, from the table of devices: with all messages after the computing, and with all of them hidden behind it.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

RESULT = Path(__file__).parent / "results" / "scaling.json"
MESSAGE = 16 << 20  # bytes of a measured collective: about a bucket of DDP's
PAPER = [("gpt2-124m", 0, 8, 1024), ("gpt2-124m", 3, 8, 1024), ("llama-7b", 3, 2, 2048), ("llama-7b", 3, 8, 2048)]


class Collectives:
    """A rung that measures seconds of each collective, for a message of float32 of that many bytes in all."""

    def __init__(self, *, ranks: Any) -> None:
        import torch

        self.ranks, self.whole = ranks, torch.zeros(MESSAGE // 4)
        self.share = torch.zeros(MESSAGE // 4 // ranks.size)

    def measure(self) -> dict[str, float]:
        import torch.distributed as dist

        ways = {
            "reduce": lambda: dist.all_reduce(self.whole),
            "gather": lambda: dist.all_gather_into_tensor(self.whole, self.share),
            "scatter": lambda: dist.reduce_scatter_tensor(self.share, self.whole),
        }
        found = {}
        for name, way in ways.items():
            seconds = []
            for _ in range(5):
                dist.barrier()
                start = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - start)
            found[name] = median(seconds)
        return found


def measured(shape: str, rows: int, context: int, steps: int, rounds: int) -> dict[str, Any]:
    """One process, two apart, two ranks at every stage, in turns."""
    from hasten.bench.train import StepOptions, sent
    from hasten.distributed.ranks import Ranks
    from hasten.measure.process import Rung, RungRun
    from hasten.planning.cost import parameters
    from hasten.training.recipe import Parallel

    recipe, config = StepOptions(recipe=shape, sequence_length=context).recipe_and_config(rows)
    recipe = replace(recipe, techniques=replace(recipe.techniques, compile=False))

    def rung(name: str, processes: int, zero: int = 0) -> RungRun:
        own = replace(recipe, parallel=Parallel(zero=zero), data=replace(recipe.data, batch_size=rows * processes))
        arguments = {"recipe": own, "config": config, "steps": steps, "device": "cpu"}
        return RungRun(
            Rung(name, (), "hasten.bench.train:TrainRung", arguments, processes=processes, threads=processes, seed=0)
        )

    alone, apart = rung("one", 1), [rung(f"apart {number}", 1) for number in range(2)]
    ranked = [rung(f"zero {zero}", 2, zero) for zero in range(4)]
    links = RungRun(Rung("collectives", (), "scaling:Collectives", processes=2, threads=2))
    runs = [alone, *apart, *ranked, links]
    try:
        for run in runs:
            run.start()
        for turn in range(-1, rounds):  # the first is a warm-up
            for run in (alone, *ranked, links):
                run.measure(counts=turn >= 0)
            with ThreadPoolExecutor(2) as pool:
                for run in apart:
                    pool.submit(run.measure, counts=turn >= 0)
    finally:
        for run in runs:
            run.end()
    if errors := [f"{run.rung.name}: {run.error}" for run in runs if run.error]:
        raise SystemExit("\n".join(errors))

    def seconds(run: RungRun) -> list[float]:
        return [one["milliseconds_per_batch"] / 1000 for one in run.rounds]

    one, two = median(seconds(alone)), median(median(seconds(run)) for run in apart)
    rates = {name: MESSAGE / median(turn[name] for turn in links.rounds) for name in ("reduce", "gather", "scatter")}
    weights = 4 * parameters(config.padded_to(recipe.techniques.pad_vocabulary_to)).total
    found = []
    for zero, run in enumerate(ranked):
        volumes = sent(config, replace(recipe, parallel=Parallel(zero=zero)), Ranks(size=2)) * 2  # of whole messages
        messages = {"reduce": volumes / 2} if zero == 0 else {"scatter": weights, "gather": volumes - weights}
        expected = two + sum(size / rates[name] for name, size in messages.items())
        ratios = [a / b for a, b in zip(seconds(alone), seconds(run), strict=True)]
        found.append(
            {"stage": zero, "seconds": seconds(run), "efficiency": median(ratios), "expected": one / expected}
            | {"sent_bytes": volumes / 2}
        )
    return {
        "alone_seconds": seconds(alone),
        "apart_seconds": [seconds(run) for run in apart],
        "apart": one / two,
        "rates": rates,
        "rows": found,
    }


def on_paper(name: str, zero: int, rows: int, context: int, *, ranks: int = 8) -> dict[str, Any]:
    """A step of so many H100, by `hasten plan`'s formulas."""
    from hasten.planning.devices import REACHED, known_device
    from hasten.planning.memory import TrainingUse
    from hasten.planning.plan import training_phase
    from hasten.planning.shapes import shape_config

    device, config = known_device("h100"), shape_config(name)
    use = TrainingUse(batch_size=rows, length=context, dtype="bfloat16", zero=zero, ranks=ranks)
    limits = training_phase(config, use).limits(device)
    computing, link = max(limits["products"], limits["memory"]) / REACHED["cuda"]["step"], limits["link"]
    return {
        "model": name,
        "stage": zero,
        "ranks": ranks,
        "rows": rows,
        "context": context,
        "device": device.name,
        "computing_seconds": computing,
        "link_seconds": link,
        "after": computing / (computing + link),
        "hidden": computing / max(computing, link),
    }


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Measured, for docs/distributed.md."""
    found = report["measured"]
    head = ["two ranks", "step", "of twice one's speed", "expected", "sent in a step"]
    apart = f"{median(map(median, found['apart_seconds'])):.2f} s"
    rows = [["nothing in common", apart, f"{found['apart']:.0%}", "", ""]]
    for one in found["rows"]:
        shares = [f"{one['efficiency']:.0%}", f"{one['expected']:.0%}"]
        step, sent = f"{median(one['seconds']):.2f} s", f"{one['sent_bytes'] / 1e6:.0f} MB"
        rows.append([f"zero {one['stage']}", step, *shares, sent])
    return head, rows


def paper_table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Predicted for GPUs, for docs/distributed.md."""
    head = ["8 × H100, predicted", "rows of a rank", "computing", "messages", "nothing hidden", "all hidden"]
    rows = []
    for one in report["paper"]:
        times = [f"{1000 * one[key]:.0f} ms" for key in ("computing_seconds", "link_seconds")]
        shares = [f"{one['after']:.0%}", f"{one['hidden']:.0%}"]
        rows.append([f"{one['model']}, zero {one['stage']}", f"{one['rows']} × {one['context']:,}", *times, *shares])
    return head, rows


def main() -> None:
    from hasten.machine import describe
    from hasten.machine.files import write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    found = measured(given.recipe, given.rows, given.context, given.steps, given.rounds)
    settings = {name: value for name, value in vars(given).items() if name != "output"}
    report = {"schema": 1, "machine": describe().to_json(), "settings": settings, "measured": found}
    report["paper"] = [on_paper(*one) for one in PAPER]
    write_json(given.output, report)
    for head, rows in (table(report), paper_table(report)):
        print(*("  ".join(row) for row in (head, *rows)), sep="\n")


if __name__ == "__main__":
    main()
