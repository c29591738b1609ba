"""What a rank holds and sends at each stage of ZeRO, counted, beside FSDP2's own formulas and the paper's.

    python benchmarks/zero.py        # 2 and 4 ranks on this machine -> benchmarks/results/zero-bytes.json and .png

Tensors are counted and messages are measured by their sizes: nothing here depends on how fast or busy a machine is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHAPE = {"layers": 4, "hidden_size": 128, "heads": 2, "feed_forward": 352}
VOCABULARY = 1024
ROWS, CONTEXT = 4, 16
CASES: list[dict[str, Any]] = [{"zero": zero} for zero in (0, 1, 2, 3)]
CASES += [{"zero": zero, "accumulation": 4} for zero in (0, 1, 2, 3)]
CASES += [{"zero": zero, "policy": "float32-masters"} for zero in (0, 3)]
CASES += [{"zero": 3, "offload": "optimizer"}, {"zero": 3, "offload": "all"}, {"zero": 3, "replicas": 2}]


def paper_bytes(count: int, *, stage: int, ranks: int, masters: bool = False) -> float:
    """Table 1 of arXiv 1910.02054: weights, gradients, states. masters: 2 + 2 + 12 bytes, else 4 + 4 + 8."""
    weights, gradients, states = (2, 2, 12) if masters else (4, 4, 8)
    shared = [stage >= 3, stage >= 2, stage >= 1]
    return count * sum(
        size / (ranks if share else 1) for size, share in zip((weights, gradients, states), shared, strict=True)
    )


def measure(case: dict[str, Any], ranks: Any, *, shape: dict[str, Any]) -> dict[str, Any]:
    """One layout on this rank: bytes at three moments, what was sent in a step, and what the formulas say."""
    import torch
    from counted import Counted

    from hasten.data import Batch
    from hasten.model.initialize import initialize
    from hasten.planning.cost import parameters
    from hasten.planning.sharing import fsdp_bytes, sent_bytes
    from hasten.training import build
    from hasten.training.recipe import Data, Parallel, Recipe, Shape, Techniques

    own = {key: value for key, value in case.items() if key != "accumulation"}
    accumulation = case.get("accumulation", 1)
    masters = own.get("policy") == "float32-masters"
    techniques = Techniques(precision="bfloat16" if masters else "float32", compile=False, keep_memory=False)
    data = Data(batch_size=ROWS, context=CONTEXT, accumulation=accumulation)
    recipe = Recipe(name="zero", model=Shape(**shape), data=data, techniques=techniques, parallel=Parallel(**own))
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=CONTEXT)
    step = build.training_step(initialize(config, seed=0), recipe, ranks=ranks)
    held: dict[str, int] = {}
    collect = step.where.collect

    def counted() -> None:
        held["backward"] = counter.held() if counter is not None else 0
        collect()

    step.where.collect = counted  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(VOCABULARY, (accumulation, ROWS // ranks.size, CONTEXT + 1), generator=generator)
    batches = [Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None) for one in tokens]
    counter: Counted | None = None
    start = Counted(step.optimizer).held()
    for _ in range(2):  # DDP lays out its buckets anew in the second step
        step.run(batches)
    counter = Counted(step.optimizer, offload=own.get("offload", "none"))
    for number, block in enumerate(step.model.blocks):  # beside the collectives, when a block runs
        note = ("block", number)
        block.attention_norm.register_forward_pre_hook(lambda *_, note=note: counter.order.append(note))
    with counter:
        result = step.run(batches)
    assert result is not None
    count, stage = parameters(config).total, own["zero"]
    shards = ranks.size // own.get("replicas", 1)
    about = {"stage": stage, "ranks": shards, "accumulation": accumulation}
    formula = fsdp_bytes(config, **about, masters=masters, copies=own.get("offload") == "optimizer")
    itemsize = 2 if masters else 4
    apart = {}
    if "offload" in own:  # the host has the optimizer's shares of weights and gradients, and its states
        share, blocks = count / shards, len(config.layers)
        reduced = 4 * (blocks - 1) * (count - parameters(replace(config, layers=())).total) / blocks / shards
        device = formula.peak - 12 * share - (reduced if own["offload"] == "all" else 0)
        apart = {"copies": {"host": counter.host_peak, "device": counter.device_peak}}
        apart["copies_formula"] = {"host": 16 * share, "device": device}
    return {
        **case,
        **apart,
        "ranks": ranks.size,
        "parameters": count,
        "loss": float(result.loss),
        "held": {"start": start, "backward": held["backward"], "peak": counter.peak},
        "formula": {"start": formula.start, "backward": formula.backward, "peak": formula.peak},
        "paper": paper_bytes(count, stage=stage, ranks=shards, masters=masters),
        "sent": dict(counter.sent),
        "sent_formula": sent_bytes(config, **about, itemsize=itemsize, replicas=own.get("replicas", 1)),
        "order": counter.order,
    }


def child(arguments: argparse.Namespace) -> None:
    """One rank: every case, and on the first one a line of JSON."""
    import gc

    import torch

    from hasten.distributed.launch import joined

    torch.set_num_threads(1)
    with joined() as ranks:
        found = []
        for case in json.loads(arguments.child):
            found.append(measure(case, ranks, shape=SHAPE))
            gc.collect()
        if ranks.first:
            Path(arguments.json).write_text(json.dumps(found))


def run(cases: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The cases on so many ranks of this machine, by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--child", json.dumps(cases), "--json", str(out)]
        subprocess.run(command, check=True, env=os.environ | {"HASTEN_MEASURE": "0"})
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes a parameter that a rank holds, by stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, ranks in zip(figure.subplots(1, 2, sharey=True), (2, 4), strict=True):
        plain = [row for row in rows if row["ranks"] == ranks and set(row) & {"policy", "offload", "replicas"} == set()]
        plain = [row for row in plain if "accumulation" not in row]
        for place, key in enumerate(("start", "backward", "peak")):
            heights = [row["held"][key] / row["parameters"] for row in plain]
            names = {"start": "weights", "backward": "after a backward pass", "peak": "at the peak"}
            axes.bar([row["zero"] + 0.25 * (place - 1) for row in plain], heights, 0.23, label=names[key])
        paper = [row["paper"] / row["parameters"] for row in plain]
        axes.plot([row["zero"] for row in plain], paper, "k_", markersize=30, label="the paper's formula")
        axes.set(title=f"{ranks} ranks", xlabel="ZeRO stage (0: DDP)", xticks=[0, 1, 2, 3])
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("bytes a parameter on a rank, float32")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for docs/distributed.md: bytes a parameter that a rank holds, and what it sends in a step."""
    rows = []
    for row in report["rows"]:
        options = [f"{row['accumulation']} micro-batches"] if "accumulation" in row else []
        options += [f"{key} {row[key]}" for key in ("policy", "offload", "replicas") if key in row]
        name = ", ".join([f"zero {row['zero']}", *options])

        def a_parameter(value: float, row: dict[str, Any] = row) -> str:
            return f"{value / row['parameters']:.2f}"

        held = [a_parameter(row["held"][moment]) for moment in ("start", "backward", "peak")]
        sent = [a_parameter(sum(row["sent"].values())), a_parameter(row["sent_formula"])]
        own = [*held, a_parameter(row["formula"]["peak"]), a_parameter(row["paper"]), *sent]
        rows.append([str(row["ranks"]), name, *own])
    head = ["ranks", "layout", "weights", "after a backward pass", "peak", "FSDP2's formula for the peak"]
    return [*head, "the paper's formula", "sent in a step", "its formula"], rows


def copies_table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The same of offload: what of the peak would lie where, counted and by formula, bytes a parameter."""
    rows = []
    for row in report["rows"]:
        if "copies" in row:
            found = [row[kind][place] for place in ("host", "device") for kind in ("copies", "copies_formula")]
            name = f"zero {row['zero']}, offload {row['offload']}"
            rows.append([name, *(f"{size / row['parameters']:.2f}" for size in found)])
    return ["2 ranks", "on the host", "formula", "on the device", "formula"], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", default=str(RESULTS / "zero-bytes.json"))
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    rows = run(CASES, 2) + run([*CASES[:4], CASES[-1]], 4)
    for row in rows:
        del row["order"]
    Path(arguments.json).write_text(json.dumps({"kind": "zero", "shape": SHAPE, "rows": rows}, indent=1) + "\n")
    draw(rows, Path(arguments.json).with_suffix(".png"))


if __name__ == "__main__":
    main()
