"""When FlashAttention runs by its kernels for Hopper GPUs (flash_hopper_kernels.py, flash_hopper_backward.py)."""

import importlib
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from hasten.errors import HastenWarning
from hasten.ops.attention import flash_triton_backward
from hasten.ops.attention.spec import HALVES
from hasten.ops.triton_support import compute_capability, failed

if TYPE_CHECKING:
    from hasten.ops.attention.flash_launch import Problem

HOPPER = (9, 0)
PROGRAM = 128  # queries or keys of a program, 64 for each of its two warp groups
# By head size, as measured on an H200: keys of a tile, tiles on their way, the next scores beside this tile's softmax.
FORWARD = {64: (128, 2, False), 128: (128, 2, True)}
# Keys of a tile, tiles on their way.
BACKWARD_QUERIES = {64: (128, 2), 128: (64, 2)}
# Queries of a tile, tiles on their way, values' gradient beside the next products.
BACKWARD_KEYS = {64: (64, 3, True), 128: (64, 2, True)}
LAUNCH = {"num_warps": 4, "maxnreg": 168}  # of the first warp group; registers of a thread before they are shared out
ROWS = 64  # of a program that computes what the backward pass needs of each row
_failed: list[str] = []  # why Triton cannot run them


def serves(q: Tensor, k: Tensor, v: Tensor, problem: "Problem") -> bool:
    """Whether they compute q (B, T, H, D) over k, v (B, S, Hkv, D): whole tiles, seen causally or entirely."""
    if _failed or q.device.type != "cuda" or q.dtype not in HALVES or q.shape[3] not in FORWARD or not q.numel():
        return False
    queries, keys = q.shape[1], k.shape[1]
    if queries % PROGRAM or keys % PROGRAM or not keys or (problem.causal and keys < queries):
        return False  # with fewer keys than queries some would see nothing
    special = problem.packed or problem.key_bounds is not None or problem.softcap or 0 < problem.window < keys
    if special or compute_capability(q.device) != HOPPER:
        return False
    return all(_rows_are_even(x) for x in (q, k, v))


def _rows_are_even(x: Tensor) -> bool:
    """Whether x (B, T, H, D) is a matrix (B·T, H·D) to the copy engine."""
    batch, tokens, heads, size = x.shape
    between = batch == 1 or x.stride(0) == tokens * x.stride(1)
    inside = x.stride(3) == 1 and (heads == 1 or x.stride(2) == size)
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0
    return between and inside and aligned and batch * tokens < 1 << 31


def forward(q: Tensor, k: Tensor, v: Tensor, problem: "Problem") -> tuple[Tensor, Tensor] | None:
    """The result (B, T, H, D) and the log-sum-exp (B, H, T); None, with a warning, where it cannot be compiled."""
    batch, queries, heads, size = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    tile, stages, ahead = FORWARD[size]

    def run() -> None:
        kernels = importlib.import_module("hasten.ops.attention.flash_hopper_kernels")
        kernels.forward[(queries // PROGRAM, heads, batch)](
            *(_descriptor(x, rows) for x, rows in ((q, 64), (k, tile), (v, tile), (out, 64))),
            *(lse, queries, k.shape[1], problem.scale * math.log2(math.e)),
            **_known(q, k, problem),
            BLOCK_K=tile,
            STAGES=stages,
            AHEAD=ahead,
        )

    return (out, lse) if _compiled(run, q) else None


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: "Problem"
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k, v in three launches; None, with a warning, where they cannot be compiled."""
    d_out = d_out if _rows_are_even(d_out) else d_out.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    log2_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    batch, queries, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    own, numbers = _known(q, k, problem), (queries, keys, problem.scale * math.log2(math.e), problem.scale)

    def run() -> None:
        kernels = importlib.import_module("hasten.ops.attention.flash_hopper_backward")
        flash_triton_backward.row_terms[(triton.cdiv(queries, ROWS), heads, batch)](
            *(out, d_out, d_lse, lse, log2_lse, delta, out.stride()[:3], d_out.stride()[:3], queries, size, ROWS)
        )
        tile, stages = BACKWARD_QUERIES[size]
        kernels.backward_queries[(queries // PROGRAM, heads, batch)](
            *(_descriptor(x, rows) for x, rows in ((q, 64), (d_out, 64), (dq, 64), (k, tile), (v, tile))),
            *(log2_lse, delta, *numbers),
            **own,
            BLOCK_K=tile,
            STAGES=stages,
        )
        tile, stages, overlap = BACKWARD_KEYS[size]
        kernels.backward_keys[(keys // PROGRAM, kv_heads, batch)](
            *(_descriptor(x, rows) for x, rows in ((q, tile), (d_out, tile), (k, 64), (v, 64), (dk, 64), (dv, 64))),
            *(log2_lse, delta, *numbers),
            **own,
            BLOCK_Q=tile,
            STAGES=stages,
            OVERLAP=overlap,
        )

    return (dq, dk, dv) if _compiled(run, q) else None


def _known(q: Tensor, k: Tensor, problem: "Problem") -> dict[str, Any]:
    """What the compiler knows of a call."""
    heads, size = q.shape[2:]
    return {"H": heads, "GROUP": heads // k.shape[2], "D": size, "CAUSAL": problem.causal, **LAUNCH}


def _compiled(run: Callable[[], None], q: Tensor) -> bool:
    """Whether `run` could be compiled and launched; if not, with a warning, they serve nothing any more."""
    try:
        with torch.cuda.device_of(q):
            run()
    except Exception as error:
        if not failed(error):
            raise
        _failed.append(" ".join(str(error).split())[-200:])
        message = "flash attention runs without its kernels for Hopper GPUs, slower; Triton cannot run them: "
        warnings.warn(message + _failed[0], HastenWarning, stacklevel=3)
        return False
    return True


def _descriptor(x: Tensor, rows: int) -> object:
    """x (B, T, H, D) for the copy engine, in blocks of rows of one head."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, tokens, heads, size = x.shape
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat = torch.as_strided(x, (batch * tokens, heads * size), (x.stride(1), 1))
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, size], layout)
