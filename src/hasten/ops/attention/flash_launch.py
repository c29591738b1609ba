"""Launches of FlashAttention's Triton kernels; flash_triton.py has the checks and the operator. Imports Triton."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hasten.ops.attention import flash_hopper, flash_triton_backward, flash_triton_kernels
from hasten.ops.attention.flash_tiles import Tiles, backward_tiles, forward_tiles, side
from hasten.ops.triton_support import readable

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is computed, apart from q, k, v. *_starts (documents + 1,): of documents. window, softcap 0: none.

    key_bounds (B, 2) int32: the first key of each sequence that exists, and one past the last.
    """

    query_starts: Tensor | None
    key_starts: Tensor | None
    key_bounds: Tensor | None
    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0

    @property
    def packed(self) -> bool:
        return self.query_starts is not None


def forward(q: Tensor, k: Tensor, v: Tensor, *, problem: Problem, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """The result (B, T, H, D) and the log-sum-exp (B, H, T), in one launch; `tiles` other than the table's.

    On a Hopper GPU whole tiles without a window or the like take the kernel of flash_hopper.py.
    """
    if tiles is None and flash_hopper.serves(q, k, v, problem):
        found = flash_hopper.forward(q, k, v, problem)
        if found is not None:
            return found
    tiles, dtype = tiles or forward_tiles(q), q.dtype
    q, k, v = (_rows(x) for x in (q, k, v))
    batch, queries, heads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((batch, heads, queries), dtype=wide(q.dtype))
    if problem.packed:  # rows that belong to no document
        out.zero_()
        lse.fill_(-math.inf)
    if not q.numel():
        return out.to(dtype), lse
    plan, programs = tile_plan(problem, queries, block=tiles.queries, over_keys=False)
    with torch.cuda.device_of(q):
        flash_triton_kernels.forward[(programs, heads, batch)](
            *(q, k, v, out, lse, plan, problem.key_bounds),
            *(x.stride()[:3] for x in (q, k, v, out)),
            *(queries, k.shape[1], problem.window),
            **_options(q, k, problem, tiles),
        )
    return out.to(dtype), lse


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    problem: Problem,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v in two launches: the queries' leaves the row terms behind that the keys' needs.

    Where `forward` takes the kernels of flash_hopper.py, so does this.
    """
    if tiles is None and flash_hopper.serves(q, k, v, problem):
        found = flash_hopper.backward(d_out, d_lse, q, k, v, out, lse, problem)
        if found is not None:
            return found
    dtype = q.dtype
    for_queries, for_keys = tiles or backward_tiles(q, capped=problem.softcap > 0)
    q, k, v, out, d_out = (_rows(x) for x in (q, k, v, out, d_out))
    d_lse = None if d_lse is None else d_lse.contiguous()
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    nothing = not q.numel() or not k.numel()
    dq, dk, dv = (x.new_zeros(x.shape) if problem.packed or nothing else x.new_empty(x.shape) for x in (q, k, v))
    if nothing:
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)
    log2_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    strides, sizes = [x.stride()[:3] for x in (q, k, v)], (queries, keys, problem.window)
    with torch.cuda.device_of(q):
        plan, programs = tile_plan(problem, queries, block=for_queries.queries, over_keys=False)
        flash_triton_backward.backward_queries[(programs, heads, batch)](
            *(q, k, v, out, d_out, d_lse, lse, log2_lse, delta, dq, plan, problem.key_bounds),
            *(*strides, out.stride()[:3], d_out.stride()[:3], *sizes),
            **_options(q, k, problem, for_queries),
        )
        plan, programs = tile_plan(problem, keys, block=for_keys.keys, over_keys=True)
        flash_triton_backward.backward_keys[(programs, kv_heads, batch)](
            *(q, k, v, d_out, log2_lse, delta, dk, dv, plan, problem.key_bounds),
            *(*strides, d_out.stride()[:3], dk.stride()[:3], *sizes),
            **_options(q, k, problem, for_keys),
        )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def tile_plan(problem: Problem, rows: int, *, block: int, over_keys: bool) -> tuple[Tensor | None, int]:
    """For packed documents, which tile of which document a program has: (programs, 5) int32, see the kernels' `place`.

    And the number of programs. Made on the device without waiting for it: as many programs as there can be tiles; those
    left over begin behind the end of the last document and find nothing to do.
    """
    if problem.query_starts is None or problem.key_starts is None:
        return None, triton.cdiv(rows, block)
    starts = torch.stack([problem.query_starts, problem.key_starts]).to(torch.int32)  # (2, documents + 1)
    sizes = starts.diff(dim=1)
    documents = sizes.shape[1]
    tiles = (sizes[int(over_keys)] + block - 1) // block
    ends = tiles.cumsum(0)
    programs = torch.arange(rows // block + documents, device=starts.device)
    document = torch.searchsorted(ends, programs, right=True).clamp_(max=documents - 1)
    tile = programs - (ends - tiles)[document]
    columns = (starts[0, document], sizes[0, document], starts[1, document], sizes[1, document], tile.to(torch.int32))
    return torch.stack(columns, dim=1), len(programs)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _options(q: Tensor, k: Tensor, problem: Problem, tiles: Tiles) -> dict[str, Any]:
    """What the compiler knows of a call."""
    cap = problem.softcap
    constants = flash_triton_kernels.Constants(
        scale=problem.scale,
        factor=(cap or problem.scale) * LOG2_E,
        inner=2 * LOG2_E * problem.scale / cap if cap else 0.0,
        causal=problem.causal,
        has_window=problem.window > 0,
        padded=problem.key_bounds is not None,
        group=q.shape[2] // k.shape[2],
        d=q.shape[3],
        d_side=side(q.shape[3]),
        block_q=tiles.queries,
        block_k=tiles.keys,
    )
    return {"C": constants, "num_warps": tiles.warps, "num_stages": tiles.stages}


def _rows(x: Tensor) -> Tensor:
    """x as it is if the values of a head lie side by side, and the interpreter can read them."""
    x = readable(x)
    return x if x.stride(-1) == 1 else x.contiguous()
