"""xformers' memory-efficient attention beside ours, on a GPU: never run yet (docs/results/gpu-status.md).

    pip install xformers                     # beside the torch it is built for
    python benchmarks/xformers_speed.py --output benchmarks/results/xformers-speed.json

Causal, bfloat16, forward, and forward with backward, in turns; ours with the kernel that the picker takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from timing import interleaved


@dataclass(frozen=True, slots=True, kw_only=True)
class XformersSpeed:
    """Measure, print and write."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    tokens: int = 16_384
    """Of all rows together."""

    heads: int = 16
    head_dim: int = 128
    rounds: int = 20
    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        if not torch.cuda.is_available():
            raise SystemExit("xformers' operators run on CUDA only, and this machine has no GPU")
        rows = [self.row(length) for length in self.lengths]
        report = {"schema": 1, "machine": describe().to_json(), "heads": self.heads, "head_dim": self.head_dim}
        write_json(self.output, report | {"rows": rows})

    def row(self, length: int) -> dict[str, Any]:
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        from hasten.ops.attention import attention

        shape = (max(1, self.tokens // length), length, self.heads, self.head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for name, attend in (
            ("xformers", lambda: memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())),
            ("hasten", lambda: attention(q, k, v)),
        ):
            calls[name, "forward"] = forward(attend)
            calls[name, "both"] = both(attend, (q, k, v))
        times = interleaved(calls, self.rounds)
        found: dict[str, Any] = {"length": length}
        for part in ("forward", "both"):
            theirs, ours = times["xformers", part], times["hasten", part]
            found[part] = {"xformers": median(theirs), "hasten": median(ours)}
            found[part]["ratio"] = median(a / b for a, b in zip(theirs, ours, strict=True))
        print(found, flush=True)
        return found


def forward(attend: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            attend()
        torch.cuda.synchronize()

    return call


def both(attend: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    def call() -> None:
        torch.autograd.grad(attend().float().sum(), inputs)
        torch.cuda.synchronize()

    return call


if __name__ == "__main__":
    tyro.cli(XformersSpeed).run()
