"""When FlashAttention's forward pass runs by the kernel for Hopper GPUs (flash_hopper_kernels.py), and its launch."""

import importlib
import math
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.errors import HastenWarning
from hasten.ops.attention.spec import HALVES
from hasten.ops.triton_support import compute_capability

if TYPE_CHECKING:
    from hasten.ops.attention.flash_launch import Problem

HOPPER = (9, 0)
QUERIES, KEYS = 128, 128  # of a program, of a tile
AHEAD = {64: False, 128: True}  # by head size, as measured on an H200: the next scores beside this tile's softmax
STAGES, WARPS, REGISTERS = (
    2,
    4,
    168,
)  # tiles on their way; of the first warp group; of a thread before they are shared out
_kernels: ModuleType | None = None
_failed = False


def serves(q: Tensor, k: Tensor, v: Tensor, problem: "Problem") -> bool:
    """Whether it computes q (B, T, H, D) over k, v (B, S, Hkv, D): whole tiles, seen causally or entirely."""
    if _failed or q.device.type != "cuda" or q.dtype not in HALVES or q.shape[3] not in AHEAD or not q.numel():
        return False
    queries, keys = q.shape[1], k.shape[1]
    if queries % QUERIES or keys % KEYS or not keys or (problem.causal and keys < queries):
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
    global _kernels, _failed
    from triton.compiler.errors import CompilationError

    batch, queries, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    try:
        if _kernels is None:
            _kernels = importlib.import_module("hasten.ops.attention.flash_hopper_kernels")
        with torch.cuda.device_of(q):
            _kernels.forward[(queries // QUERIES, heads, batch)](
                *(_descriptor(x, rows) for x, rows in ((q, 64), (k, KEYS), (v, KEYS), (out, 64))),
                *(lse, queries, keys, problem.scale * math.log2(math.e)),
                H=heads,
                GROUP=heads // kv_heads,
                D=size,
                BLOCK_K=KEYS,
                STAGES=STAGES,
                CAUSAL=problem.causal,
                AHEAD=AHEAD[size],
                num_warps=WARPS,
                maxnreg=REGISTERS,
            )
    except (ImportError, AttributeError, CompilationError) as error:
        _failed = True
        reason = str(error).strip().splitlines()[-1:]
        message = (
            f"flash attention runs without its kernel for Hopper GPUs, slower: Triton cannot compile it ({reason})"
        )
        warnings.warn(message, HastenWarning, stacklevel=2)
        return None
    return out, lse


def _descriptor(x: Tensor, rows: int) -> object:
    """x (B, T, H, D) for the copy engine, in blocks of so many rows of one head."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, tokens, heads, size = x.shape
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat = torch.as_strided(x, (batch * tokens, heads * size), (x.stride(1), 1))
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, size], layout)
