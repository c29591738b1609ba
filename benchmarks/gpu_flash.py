"""FlashAttention in Triton beside PyTorch's, forward and with the backward pass: gpu_session.py's step `flash`."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# heads, key/value heads, head size, tokens; the first is the one that the target is about.
SHAPES = ((16, 16, 128, 8192), (32, 8, 128, 8192), (32, 32, 64, 8192), (8, 8, 256, 8192), (16, 16, 128, 2048))
TOKENS = 16_384  # of a batch
ROUNDS = 5
# Tiles of queries and of keys, warps and stages that --tune tries, each where it compiles.
SWEEP = tuple(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))


def flash(*, device: str, tune: bool) -> list[dict[str, Any]]:
    """Milliseconds, TFLOP/s and the ratio of the medians, causal, in bfloat16; rounds interleaved; cuDNN's beside."""
    found = []
    for heads, kv_heads, size, tokens in SHAPES if device != "cpu" else ((2, 1, 16, 64),):
        batch = max(1, TOKENS // tokens) if device != "cpu" else 1
        q, k, v, weight = (
            torch.randn(batch, tokens, n, size, device=device, dtype=torch.bfloat16, requires_grad=n > 0)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        weight = weight.detach()
        entry: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": size}
        entry |= {"tokens": tokens}
        for backward in (False, True):
            flops = 4 * batch * heads * size * tokens * (tokens + 1) / 2 * (3.5 if backward else 1)
            runs = {
                "ours": _step(_ours, q, k, v, weight, backward=backward),
                "pytorch": _step(_pytorch if device != "cpu" else _pytorch_any, q, k, v, weight, backward=backward),
            }
            if device != "cpu" and size <= 128:
                runs["cudnn"] = _step(_cudnn, q, k, v, weight, backward=backward)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(ROUNDS):
                for name, run in runs.items():
                    times[name].append(_milliseconds(run, device))
            part: dict[str, Any] = {}
            for name, ms in times.items():
                middle = sorted(ms)[ROUNDS // 2]
                part[name] = {"ms": middle, "all_ms": ms, "tflops": flops / middle / 1e9}
            part["speed_of_pytorchs"] = part["pytorch"]["ms"] / part["ours"]["ms"]
            entry["forward_and_backward" if backward else "forward"] = part
        if tune:
            entry["tuned"] = _tune(q, k, v, weight, device)
        found.append(entry)
    return found


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from hasten.ops.attention.flash_triton import flash_attention

    return flash_attention(q, k, v)[0]


def _pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _pytorch_any(q, k, v)


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _pytorch_any(q, k, v)


def _pytorch_any(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)


def _step(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    backward: bool,
) -> Callable[[], None]:
    def step() -> None:
        if backward:
            torch.autograd.grad(attend(q, k, v), (q, k, v), weight)
            return
        with torch.no_grad():
            attend(q, k, v)

    return step


def _milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":  # a dry run in the interpreter
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=100, return_mode="median"))


def _tune(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, device: str) -> dict[str, list[dict[str, Any]]]:
    """Every candidate's time, the fastest first, for the forward kernel and for the two of the backward pass."""
    from hasten.ops.attention.flash_launch import Problem, backward, forward
    from hasten.ops.attention.flash_tiles import Tiles, backward_tiles

    problem = Problem(None, None, None, q.shape[3] ** -0.5)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = forward(q, k, v, problem=problem)
    for_queries, for_keys = backward_tiles(q, capped=False)

    def back(tiles: tuple[Tiles, Tiles]) -> Callable[[], object]:
        return lambda: backward(weight, None, q, k, v, out, lse, problem=problem, tiles=tiles)

    makers: dict[str, Callable[[Tiles], Callable[[], object]]] = {
        "forward": lambda tiles: lambda: forward(q, k, v, problem=problem, tiles=tiles),
        "backward_queries": lambda tiles: back((tiles, for_keys)),
        "backward_keys": lambda tiles: back((for_queries, tiles)),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in makers}
    sweep = SWEEP if device != "cpu" else ((16, 16, 4, 1),)
    for name, (queries, keys, warps, stages) in itertools.product(makers, sweep):
        tiles = Tiles(queries=queries, keys=keys, warps=warps, stages=stages)
        entry: dict[str, Any] = {"tiles": repr(tiles)}
        try:
            entry["ms"] = _milliseconds(makers[name](tiles), device)
        except Exception as error:  # too much shared memory, mostly
            entry["error"] = f"{type(error).__name__}: {error}"[:200]
        found[name].append(entry)
    return {name: sorted(entries, key=lambda entry: entry.get("ms", float("inf"))) for name, entries in found.items()}
