"""The forward pass of a `DecodeBatch`: all that it computes with comes from tensors of fixed addresses."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hasten.engine.batch import DecodeBatch, StepShape
from hasten.engine.step import Groups, KVStep
from hasten.model.transformer import Transformer
from hasten.ops import triton_support
from hasten.ops.attention.inputs import visible
from hasten.ops.attention.paged import PagedGroup
from hasten.ops.attention.view import AttentionMetadata


def batch_step(batch: DecodeBatch, shape: StepShape) -> KVStep:
    """The context of a filled batch: S sequences by W tokens. Positions, slots and lengths are computed on the device.

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
    groups: list[Groups] = [list] * len(cache.k)
    if cache.kernel.name == "gathered":
        places = torch.arange(shape.longest, device=batch.device)
        rows = torch.arange(positions.numel(), device=batch.device)
        keys = PagedGroup(rows, table[:, places // size] * size + places % size, positions)
        groups = [partial(_seen, keys, window) for window in cache.windows]
    return KVStep(cache.k, cache.v, metadata, positions, kernel=cache.kernel.run, groups=groups, plan=cache.plan())


def _seen(keys: PagedGroup, window: int | None) -> list[PagedGroup]:
    """The keys with the mask of a layer. Padding sees a key, so that nothing becomes NaN."""
    places = torch.arange(keys.slots.shape[1], device=keys.slots.device)
    return [keys._replace(mask=visible(keys.positions, places, window))]


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
