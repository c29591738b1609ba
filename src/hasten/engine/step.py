"""The context of one forward pass over a `KVCache`: what each layer writes, and what its queries see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hasten.engine.states import StateLayer
from hasten.ops.attention import LayerAttention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.paged import PagedGroup
from hasten.ops.attention.view import AttentionMetadata, KVView
from hasten.ops.cache_plan import CachePlan
from hasten.ops.states import SequenceGroup, State

Groups = Callable[[], Sequence[PagedGroup]]  # made when a kernel first asks


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's keys and values during one step; see `LayerContext`.

    held: its tensors in the cache. Attention of blocks that do not write and read these themselves is either that of
    `kernel`, which finds the keys by `groups` or through the block tables; or, where kernel is None, the layer's own
    over the first `read` rows of each block, one block for each of the step's rows: mask (B, T, read) or
    (B, H, T, read) of those that each query sees. A mask of None or of a sparse pattern's blocks is that of a step of
    empty sequences, which see the tokens at hand only.
    """

    held: KVView
    kernel: Callable[..., Tensor] | None = None
    groups: Groups | None = None
    mask: Tensor | BlockMask | None = None
    read: int = 0

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """For a kernel that writes and reads the cache itself."""
        return self.held

    @property
    def alone(self) -> bool:
        return self.kernel is None and not isinstance(self.mask, Tensor)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention: LayerAttention,
        kept: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Write the step's k, v (B, T, Hkv, D); attention of q (B, T, H, D) over what its queries may look at."""
        held, rows = self.held, self.held.metadata.rows
        slots, head_dim, dtype = held.metadata.slot_mapping, k.shape[-1], k.dtype
        if kept is not None:
            held.k[slots] = rows.write(kept).flatten(0, 1)
            return attention(q, k, v, mask=self.mask, sinks=sinks, dropout=dropout)
        k, v = (rows.write(k),) * 2 if v is k else (rows.write(k), rows.write(v))
        held.k[slots] = k.flatten(0, 1)
        if held.v is not held.k:
            held.v[slots] = v.flatten(0, 1)
        if self.kernel is not None:
            given = {"spec": attention.spec, "groups": self.groups, "dense": attention, "sinks": sinks}
            found = self.kernel(q.flatten(0, 1), held, **given)
            return found.unflatten(0, q.shape[:2])
        if isinstance(self.mask, Tensor):
            k, v = (t[:-1].unflatten(0, (len(q), -1))[:, : self.read] for t in (held.k, held.v))  # (B, S', Hkv, …)
        k = rows.read(k, head_dim, dtype)
        v = k if held.v is held.k else rows.read(v, head_dim, dtype)
        return attention(q, k, v, mask=self.mask, sinks=sinks, dropout=dropout)


@dataclass(frozen=True, slots=True)
class KVStep:
    """The context of a forward pass of tokens at positions int64 (B, T); several sequences may share a row.

    k, v, metadata, seen: as in `KVView`, of each layer that keeps keys what is not the same for all. kernel, groups,
    masks, read: as in `KVLayer`; groups and masks of each such layer. stretched: as in `RotaryTable`. states: of every
    layer, None where it keeps keys, of no tensors where it keeps nothing; empty where all keep keys. groups_of_states:
    the sequences of the step. state_slots int64 (B,), on the host: the place of each in `states`; certain, alike: after
    how many of its tokens its state is kept, None: after all. plan: the cache as the native calls take it.
    """

    k: list[Tensor]
    v: list[Tensor]
    metadata: AttentionMetadata
    positions: Tensor
    seen: Sequence[Tensor] = ()
    kernel: Callable[..., Tensor] | None = None
    groups: Sequence[Groups] = ()
    masks: Sequence[Tensor | BlockMask | None] = ()
    read: int = 0
    stretched: Tensor | None = None
    states: Sequence[State | None] = ()
    groups_of_states: Callable[[], Sequence[SequenceGroup]] | None = None
    state_slots: Tensor | None = None
    certain: Tensor | None = None
    plan: CachePlan | None = None

    @property
    def views(self) -> list[KVView]:
        """The cache of each layer that keeps keys."""
        plans = [None if self.plan is None else self.plan.of(slice(i, i + 1)) for i in range(len(self.k))]
        held = zip(self.k, self.v, self.seen or itertools.repeat(None), plans, strict=False)
        return [KVView(k, v, self.metadata, seen, plan) for k, v, seen, plan in held]

    @property
    def layers(self) -> Sequence[KVLayer | StateLayer]:
        """For the blocks one by one."""
        if self.groups_of_states is None or self.state_slots is None:
            return self._with_keys()
        keys, more = iter(self._with_keys()), (self.groups_of_states(), self.state_slots, self.certain, self.metadata)
        places = itertools.count()

        def layer(held: State) -> StateLayer:
            place = next(places)
            return StateLayer(held, *more, self.plan.of_state(place) if self.plan is not None and held else None)

        return [next(keys) if held is None else layer(held) for held in self.states]

    def _with_keys(self) -> list[KVLayer]:
        """The layers that keep keys and values."""
        views = self.views
        if self.kernel is not None:
            return [KVLayer(view, self.kernel, groups) for view, groups in zip(views, self.groups, strict=True)]
        pairs = zip(views, self.masks, strict=True)
        return [KVLayer(view, mask=mask, read=self.read) for view, mask in pairs]
