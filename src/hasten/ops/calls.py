"""The arguments of native operators that a decode step calls, by name: the fields of the structs in block/calls.h.

`check` compares the names when a library is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class BlocksCall(NamedTuple):
    """All blocks of a model, x (…, C) float32 -> the same.

    stack: of plan_stack. cache: of plan_cache (`CachePlan`). cos, sin: of each rotary table, whose row rope_rows[r],
    int64 (rows,), belongs to row r of x; None: its row r. query_factors, of the same rows: what queries are multiplied
    by; empty: nothing. slot_mapping to rotated: as in `AttentionMetadata`. adapters int64 (rows,): the adapter of each
    row, -1 for none. times: see `FusedStack`. state_slots int64 (B,): the place of each sequence's states; certain
    int64 (B,): after how many of its tokens they are kept, None: after all. features float32 (blocks or more, rows, P):
    what the rows bring to the token gate of each block.
    """

    x: Tensor
    stack: Tensor
    cache: Tensor
    cos: Sequence[Tensor]
    sin: Sequence[Tensor]
    rope_rows: Tensor | None
    query_factors: Sequence[Tensor]
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    first_slots: Tensor | None
    block_table: Tensor | None
    block_size: int
    rotated: bool
    adapters: Tensor | None = None
    times: Tensor | None = None
    state_slots: Tensor | None = None
    certain: Tensor | None = None
    features: Tensor | None = None


class NormLinearCall(NamedTuple):
    """norm(x)·Wᵀ + b in float32, x (…, C) -> (…, N): the fields of a norm, then those of a packed weight."""

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    offset: float
    centred: bool
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    outer: Tensor | None
    bias: Tensor | None
    group_size: int
    planes: int
    out_features: int


CALLS: dict[str, type[NamedTuple]] = {"blocks": BlocksCall, "norm_linear": NormLinearCall}


def check(ops: Any) -> None:
    """Raise AssertionError where a call here and the operator of a library have other fields, or another order."""
    for name, call in CALLS.items():
        native = tuple(argument.name for argument in getattr(ops, name).default._schema.arguments)
        assert call._fields == native, f"{call.__name__} has {call._fields}; the native operator {name} takes {native}"
