"""All experts of one layer of a Qwen3-30B-A3B: a step's share of the bandwidth, and a prompt's products a second."""

import time
from typing import Any

import torch

from gpu.worker import DEVICE, TINY, graph_ms, serve, tidy

HIDDEN, INNER, COUNT, TOP = (2048, 768, 128, 8) if not TINY else (64, 32, 4, 2)
ROWS = (1, 4, 16, 64, 256, 2048) if not TINY else (1, 4)
FORMATS = (("bf16", "bfloat16", 0), ("int8", "int8", 0), ("int4-g32", "int4", 32), ("int4-g128", "int4", 128))
ROUTES = 32 if not TINY else 1  # choices of experts in turns: together their weights are more than any cache holds


def weights_of(format: str, group: int) -> Any:
    """Random experts as kernels read them."""
    from hasten.ops.experts import ExpertWeights
    from hasten.ops.linear import BFLOAT16, INT8, PackedLinear, int4_format
    from hasten.ops.linear.layouts import Operands

    def one(n: int, k: int) -> Operands:
        if format == "bfloat16":
            values = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5
            return Operands(values, None, None, None, None, n, BFLOAT16)
        stored = INT8 if format == "int8" else int4_format(group, scale_dtype=torch.float16)
        layer = PackedLinear(k, n, stored, device=DEVICE)
        layer.data.random_()
        assert layer.scales is not None
        layer.scales.uniform_(0, 1e-3)
        return layer.operands

    inner = [[one(INNER, HIDDEN) for _ in range(COUNT)] for _ in range(2)]
    return ExpertWeights(*inner, [one(HIDDEN, INNER) for _ in range(COUNT)], "silu")


@torch.inference_mode()
def table(budget: float = 20) -> None:
    """Microseconds for each format and number of rows, GB/s of the bytes of the experts taken, TFLOP/s."""
    from hasten.ops.experts import KERNELS

    kernel, formats = (KERNELS[0], FORMATS) if DEVICE != "cpu" else (KERNELS[-1], FORMATS[:1])
    made = {name: weights_of(format, group) for name, format, group in formats}
    runs = {name: kernel.run(weights) for name, weights in made.items()}

    def calls_of(rows: int) -> list[tuple[torch.Tensor, ...]]:
        x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        scores = (torch.rand(rows, COUNT, device=DEVICE).softmax(-1) for _ in range(ROUTES))
        return [(x, *own.topk(TOP, -1)) for own in scores]

    for run in runs.values():  # compile
        for rows in ROWS:
            run(*calls_of(rows)[0])
    tidy()

    @torch.inference_mode()
    def measure() -> dict[str, Any]:
        begin, found = time.perf_counter(), []
        for rows in ROWS:
            calls = calls_of(rows)
            taken = sum(len(chosen.unique()) for *_, chosen in calls) / len(calls)
            for name, run in runs.items():
                if time.perf_counter() - begin > budget:
                    continue
                own = [made[name].gate[0], made[name].up[0], made[name].down[0]]
                size = taken * sum(t.nbytes for w in own for t in (w.data, w.scales, w.zeros) if t is not None)

                def each(run: Any = run, calls: Any = calls) -> None:
                    for arguments in calls:
                        run(*arguments)

                ms = graph_ms(each, span=12) / len(calls)
                flops = 6 * rows * TOP * HIDDEN * INNER / ms / 1e9
                found.append([name, rows, round(1e3 * ms, 2), round(size / ms / 1e6, 1), round(flops, 2)])
        return {"columns": "format, rows, us, GB/s, TFLOP/s", "rows": found}

    serve({"measure": measure})
