"""Attention alone: hasten's choice and its Triton kernel beside PyTorch's FlashAttention-2 and cuDNN."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.worker import DEVICE, TINY, event_ms, graph_ms, memory, serve

BATCH, HEADS = (4, 16) if not TINY else (1, 2)
SIZES = (128, 64) if not TINY else (16,)
LENGTHS = (8192, 2048, 1024, 16384) if not TINY else (64,)
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def backend(kind: SDPBackend) -> Attend:
    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(kind):
            turned = [x.transpose(1, 2) for x in (q, k, v)]
            return F.scaled_dot_product_attention(*turned, is_causal=causal).transpose(1, 2)

    return run


def chosen(kernel: str | None) -> Attend:
    from hasten.ops.attention import attention

    return lambda q, k, v, causal: attention(q, k, v, causal=causal, kernel=kernel)


def contestants() -> dict[str, Attend]:
    if DEVICE == "cpu":
        return {"hasten": chosen(None), "pytorch": backend(SDPBackend.MATH)}
    torchs = {"fa2": backend(SDPBackend.FLASH_ATTENTION), "cudnn": backend(SDPBackend.CUDNN_ATTENTION)}
    return {"hasten": chosen(None), "flash-triton": chosen("flash-triton")} | torchs


def tensors(tokens: int, size: int) -> list[Tensor]:
    """q, k, v (B, T, H, D) that want gradients, and the gradient of the result."""
    shape = (BATCH, tokens, HEADS, size)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=i < 3) for i in range(4)]


def compare(budget: float = 35) -> None:
    """TFLOP/s of each, forward and with the backward pass, captured (the GPU's part alone) and called plainly."""
    kinds = contestants()
    for size in SIZES:
        for causal in (True, False):
            q, k, v, weight = tensors(512 if not TINY else 32, size)
            for run in kinds.values():
                torch.autograd.grad(run(q, k, v, causal), (q, k, v), weight)
    rows: list[dict[str, Any]] = []

    def row(tokens: int, size: int, causal: bool) -> dict[str, Any]:
        q, k, v, weight = tensors(tokens, size)
        flops = 4 * BATCH * HEADS * size * tokens**2 * (0.5 if causal else 1)
        found: dict[str, Any] = {"tokens": tokens, "head_dim": size, "causal": causal, "tflops": {}}
        for name, run in kinds.items():

            def forward(run: Attend = run) -> None:
                with torch.no_grad():
                    run(q, k, v, causal)

            def both(run: Attend = run) -> None:
                torch.autograd.grad(run(q, k, v, causal), (q, k, v), weight)

            try:
                times = [graph_ms(forward), graph_ms(both), event_ms(forward), event_ms(both)]
                found["tflops"][name] = [
                    round(work * flops / ms / 1e9, 1) for work, ms in zip((1, 3.5, 1, 3.5), times, strict=True)
                ]
            except Exception as error:
                found["tflops"][name] = f"{type(error).__name__}: {error}"[:200]
        return found

    def measure() -> dict[str, Any]:
        begin = time.perf_counter()
        for causal in (True, False):
            for tokens in LENGTHS:
                for size in SIZES:
                    if time.perf_counter() - begin < budget:
                        rows.append(row(tokens, size, causal))
        columns = "forward, forward and backward captured; the same called plainly"
        return {"batch": BATCH, "heads": HEADS, "columns": columns, "rows": rows, **memory()}

    serve({"measure": measure})
