"""Checks of Triton's attention over a cache, interpreted on a CPU and unchanged on a GPU."""

from dataclasses import replace

import torch

from hasten.ops.attention import AttentionSpec, paged, ragged
from hasten.ops.attention.cache_rows import PLAIN
from hasten.ops.attention.paged import groups_of
from hasten.ops.attention.reference import reference
from hasten.ops.attention.sdpa import sdpa
from hasten.ops.attention.view import AttentionMetadata, KVView
from layer_attention import layer_of
from linear_cases import rms


def step_over(counts, *, kv_heads, head_dim, size, dtype, rows=PLAIN, seed=0):
    """Keys, values and metadata of sequences with (earlier, new) tokens: in blocks in a random order, or with size None
    one behind the other; NaN where no token is. Also by blocks and with zeros there, for the reference."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [before + new for before, new in counts]
    own = size or max(lengths) + 1
    needed = [-(-n // own) for n in lengths]
    order = torch.randperm(sum(needed), generator=generator).tolist()
    table = torch.zeros(len(counts), max(needed), dtype=torch.int64)
    held = torch.zeros(sum(needed) * own + 1, dtype=torch.bool)
    for blocks, n in zip(table, lengths, strict=True):
        for i in range(-(-n // own)):
            blocks[i] = order.pop()
        places = torch.arange(n)
        held[blocks[places // own] * own + places % own] = True
    memory = torch.randn(2, kv_heads, len(held), head_dim, generator=generator).to(dtype).transpose(1, 2)
    memory[:, ~held] = float("nan")
    k, v = (rows.write(t) for t in memory.unbind())
    starts = torch.tensor([0, *(new for _, new in counts)]).cumsum(0)
    by_block = AttentionMetadata(starts[:-1], starts, torch.tensor(lengths), None, table, own, rows)
    facts = {"max_query": max(new for _, new in counts), "longest": max(lengths) + 20}
    metadata = by_block._replace(**facts)
    if size is None:
        metadata = metadata._replace(first_slots=table[:, 0] * own, block_table=None, block_size=0)
    zeros = [rows.write(t.nan_to_num(0.0)) for t in memory.unbind()]
    return KVView(k, v, metadata), KVView(*zeros, by_block), generator


def check_ragged(
    *, counts, heads, head_dim, window, softcap, size, dtype, device, rows=PLAIN, counted=True, splits=None
):
    """Errs at most twice what plain PyTorch errs on keys brought side by side, and leaves the counters as they were."""
    heads, kv_heads = heads
    view, by_block, generator = step_over(
        counts, kv_heads=kv_heads, head_dim=head_dim, size=size, dtype=dtype, rows=rows
    )
    spec = AttentionSpec(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window, softcap=softcap
    )
    metadata = view.metadata
    q = torch.randn(int(metadata.query_start_loc[-1]), heads, head_dim, generator=generator).to(dtype)
    blocks = by_block.metadata
    groups = groups_of(
        *(t.numpy() for t in (blocks.query_start_loc, blocks.seq_lens, blocks.block_table)), blocks.block_size
    )
    wide = by_block._replace(k=by_block.k.double(), v=by_block.v.double()) if rows.bits is None else by_block
    exact = paged.gathered(q.double(), wide, spec=spec, groups=lambda: groups, dense=layer_of(reference, spec))
    kernel = sdpa if softcap is None else reference
    plain = paged.gathered(q, by_block, spec=spec, groups=lambda: groups, dense=layer_of(kernel, spec))
    step = AttentionMetadata(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in metadata))
    there = KVView(view.k.to(device), view.v.to(device), step)
    counters = ragged.counters_on(torch.device(device)) if counted else None
    chosen = ragged.plan_for
    if splits is not None:
        ragged.plan_for = lambda **facts: replace(chosen(**facts), splits=splits)
    try:
        if rows.rotated:
            found = paged.triton(q.to(device), there, spec=spec)
        else:
            found = ragged.over_view(q.to(device), there, spec=spec, counters=counters)
    finally:
        ragged.plan_for = chosen
    assert counters is None or not counters.any()
    # One unit in the last place of the largest output: over a handful of keys PyTorch may err by chance not at all.
    few = max(0.0, 1 - sum(before + new for before, new in counts) / 100)
    unit = torch.finfo(dtype).eps * exact.abs().max().item() * few
    assert rms(found.cpu().double() - exact) <= 2 * rms(plain.double() - exact) + unit


def check_step(*, before, heads, head_dim, half, normed, window, softcap, size, splits, counted, padded, dtype, device):
    """A decode step in one launch gives what norms, turn and cache write, and then attention, give one after the other;
    the cache has the same rows."""
    from hasten.ops.attention import step
    from hasten.ops.block.triton_steps import place_heads

    heads, kv_heads = heads
    counts = [(n, 1) for n in before]
    view, _, generator = step_over(counts, kv_heads=kv_heads, head_dim=head_dim, size=size, dtype=dtype)
    metadata, batch = view.metadata, len(before)
    rows = (
        metadata.first_slots
        if size is None
        else metadata.block_table[torch.arange(batch), torch.tensor(before) // size]
    )
    places = torch.tensor(before) if size is None else rows * size + torch.tensor(before) % size
    slots = rows + places if size is None else places
    seq_lens = metadata.seq_lens.clone()
    if padded:
        slots[0], seq_lens[0] = -1, 0
    metadata = metadata._replace(slot_mapping=slots, seq_lens=seq_lens)
    there = AttentionMetadata(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in metadata))
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype).to(device)
    angles = torch.rand(batch, half, generator=generator).to(device)
    tables = (angles.cos(), angles.sin()) if half else (None, None)
    weights = [torch.rand(head_dim, generator=generator).to(dtype).to(device) if normed else None for _ in range(2)]
    spec = AttentionSpec(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window, softcap=softcap
    )
    caches = [[t.clone().to(device) for t in (view.k, view.v)] for _ in range(2)]
    q = place_heads(qkv, *tables, *weights, there.slot_mapping, *caches[0], heads, 1e-6, 0.5)
    expected = ragged.over_view(q, KVView(*caches[0], there), spec=spec)
    counters = ragged.counters_on(torch.device(device)) if counted else None
    chosen = step.plan_for
    if splits is not None:
        step.plan_for = lambda **facts: replace(chosen(**facts), splits=splits)
    try:
        found = step.decode_step(
            *(qkv, *tables, *weights, there.slot_mapping, *caches[1]),
            *(there.seq_lens, there.first_slots, there.block_table, there.block_size, counters, there.longest),
            *(heads, 1e-6, 0.5, spec.scale, window or 0, softcap or 0.0),
        )
    finally:
        step.plan_for = chosen
    assert counters is None or not counters.any()
    unit = torch.finfo(dtype).eps
    for one, other in zip(*caches, strict=True):
        # A norm that sums in another order may round to the number beside (one of 885,760 on an H200).
        one, other = one.nan_to_num(7.0).float(), other.nan_to_num(7.0).float()
        assert ((one - other).abs() <= (unit * one.abs() if normed else 0)).all()
    assert not found.isnan().any()
    assert (found.float() - expected.float()).abs().max() <= 4 * unit * expected.float().abs().max() + 1e-6
