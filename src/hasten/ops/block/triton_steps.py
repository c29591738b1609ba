"""What a fused block on a GPU does between its products: operators over the kernels of triton_kernels.py.

Import this file only where they are taken; it imports Triton and registers the operators.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from hasten.ops.attention.flash_tiles import side
from hasten.ops.block import triton_kernels as kernels
from hasten.ops.linear.beside import NormArguments
from hasten.ops.linear.triton_norm import normed_rows
from hasten.ops.triton_support import readable, registered


@registered("hasten_triton::place_heads", mutates_args=("k", "v"))
def place_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    eps: float,
    offset: float,
) -> Tensor:
    """qkv (R, (H + 2·Hkv)·D) -> q (R, H, D), normed and turned; keys and values go to rows `slots` (R,) of k and v
    (slots, Hkv, D), which lie alike; -1: nowhere. cos, sin (R, dim/2) float32; weights (D,), eps and offset: of RMS
    norms of q and k.
    """
    rows, size, kv_heads = qkv.shape[0], k.shape[2], k.shape[1]
    written = [(t, readable(t)) for t in (k, v)]
    qkv, dtype = readable(qkv), qkv.dtype
    q = qkv.new_empty(rows, heads, size)
    if not rows:
        return q.to(dtype)
    wide = side(size)
    # Few rows want many programs, many rows fewer and larger ones.
    block = max(1, (256 if rows <= 64 else 2048) // wide)
    weights = [None if weight is None else readable(weight) for weight in (q_weight, k_weight)]
    cos, sin = (None, None) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    with torch.cuda.device_of(q):
        kernels.place_heads[(rows, triton.cdiv(heads + 2 * kv_heads, block))](
            *(qkv, cos, sin, *weights, slots, q, *(own for _, own in written)),
            *(qkv.stride(0), *written[0][1].stride()[:2], eps, offset),
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=size,
            D_SIDE=wide,
            HALF=0 if cos is None else cos.shape[-1],
            BLOCK=block,
            num_warps=1 if rows <= 64 else 4,
        )
    for given, own in written:
        if own is not given:  # in the interpreter
            given.copy_(own)
    return q.to(dtype)


@place_heads.register_fake
def _place_heads(
    qkv: Tensor, cos: Any, sin: Any, q_weight: Any, k_weight: Any, slots: Any, k: Tensor, v: Any, heads: int, *rest: Any
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads, k.shape[2])


@registered("hasten_triton::add_normed")
def add_normed(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centred: bool
) -> Tensor:
    """x + norm(y) in float32, for rows x (R, C) float32 and y (R, C); see `norm_arguments` for the rest."""
    y, out, size = readable(y.contiguous()), torch.empty_like(x), x.shape[-1]
    if x.shape[0]:
        block = triton.next_power_of_2(size)
        weights = (readable(weight), None if bias is None else readable(bias))
        warps = min(8, max(1, block // 512))
        with torch.cuda.device_of(x):
            kernels.add_normed[(x.shape[0],)](
                *(x, y, *weights, out, size, eps, offset),
                CENTRED=centred,
                BLOCK=block,
                num_warps=warps,
            )
    return out


@add_normed.register_fake
def _add_normed(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


@registered("hasten_triton::normed")
def normed(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centred: bool, dtype: torch.dtype
) -> Tensor:
    """norm(x) of rows x (R, C), in 16 bits; see `norm_arguments` for the rest."""
    if not x.shape[0]:
        return x.to(dtype)
    with torch.cuda.device_of(x):
        return normed_rows(x.contiguous(), NormArguments(weight, bias, eps, offset, centred), dtype)


@normed.register_fake
def _normed(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=rest[-1], memory_format=torch.contiguous_format)
