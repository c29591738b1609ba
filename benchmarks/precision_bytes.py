"""Bytes a parameter that training holds under each precision policy, counted tensor by tensor.

    python benchmarks/precision_bytes.py     # -> benchmarks/results/precision-bytes.json

Weights, gradients and the optimizer's tensors are counted at the end of a backward pass. "Alive at the peak" is every
tensor that exists at the worst moment of a step: the 16-bit copies that autocast makes of weights are in it, and the
activations of one row of 8 tokens. Bytes are counted, so nothing here depends on how fast or busy a machine is.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
RESULTS = Path(__file__).parent / "results"
SHAPE = {"layers": 4, "hidden_size": 256, "heads": 4, "feed_forward": 704}
VOCABULARY, CONTEXT = 512, 8
POLICIES: dict[str, tuple[str, str]] = {  # precision and parallel.policy of a recipe
    "float32": ("float32", "float32-weights"),
    "bfloat16 autocast": ("bfloat16", "float32-weights"),
    "float16 autocast, scaled loss": ("float16", "float32-weights"),
    "bfloat16 weights, float32 masters": ("bfloat16", "float32-masters"),
    "float16 weights, float32 masters": ("float16", "float32-masters"),
}


def measure(name: str) -> dict[str, Any]:
    """One policy: bytes of each kind after a backward pass, and of everything at the peak of a step."""
    import torch
    from counted import Alive

    from hasten.data import Batch
    from hasten.model.initialize import initialize
    from hasten.planning.cost import parameters
    from hasten.training import build
    from hasten.training.recipe import Data, Parallel, Recipe, Shape, Techniques

    precision, policy = POLICIES[name]
    recipe = Recipe(
        name="bytes",
        model=Shape(**SHAPE),
        data=Data(batch_size=1, context=CONTEXT),
        techniques=Techniques(precision=precision, compile=False, keep_memory=False),  # type: ignore[arg-type]
        parallel=Parallel(policy=policy),  # type: ignore[arg-type]
    )
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=CONTEXT)
    step = build.training_step(initialize(config, seed=0), recipe)
    tokens = torch.randint(VOCABULARY, (1, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)]
    step.run(batches)
    held: dict[str, int] = {}
    collect = step.where.collect

    def counted() -> None:
        weights = list(step.model.parameters())
        held["weights"] = _bytes(weights)
        held["gradients"] = _bytes([weight.grad for weight in weights if weight.grad is not None])
        held["optimizer"] = _bytes(_of_optimizer(step)) - _bytes(_shared(weights, _of_optimizer(step)))
        collect()

    step.where.collect = counted  # type: ignore[method-assign]
    with Alive([*step.model.parameters(), *_of_optimizer(step)]) as alive:
        result = step.run(batches)
    assert result is not None
    count = parameters(config).total
    return {
        "policy": name,
        "parameters": count,
        "loss": float(result.loss),
        **{kind: size / count for kind, size in held.items()},
        "sum": sum(held.values()) / count,
        "peak": alive.peak / count,
    }


def _of_optimizer(step: Any) -> "list[Tensor]":
    """Its weights (masters, where they are not the model's) and states."""
    from torch import Tensor

    states = [value for state in step.optimizer.state.values() for value in state.values()]
    weights = [weight for group in step.optimizer.param_groups for weight in group["params"]]
    return [one for one in (*weights, *states) if isinstance(one, Tensor) and one.dim()]


def _shared(weights: "list[Tensor]", others: "list[Tensor]") -> "list[Tensor]":
    own = {one.data_ptr() for one in weights}
    return [one for one in others if one.data_ptr() in own]


def _bytes(tensors: "list[Tensor]") -> int:
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for docs/precision.md."""
    kinds = ("weights", "gradients", "optimizer", "sum", "peak")
    rows = [[row["policy"], *(f"{row[kind]:.1f}" for kind in kinds)] for row in report["rows"]]
    head = ["policy", "weights", "gradients", "optimizer (with masters)", "after a backward pass", "alive at the peak"]
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=str(RESULTS / "precision-bytes.json"))
    arguments = parser.parse_args()
    from hasten.machine import describe

    report = {
        "kind": "precision-bytes",
        "machine": describe().to_json(),
        "shape": SHAPE,
        "rows": [measure(name) for name in POLICIES],
    }
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    head, rows = table(report)
    for row in (head, *rows):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
