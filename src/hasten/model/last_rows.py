"""The last layers of a model, which use the keys and values of earlier ones, for the scored tokens alone.

Nothing else reads what such layers compute of the other tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.model.interfaces import LayerContext
from hasten.model.rope import Rotation
from hasten.ops.attention import LayerAttention
from hasten.ops.calls import BlocksCall


@dataclass(frozen=True, slots=True)
class LayerOfRows:
    """The context of a layer for rows int64 (R,) of a pass over tokens (B, T), flattened; see `LayerContext`.

    The layer attends for all tokens, those that are not wanted with zeros for queries: products and MLPs are saved,
    attention is not.
    """

    layer: Any
    rows: Tensor
    shape: torch.Size

    alone = False  # latent attention has no layers without keys

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
        """Attention (1, R, H, D) of q (1, R, H, D); k and v (B, T, Hkv, D) are those of all tokens."""
        every = q.new_zeros(self.shape.numel(), *q.shape[2:]).index_copy(0, self.rows, q[0])
        found = self.layer.attend(
            every.unflatten(0, self.shape), k, v, attention=attention, sinks=sinks, dropout=dropout
        )
        return found.flatten(0, 1)[self.rows][None]

    def view(self, **sizes: int) -> Any:
        return self.layer.view(**sizes)


def of_rows(
    rows: Tensor,
    x: Tensor,
    ropes: Sequence[Rotation],
    layers: Sequence[Any],
    features: Tensor | None,
) -> tuple[Tensor, list[Rotation], list[LayerContext], Tensor | None]:
    """What `Transformer.each_block` gives its blocks, for some rows alone: x (1, R, C), and the rest alike."""
    shape = x.shape[:2]

    def own(part: Tensor) -> Tensor:
        return part.expand(*shape, *part.shape[2:]).flatten(0, 1)[rows][None]

    features = None if features is None else features.flatten(1, 2)[:, None, rows]
    every: list[LayerContext] = [LayerOfRows(layer, rows, shape) for layer in layers]
    return own(x), [tuple(map(own, rope)) for rope in ropes], every, features


def call_of_rows(call: BlocksCall, rows: Tensor) -> BlocksCall:
    """The call for rows int64 (R,) of its flattened tokens alone, which write no keys: x (1, R, C).

    Each row is a sequence of its own, whose last token it is: the native attention gives it the same bits so.
    """
    ends = call.query_start_loc[1:]
    sequence = torch.searchsorted(ends, rows, right=True)  # (R,)
    return call._replace(
        x=call.x.flatten(0, -2)[rows][None],
        rope_rows=rows if call.rope_rows is None else call.rope_rows.flatten()[rows],
        slot_mapping=call.slot_mapping[rows],
        query_start_loc=torch.arange(len(rows) + 1),
        seq_lens=call.seq_lens[sequence] - (ends[sequence] - 1 - rows),
        first_slots=None if call.first_slots is None else call.first_slots[sequence],
        block_table=None if call.block_table is None else call.block_table[sequence],
        features=None if call.features is None else call.features[:, rows],
    )
