"""All blocks of a fused model on a CPU in one native call, and its last norm with the head in another."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hasten.model.config import ModelConfig
from hasten.model.fused_linear import norm_fields, weight_fields
from hasten.model.fused_native import FusedBlock
from hasten.model.interfaces import Context
from hasten.model.last_rows import blocks_of, call_of_rows
from hasten.model.rope import Rotation
from hasten.model.transformer import Transformer
from hasten.ops.calls import BlocksCall, NormLinearCall
from hasten.ops.native import native_ops

PARTS = 5  # of a block, whose times a call writes (ops/block/block.cpp)


class FusedStack:
    """All blocks of a fused model in one native call, and its last norm and head in another.

    Separate calls cost more, because between them the weights evict Python's own data from the caches. Where few tokens
    are scored, the last layers, which use the keys of others, are a second call for these tokens alone.

    times: None, or int64 (1 + 5·blocks): each call writes when the blocks began and when each of a block's parts
    ended (`FusedBlock.parts`), in nanoseconds of the steady clock.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.times: Tensor | None = None
        self.rope_index = [-1 if layer.rope is None else layer.rope for layer in config.layers]
        self._scores: NormLinearCall | None = None  # of the model's norm and head, without x
        self._norm_linear: Any = None  # its operator

    def __getstate__(self) -> dict[str, Any]:
        """State without prepared arguments; a copy makes its own."""
        return self.__dict__ | {"_scores": None, "_norm_linear": None}

    def run(
        self,
        model: Transformer,
        x: Tensor,
        ropes: Sequence[Rotation],
        context: Context,
        features: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `Stack`; in float32. Blocks that were hooked, replaced or patched are called one by one."""
        step, bound = context.metadata, self.bound(model)
        if step is None or bound is None:
            x = model.each_block(x, ropes, context.layers, features=features)
            return x if rows is None else x.flatten(0, -2)[rows][None]
        states = [own for own in context.states if own is not None]
        call = BlocksCall(
            x=x.float(),
            cos=[rope[0] for rope in ropes],
            sin=[rope[1] for rope in ropes],
            query_factors=[factor for rope in ropes for factor in rope[2:]],
            rope_index=self.rope_index,
            k=context.k,
            v=context.v,
            slot_mapping=step.slot_mapping,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            first_slots=step.first_slots,
            block_table=step.block_table,
            block_size=step.block_size,
            rotated=step.rows.rotated,
            plans=[one.plan for one in bound],
            adapters=None if model.adapters is None else model.adapters.of(x.shape[0] * x.shape[1]),
            times=self.times,
            seen=context.seen,
            inputs=[own["inputs"] for own in states],
            matrices=[own["matrix"] for own in states if "matrix" in own],
            state_slots=context.state_slots,
            certain=context.certain,
            features=None if features is None else features.float().flatten(1, -2).contiguous(),  # (L, R, P)
        )
        blocks, own = bound[0].blocks, model.config.first_without_keys
        if rows is None:
            return blocks(*call)
        x = blocks(*blocks_of(call, slice(own), parts=PARTS))
        return blocks(*call_of_rows(blocks_of(call._replace(x=x), slice(own, None), parts=PARTS), rows))

    def bound(self, model: Transformer) -> list[Any] | None:
        """The arguments each block prepared; None if one was hooked, replaced or patched and must be called itself."""
        found = []
        for block in model.blocks:
            own = type(block) is FusedBlock and "forward" not in block.__dict__
            if not own or block._forward_hooks or block._forward_pre_hooks:
                return None
            found.append(block._bound)
        return found

    def scores(self, model: Transformer, x: Tensor) -> Tensor:
        """x (…, C) before the last norm -> logits (…, out features of the head) in float32."""
        norm, head, call = model.norm, model.head, self._scores
        if call is None or call.data is not head.data or call.norm_weight is not norm.weight:
            fields = {**norm_fields(norm), **weight_fields(head), "out_features": head.out_features}
            self._scores = call = NormLinearCall(x=x.new_empty(0), **fields)
            self._norm_linear = native_ops().norm_linear.default
        return self._norm_linear(x, *call[1:])
