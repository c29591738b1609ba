"""The forward pass of a `DecodeBatch`: all that it computes with comes from tensors of fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.engine.batch import DecodeBatch, StepShape
from hasten.model.transformer import Transformer
from hasten.ops import triton_support
from hasten.ops.attention import AttentionRequest, LayerAttention
from hasten.ops.attention.inputs import visible
from hasten.ops.attention.paged import PagedGroup
from hasten.ops.attention.view import AttentionMetadata, KVView, StackView
from hasten.ops.picker import Kernel


@dataclass(frozen=True, slots=True)
class Keys:
    """For kernels that bring keys side by side: rows (S·W,) of the queries, slots (S, L) of the keys, in order, and
    positions (S, W) of the queries.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor

    def seen(self, window: int | None) -> list[PagedGroup]:
        """As one group, with the mask of a layer. Padding sees a key, so that nothing becomes NaN."""
        places = torch.arange(self.slots.shape[1], device=self.slots.device)
        return [PagedGroup(self.rows, self.slots, self.positions, visible(self.positions, places, window))]


@dataclass(frozen=True, slots=True)
class BatchLayer:
    """One layer's keys and values during a batch's step; see `LayerContext`."""

    held: KVView
    kernel: Kernel[AttentionRequest]
    keys: Keys | None

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """For a kernel that writes and reads the cache itself."""
        return self.held

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, attention: LayerAttention, dropout: float) -> Tensor:
        """Write the step's k, v (S, W, Hkv, D); attention of q (S, W, H, D) over all that its sequences hold."""
        held, spec, keys = self.held, attention.spec, self.keys
        slots, rows = held.metadata.slot_mapping, held.metadata.rows
        held.k[slots], held.v[slots] = rows.write(k).flatten(0, 1), rows.write(v).flatten(0, 1)

        def groups() -> list[PagedGroup]:
            assert keys is not None
            return keys.seen(spec.window)

        found = self.kernel.run(q.flatten(0, 1), held, spec=spec, groups=groups, dense=attention)
        return found.unflatten(0, q.shape[:2])


@dataclass(frozen=True, slots=True)
class BatchStep:
    """The context of a forward pass of S sequences by W tokens each, and their positions int64 (S, W)."""

    all_layers: StackView
    positions: Tensor
    kernel: Kernel[AttentionRequest]
    keys: Keys | None

    @property
    def layers(self) -> list[BatchLayer]:
        """For the blocks one by one."""
        return [BatchLayer(view, self.kernel, self.keys) for view in self.all_layers.layers]


def batch_step(batch: DecodeBatch, shape: StepShape) -> BatchStep:
    """Positions, slots and lengths of a filled batch, computed on the device.

    A sequence of fewer than W new tokens is padded behind them: such a token repeats the last position and is written
    nowhere (slot -1). Attention takes all W as the sequence's last ones. A padded sequence has length 0.
    """
    cache, size, width = batch.cache, batch.block_size, shape.width
    step, table = batch.views(shape), batch.block_table[: shape.sequences]
    positions, slots, seq_lens = places_of(step.lengths, step.counts, table, width=width, block_size=size)
    metadata = AttentionMetadata(
        slots.flatten(),
        batch.query_start_loc[width][: shape.sequences + 1],
        seq_lens,
        first_slots=None,
        block_table=table,
        block_size=size,
        rows=cache.row_format,
        max_query=width,
        longest=shape.longest + (width if width > 1 else 0),
    )
    keys = None
    if cache.kernel.name == "gathered":
        places = torch.arange(shape.longest, device=batch.device)
        rows = torch.arange(positions.numel(), device=batch.device)
        keys = Keys(rows, table[:, places // size] * size + places % size, positions)
    return BatchStep(StackView(cache.k, cache.v, metadata), positions, cache.kernel, keys)


def places_of(
    lengths: Tensor, counts: Tensor, table: Tensor, *, width: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and slots (S, W) of a batch's tokens, and the lengths (S,) that attention takes.

    lengths and counts (S,) as in `StepTensors`; table (S, columns).
    """
    if lengths.is_cuda and triton_support.refusal(lengths.device) is None:
        from hasten.ops.draw import triton_draw

        return triton_draw.place(lengths, counts, table, width, block_size)
    offsets, ends = torch.arange(width, device=lengths.device), lengths[:, None]
    start = ends - counts[:, None]
    room = table.shape[1] * block_size  # what lies behind is written nowhere, and never read
    positions = torch.minimum(start + offsets, ends - 1).clamp(min=0, max=room - 1)  # (S, W)
    slots = table.gather(1, positions // block_size) * block_size + positions % block_size
    slots = torch.where((offsets < counts[:, None]) & (ends > 0) & (start + offsets < room), slots, -1)
    return positions, slots, torch.where(lengths > 0, (start[:, 0] + width).clamp(max=room), 0)


def forward(model: Transformer, batch: DecodeBatch, shape: StepShape, *, out: Tensor) -> Tensor:
    """Logits (S, W, V) float32 after each token of a filled batch, written to `out`."""
    step = batch_step(batch, shape)
    return model.scores(model.states(batch.views(shape).tokens, step.positions, step), out=out)
