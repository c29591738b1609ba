"""Attention on CUDA over a cache, for any number of new tokens of each sequence in one launch: decoding (split over the
keys), checking drafts, prompts and pieces of prompts, and mixed steps. The kernel is in ragged_kernels.py.

Import this file only where the kernel is taken; it imports Triton and registers the operator.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.attention.flash_tiles import LEAST_SIDE, side
from hasten.ops.attention.ragged_kernels import attend, combine
from hasten.ops.attention.spec import AttentionSpec
from hasten.ops.attention.view import KVView
from hasten.ops.triton_support import readable, registered

LOG2_E = math.log2(math.e)
# The number of programs aimed at when keys are split: two on each multiprocessor of an H100. It is a constant, so that
# results do not depend on the device.
PROGRAMS = 264
LEAST_KEYS = 64  # of a split: fewer are not worth adding up
MOST_SPLITS = 64
MOST_PART_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class StepCut:
    """How a step is cut. queries: of a tile, which has `rows` rows; keys: of a tile; splits: programs for its keys."""

    queries: int
    rows: int
    keys: int
    splits: int
    warps: int
    stages: int

    def stages_of(self, *, paged: bool) -> int:
        """The compiler's stages. With a table it keeps a tile more of each: three programs would not share a
        multiprocessor's memory."""
        return self.stages - (paged and self.rows < 128)


