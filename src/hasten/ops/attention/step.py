"""Attention of a decode step on CUDA in one launch: norms and turn of q and k, the cache write, the attention itself.

The kernel is in step_kernels.py; ragged.py serves all other steps. Import this file only where the kernel is taken.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from hasten.ops.attention.flash_tiles import side
from hasten.ops.attention.ragged import LOG2_E, add_up, at_once, plan_for
from hasten.ops.attention.step_kernels import attend_new
from hasten.ops.triton_support import readable, registered


@registered("hasten_triton::decode_step", mutates_args=("k", "v", "counters"))
def decode_step(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    first_slots: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    counters: Tensor | None,
    longest: int,
    heads: int,
    eps: float,
    offset: float,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """qkv (B, (H + 2·Hkv)·D), one row a sequence -> what its query sees, (B, H, D).

    The rest as in `place_heads` (ops/block/triton_steps.py) and ragged.py's `operator`.
    """
    batch, kv_heads, size = qkv.shape[0], k.shape[1], k.shape[2]
    reach = min(longest, window) if window else longest
    sizes = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_dim": size}
    plan = plan_for(tokens=batch, sequences=batch, max_query=1, longest=reach, **sizes)
    written = [(t, readable(t)) for t in (k, v)]
    own_k, own_v = (own for _, own in written)
    weights = [None if weight is None else readable(weight) for weight in (q_weight, k_weight)]
    tables = (None, None) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    qkv, dtype = readable(qkv), qkv.dtype
    out = qkv.new_empty(batch, heads, size)
    if not batch:
        return out.to(dtype)
    parts = peaks = sums = None
    if plan.splits > 1:
        parts = qkv.new_empty(plan.splits, batch, heads, size, dtype=torch.float32)
        peaks, sums = parts.new_empty(2, plan.splits, batch, heads).unbind()
        if counters is not None and counters.numel() < batch * kv_heads:
            counters = None
    group_rows = triton.next_power_of_2(heads // kv_heads)
    wraps = block_table is None or block_table.shape[1] == 1 or block_size & block_size - 1
    with torch.cuda.device_of(qkv):
        attend_new[(batch, kv_heads, plan.splits)](
            *(qkv, *tables, *weights, slots, own_k, own_v, seq_lens, first_slots, block_table),
            *(out, parts, peaks, sums, counters if plan.splits > 1 else None),
            *(batch, 0 if block_table is None else block_table.shape[1], max(block_size, 1), k.shape[0]),
            *(qkv.stride(0), *own_k.stride()[:2], eps, offset),
            (softcap or scale) * LOG2_E,
            2 * LOG2_E * scale / softcap if softcap else None,
            WINDOW=window,
            GROUP=heads // kv_heads,
            M=plan.rows,
            D=size,
            D_SIDE=side(size),
            HALF=0 if cos is None else cos.shape[-1],
            BLOCK=plan.keys,
            PAGE=0 if wraps else block_size,
            SPLIT=plan.splits > 1,
            ROWS=group_rows,
            CHUNK=at_once(group_rows, side(size)),
            num_warps=plan.warps,
            num_stages=plan.stages_of(paged=block_table is not None),
        )
        if parts is not None and counters is None:
            add_up(out, parts, peaks, sums)
    for given, own in written:
        if own is not given:  # in the interpreter
            given.copy_(own)
    return out.to(dtype)


@decode_step.register_fake
def _fake(
    qkv: Tensor,
    cos: Any,
    sin: Any,
    q_weight: Any,
    k_weight: Any,
    slots: Any,
    k: Tensor,
    v: Any,
    seq_lens: Any,
    first_slots: Any,
    block_table: Any,
    block_size: int,
    counters: Any,
    longest: int,
    heads: int,
    *rest: Any,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads, k.shape[2])
