"""Atrous attention as dense attention: the blocks that see each other, brought side by side.

Where a query sees every s-th block, counted from its own, the blocks of one remainder modulo s see each other and no
others. Side by side they are s sequences a row, of plain attention over 1/s of the positions each, which every dense
kernel serves: with blocks of a single position, too, causal or not, padded, packed, with dropout.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention.inputs import AttentionInputs, Intervals
from hasten.ops.attention.spec import AttentionSpec


def regroups(inputs: AttentionInputs) -> bool:
    """Whether `regrouped` computes it: biases and ALiBi stay where they are, on all pairs of positions."""
    mask = inputs.block_mask
    return mask is not None and mask.layout.period is not None and inputs.bias is None and inputs.alibi is None


def regrouped(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs
) -> Tensor:
    """`run`, a dense kernel, on the sequences of one remainder each; arguments as every kernel's."""
    mask = inputs.block_mask
    assert mask is not None
    assert mask.layout.period is not None
    mask.check(q.shape[1], k.shape[1])
    block, period = mask.layout.block, mask.layout.period
    batch, queries, keys, cycle = q.shape[0], q.shape[1], k.shape[1], mask.layout.block * mask.layout.period
    before, after = (keys - queries) % cycle, -keys % cycle  # what lacks of whole cycles

    def group(x: Tensor, before: int = 0) -> Tensor:
        """(B, n, …) -> (B·s, n', …), n' positions of one remainder."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))
        return x.unflatten(1, (-1, period, block)).transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def counted(places: Tensor) -> Tensor:
        """How many positions of its remainder lie before each place, (B, s, n)."""
        places, first = places[:, None], torch.arange(0, cycle, block, device=q.device)[:, None]
        return (places // cycle * block + (places % cycle - first).clamp(0, block)).int()

    there = inputs.intervals_of(queries, keys, q.device)
    if there is not None and len(there.low) < batch:
        there = Intervals(*(x.expand(batch, -1) for x in there))
    if there is None and after and not mask.causal:
        there = Intervals(*(torch.full((batch, 1), end, dtype=torch.int32, device=q.device) for end in (0, keys - 1)))
    if there is not None:
        low, high = counted(there.low), counted(there.high + 1) - 1
        if there.low.shape[1] == 1:
            there = Intervals(low.flatten(0, 1), high.flatten(0, 1))
        else:  # of each query, in its own remainder
            rows, own = torch.arange(batch * period), torch.arange(period).repeat(batch)
            there = Intervals(*(group(x.transpose(1, 2), before)[rows, :, own] for x in (low, high)))
    out = run(
        group(q, before),
        group(k),
        group(v),
        replace(spec, causal=mask.causal, window=None),
        AttentionInputs(
            intervals=there,
            key_padding=None if inputs.key_padding is None else group(inputs.key_padding),
            sinks=inputs.sinks,
            dropout=inputs.dropout,
        ),
    )
    out = out.unflatten(1, (-1, block)).unflatten(0, (batch, period)).transpose(1, 2).flatten(1, 3)
    return out[:, before : before + queries]