def plan_for(
    *, tokens: int, sequences: int, kv_heads: int, group: int, head_dim: int, max_query: int, longest: int
) -> StepCut:
    """The plan of a step of `tokens` rows, at most `max_query` of a sequence, over at most `longest` keys of each."""
    wide = side(head_dim)
    most = 128 if wide <= 128 else 64  # rows of a tile: their results stay in registers
    rows = min(max(most, side(group)), side(group * max_query))
    queries = max(1, rows // group)
    keys = (64 if rows < 128 or wide > 64 else 128) if wide <= 128 else 32
    tiles = (sequences if max_query == 1 else tokens // queries + sequences) * kv_heads
    splits = min(PROGRAMS // max(tiles, 1), triton.cdiv(longest, max(LEAST_KEYS, keys)), MOST_SPLITS)
    while splits > 1 and splits * tokens * kv_heads * group * head_dim * 4 > MOST_PART_BYTES:
        splits -= 1
    # Measured on an H200: for one query 2 warps with 5 tiles under way read at 81% of its bandwidth, 4 warps at 70%.
    one = rows == LEAST_SIDE and wide <= 128
    return StepCut(
        queries, rows, keys, max(1, splits), warps=8 if rows >= 128 else 2 if one else 4, stages=4 if one else 3
    )


@registered("hasten_triton::ragged_attention", mutates_args=("counters",))
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    first_slots: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    counters: Tensor | None,
    max_query: int,
    longest: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """q (N, H, D) -> (N, H, D); k, v (slots, Hkv, D) and the rest as in `over_view`; window, softcap 0: none.

    counters: int32 zeros, which they are again at the end; None: parts are added up in a launch of their own.
    """
    plan = plan_for(
        tokens=q.shape[0],
        sequences=seq_lens.shape[0],
        kv_heads=k.shape[1],
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[2],
        max_query=max_query,
        longest=min(longest, window + max_query) if window else longest,
    )
    step = (query_start_loc, seq_lens, first_slots, block_table, block_size, counters)
    return launch(q, k, v, *step, max_query=max_query, scale=scale, window=window, softcap=softcap, plan=plan)


@operator.register_fake
def _fake(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    first_slots: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    counters: Tensor | None,
    *,
    max_query: int,
    scale: float,
    window: int,
    softcap: float,
    plan: StepCut,
) -> Tensor:
    """`operator` by a plan."""
    (tokens, heads, size), kv_heads, sequences = q.shape, k.shape[1], seq_lens.shape[0]
    dtype, int8 = q.dtype, k.dtype == torch.int8
    if q.stride()[1:] != (size, 1):
        q = q.contiguous()
    q, k, v = readable(q), readable(k), readable(v)
    decoding = max_query == 1 and tokens == sequences
    # In a padded step some rows belong to no sequence, and nothing else writes them.
    out = q.new_empty(tokens, heads, size) if decoding else q.new_zeros(tokens, heads, size)
    if not tokens:
        return out.to(dtype)
    tiles = sequences if decoding else tokens // plan.queries + sequences
    parts = peaks = sums = None
    if plan.splits > 1:
        parts = q.new_empty(plan.splits, tokens, heads, size, dtype=torch.float32)
        peaks, sums = parts.new_empty(2, plan.splits, tokens, heads).unbind()
        if counters is not None and counters.numel() < tiles * kv_heads:
            counters = None
    # The compiler divides by a power of two for nothing. A table of one block is that of a cache that begins again.
    page = block_size if block_table is not None and block_table.shape[1] > 1 and not block_size & block_size - 1 else 0
    scales = (k.view(torch.float32), v.view(torch.float32)) if int8 else (None, None)
    with torch.cuda.device_of(q):
        attend[(tiles, kv_heads, plan.splits)](
            *(q, k, v, *scales, None if decoding else query_start_loc, seq_lens, first_slots, block_table),
            *(out, parts, peaks, sums, counters if plan.splits > 1 else None),
            *(tokens, sequences, 0 if block_table is None else block_table.shape[1], max(block_size, 1), k.shape[0]),
            *(q.stride(0), k.stride(0), k.stride(1)),
            (softcap or scale) * LOG2_E,
            2 * LOG2_E * scale / softcap if softcap else None,
            WINDOW=window,
            GROUP=heads // kv_heads,
            QUERIES=1 if decoding else plan.queries,
            M=plan.rows,
            D=size,
            D_SIDE=side(size),
            BLOCK=plan.keys,
            PAGE=page,
            SPLIT=plan.splits > 1,
            CHUNK=at_once(plan.rows, side(size)),
            num_warps=plan.warps,
            num_stages=plan.stages_of(paged=block_table is not None),
        )
        if parts is not None and counters is None:
            add_up(out, parts, peaks, sums)
    return out.to(dtype)


def at_once(rows: int, wide: int) -> int:
    """The number of parts added up at once: as many as registers hold."""
    return max(1, min(16, 4096 // (rows * wide)))


def add_up(out: Tensor, parts: Tensor, peaks: Tensor | None, sums: Tensor | None) -> None:
    """Add up the parts (splits, N, H, D) of all rows, in a launch of its own."""
    splits, every, size = parts.shape[0], out.shape[0] * out.shape[1], out.shape[2]
    sides = {"ROWS": 4, "CHUNK": at_once(4, side(size)), "D": size, "D_SIDE": side(size)}
    combine[(triton.cdiv(every, 4),)](out, parts, peaks, sums, every, splits, **sides, num_warps=4)


def over_view(q: Tensor, view: KVView, *, spec: AttentionSpec, counters: Tensor | None = None) -> Tensor:
    """Attention of q (N, H, D), the step's rows, over a cache: what the tokens of `view.metadata` see.

    Raises ConfigError where keys and values lie differently, or in a format that the kernel does not read.
    """
    step = view.metadata
    if view.k.stride() != view.v.stride() or view.k.stride(-1) != 1 or view.k.dtype == torch.uint8:
        raise ConfigError(
            f"attention over a cache wants k and v that lie alike, in 16 or 8 bits; found {view.k.dtype} and strides "
            f"{view.k.stride()} and {view.v.stride()}"
        )
    most = step.max_query
    if most is None:  # unknown: as many as there are rows, or one where it cannot be another number
        most = 1 if q.shape[0] == step.seq_lens.shape[0] else q.shape[0]
    longest = step.longest
    if longest is None:
        longest = view.k.shape[0] if step.block_table is None else step.block_table.shape[1] * step.block_size
    places = (step.query_start_loc, step.seq_lens, step.first_slots, step.block_table, step.block_size)
    scores = (spec.scale, spec.window or 0, spec.softcap or 0.0)
    return operator(q, view.k, view.v, *places, counters, most, longest, *scores)


def counters_on(device: torch.device) -> Tensor:
    """What programs count on, for all steps of one stream: with fewer, parts are added up in a launch of their own."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)
