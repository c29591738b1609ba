"""All blocks of a fused model on a CPU in one native call, and its last norm with the head in another."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hasten.model.config import ModelConfig
from hasten.model.fused_linear import norm_fields, weight_fields
from hasten.model.fused_native import FusedBlock
from hasten.model.interfaces import Context
from hasten.model.last_rows import call_of_rows
from hasten.model.rope import Rotation
from hasten.model.transformer import Transformer
from hasten.ops.calls import BlocksCall, NormLinearCall
from hasten.ops.native import native_ops

PARTS = 5  # of a block, whose times a call writes (ops/block/block.cpp)
ALL = slice(None)
_FEWEST_POSITIONS = 1024  # that a table of rotary positions has


class FusedStack:
    """All blocks of a fused model in one native call, and its last norm and head in another.

    Separate calls cost more, because between them the weights evict Python's own data from the caches; for the same
    reason what stays from step to step is prepared once. Where few tokens are scored, the last layers, which use the
    keys of others, are a second call for these tokens alone.

    times: None, or int64 (1 + 5·blocks): each call writes when the blocks began and when each of a block's parts
    ended (`FusedBlock.parts`), in nanoseconds of the steady clock.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.times: Tensor | None = None
        self.rope_index = [-1 if layer.rope is None else layer.rope for layer in config.layers]
        self._forget()

    def _forget(self) -> None:
        self.forget_plans()
        self._turns: list[Rotation] = []  # the rotary tables of positions from 0 on
        self._scores: NormLinearCall | None = None  # of the model's norm and head, without x
        self._norm_linear: Any = None  # its operator

    def forget_plans(self) -> None:
        """Look at the blocks again before the next call: one of them has changed."""
        self._plans: dict[tuple[int, int, int], Tensor] = {}  # of some of the blocks
        self._planned: list[FusedBlock] = []  # the blocks
        self._blocks: Any = None  # their operator

    def __getstate__(self) -> dict[str, Any]:
        """State without prepared arguments; a copy makes its own."""
        return {"times": self.times, "rope_index": self.rope_index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def run(
        self,
        model: Transformer,
        x: Tensor,
        positions: Tensor,
        context: Context,
        features: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `Stack`; in float32. Blocks that were hooked, replaced or patched are called one by one."""
        first = model.config.first_without_keys
        own = ALL if rows is None else slice(first)
        step, cache, stack = context.metadata, context.plan, self.plan(model, own)
        if step is None or cache is None or stack is None:
            ropes = model.rotations(positions, context.stretched)
            x = model.each_block(x, ropes, context.layers, features=features)
            return x if rows is None else x.flatten(0, -2)[rows][None]
        turns, turned = self._turned(model, positions, context)
        call = BlocksCall(
            x=x.float(),
            stack=stack,
            cache=cache.whole() if rows is None else cache.of(own),
            cos=[turn[0] for turn in turns],
            sin=[turn[1] for turn in turns],
            rope_rows=turned,
            query_factors=[factor for turn in turns for factor in turn[2:]],
            slot_mapping=step.slot_mapping,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            first_slots=step.first_slots,
            block_table=step.block_table,
            block_size=step.block_size,
            rotated=step.rows.rotated,
            adapters=None if model.adapters is None else model.adapters.of(x.shape[0] * x.shape[1]),
            times=self.times,
            state_slots=context.state_slots,
            certain=context.certain,
            features=None if features is None else features.float().flatten(1, -2).contiguous(),  # (L, R, P)
        )
        if rows is None:
            return self._blocks(*call)
        rest, times = slice(first, None), self.times
        stack = self.plan(model, rest)
        assert stack is not None, "they are some of the blocks of the first call"
        x = self._blocks(*call._replace(times=None if times is None else times[: PARTS * first + 1]))
        behind = call._replace(
            x=x,
            stack=stack,
            cache=cache.of(rest),
            times=None if times is None else times[PARTS * first :],
            features=None if call.features is None else call.features[rest],
        )
        return self._blocks(*call_of_rows(behind, rows))

    def plan(self, model: Transformer, layers: slice = ALL) -> Tensor | None:
        """Some of the blocks as the native calls take them; None if one was hooked, replaced or patched."""
        blocks = [*model.blocks]
        if blocks != self._planned:
            self.forget_plans()
            own = [block for block in blocks if type(block) is FusedBlock and block.joins_calls]
            if len(own) < len(blocks):
                return None
            for block in own:
                block.__dict__.setdefault("stacks", WeakSet()).add(self)
            self._planned, self._blocks = own, own[0]._bound.blocks
        key = layers.indices(len(blocks))
        if key not in self._plans:
            bound = [block._bound for block in self._planned[layers]]
            self._plans[key] = bound[0].plan_stack([one.plan for one in bound], self.rope_index[layers])
        return self._plans[key]

    def _turned(self, model: Transformer, positions: Tensor, context: Context) -> tuple[list[Rotation], Tensor | None]:
        """The rotations of the step's tokens; or those of all positions, and the position of each token."""
        step = context.metadata
        assert step is not None
        table, config = step.block_table, model.config
        if table is None or not config.ropes or config.stretches_at is not None:
            return model.rotations(positions, context.stretched), None
        length, turns = table.shape[1] * step.block_size, self._turns
        if not turns or len(turns[0][0]) < length:
            size = max(_FEWEST_POSITIONS, 1 << (length - 1).bit_length())
            size = max(length, min(size, config.max_positions))
            self._turns = turns = model.rotations(torch.arange(size), None)
        return turns, positions.contiguous()

    def scores(self, model: Transformer, x: Tensor) -> Tensor:
        """x (…, C) before the last norm -> logits (…, out features of the head) in float32."""
        norm, head, call = model.norm, model.head, self._scores
        if call is None or call.data is not head.data or call.norm_weight is not norm.weight:
            fields = {**norm_fields(norm), **weight_fields(head), "out_features": head.out_features}
            self._scores = call = NormLinearCall(x=x.new_empty(0), **fields)
            self._norm_linear = native_ops().norm_linear.default
        return self._norm_linear(x, *call[1:])
