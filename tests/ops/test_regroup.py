"""Patterns beside everything else: atrous attention regrouped, padding, packed documents and dropout, natively."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.attention import LayerAttention, attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.patterns import Atrous, BigBird, Local
from hasten.ops.picker import explained
from instruction_sets import NATIVE, needs_native

PLAIN = {"device": torch.device("cpu"), "dtype": torch.float32}


def explicit(q, k, v, block_mask, key_padding_mask=None, cu_seqlens=None):
    """All scores and the whole mask: `attention` itself regroups whatever kernel it is asked for, the reference too."""
    shape = q.shape
    if cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    seen = block_mask.dense(q.shape[1], k.shape[1], q.device)[None]  # (1, 1 or H, T, S)
    if cu_seqlens is not None:
        of = torch.searchsorted(cu_seqlens[1:], torch.arange(q.shape[1]), right=True)
        seen = seen & (of[:, None] == of)
    if key_padding_mask is not None:
        lengths = key_padding_mask.dim() == 1
        there = torch.arange(k.shape[1]) < key_padding_mask[:, None] if lengths else key_padding_mask
        seen = seen & there[:, None, None]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen  # zeros where no key is seen
    return torch.einsum("bhts,bshd->bthd", weights, v).reshape(shape)


def both(q, k, v, kernel, **options):
    """Values and gradients of ours and of the explicit computation."""
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    found = []
    for run in (partial(attention, kernel=kernel), explicit):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = run(*leaves, **options)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    return zip(*found, strict=True)


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 1, 2, 16]),
    st.integers(1, 70),
    st.sampled_from([0, 0, 1, 13]),
    st.booleans(),
    st.sampled_from(["", "lengths", "gaps", "documents"]),
    st.sampled_from([None, "chunked"]),
    st.integers(0, 100),
)
def test_every_stride_at_token_level_equals_the_mask(stride, block, queries, before, causal, beside, kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    before = 0 if beside == "documents" else before
    keys = queries + before
    q, k, v = (torch.randn(2, n, h, 8, generator=generator) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    options = {}
    if beside == "lengths":
        options["key_padding_mask"] = torch.randint(0, keys + 1, (2,), generator=generator)
    elif beside == "gaps":
        options["key_padding_mask"] = torch.rand(2, keys, generator=generator) < 0.7
    elif beside == "documents":
        inner = torch.randint(0, 2 * queries + 1, (3,), generator=generator).sort().values.tolist()
        options["cu_seqlens"] = torch.tensor([0, *inner, 2 * queries])
        keys *= 2
    pattern = Atrous(stride=stride, block=block, causal=causal)
    mask = BlockMask.of(pattern, keys, queries=keys - before)
    with explained() as choices:
        pairs = list(both(q, k, v, kernel, block_mask=mask, **options))
    if NATIVE and kernel is None and beside != "gaps" and queries > 2 * stride * block:
        assert choices[0].kernel == "native"
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_pattern_of_single_positions_is_laid_out_without_its_columns():
    mask = BlockMask.of(Atrous(stride=3, block=1), 100_000)
    assert mask.layout.present == sum(1 + i // 3 for i in range(100_000))
    assert mask.layout.density == pytest.approx(1 / 3, rel=1e-3)


@needs_native
@pytest.mark.parametrize("beside", ["lengths", "documents", "left"])
def test_native_patterns_beside_padding_and_documents(beside):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 150, h, 16, generator=generator) for h in (4, 2, 2))
    options, keys = {}, 150
    if beside == "lengths":
        options["key_padding_mask"] = torch.tensor([150, 67])
    elif beside == "left":
        options["key_padding_mask"] = torch.arange(150) >= torch.tensor([[3], [99]])
    else:
        options["cu_seqlens"], keys = torch.tensor([0, 40, 41, 230, 300]), 300
    mask = BlockMask.of(BigBird(block=16, per_head=True), keys, heads=4)
    for one, other in both(q, k, v, "native-sparse", block_mask=mask, **options):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def dropped(q, k, probability, mask, seed, **options):
    """The probabilities as they were dropped, (B, H, T, S): seen through values that are unit vectors."""
    torch.manual_seed(seed)
    unit = torch.eye(k.shape[1]).expand(k.shape[0], k.shape[2], -1, -1).transpose(1, 2)
    wide = [torch.cat([x, x.new_zeros(*x.shape[:3], k.shape[1] - x.shape[3])], -1) for x in (q, k)]
    scale = q.shape[3] ** -0.5
    return attention(*wide, unit, scale=scale, dropout=probability, block_mask=mask, **options).transpose(1, 2)


@needs_native
@pytest.mark.parametrize("pattern", [None, Local(block=16, radius=1), Atrous(stride=3, block=1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_natively(pattern, dtype):
    """The share that stays, what it is multiplied by, and the gradients of exactly that choice."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 96, h, 16, generator=generator) for h in (4, 2, 2))
    mask = None if pattern is None else BlockMask.of(pattern, 96)
    options = {"block_mask": mask, "causal": None if pattern else True}
    options = {name: value for name, value in options.items() if value is not None}
    kept = dropped(q, k, 0.3, mask, 11)
    whole = dropped(q, k, 0.0, mask, 11)
    there = whole > 0
    ratio = torch.where(there, kept / whole.clamp(min=1e-30), 0)
    torch.testing.assert_close(ratio[ratio > 0], torch.full_like(ratio[ratio > 0], 1 / 0.7), rtol=1e-4, atol=1e-4)
    share = (ratio[there] > 0).float().mean().item()
    assert share == pytest.approx(0.7, abs=4 * (0.21 / there.sum().item()) ** 0.5)
    factor = ratio.round(decimals=3) * (1 / 0.7) / round(1 / 0.7, 3)  # (B, H, T, S), 0 or 1/0.7

    def explicit(q, k, v):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * 0.25
        weights = scores.masked_fill(~there, -torch.inf).softmax(-1) * factor.to(scores.dtype)
        return torch.einsum("bhts,bshd->bthd", weights, v)

    def ours(q, k, v):
        torch.manual_seed(11)
        return attention(q, k, v, dropout=0.3, **options)

    upstream = torch.randn(q.shape, generator=generator)
    results = []
    for run, kind in ((ours, dtype), (explicit, torch.float64), (explicit, dtype)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in (q, k, v)]
        out = run(*leaves)
        results.append([out, *torch.autograd.grad((out * upstream.to(out.dtype)).sum(), leaves)])
    for mine, exact, plain in zip(*results, strict=True):
        error, theirs = ((x.double() - exact).square().mean().sqrt() for x in (mine, plain))
        assert error <= 2 * theirs + torch.finfo(dtype).eps * exact.abs().max()


@needs_native
def test_dropout_follows_the_generator_and_not_the_threads():
    q, k, v = torch.randn(3, 1, 300, 2, 32)
    found, before = [], torch.get_num_threads()
    for threads, seed in ((1, 3), (2, 3), (1, 4)):
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        found.append(attention(q, k, v, dropout=0.1))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_layer_regroups_and_drops_as_a_call_does():
    from hasten.ops.attention import AttentionRequest, AttentionSpec

    q, k, v = torch.randn(3, 2, 20, 2, 8)
    mask = BlockMask.of(Atrous(stride=3, block=1), 20)
    spec = AttentionSpec(heads=2, kv_heads=2, head_dim=8, scale=8**-0.5)
    layer = LayerAttention.bind(AttentionRequest(spec=spec, dropout=True, **PLAIN))
    torch.testing.assert_close(layer(q, k, v, mask=mask), explicit(q, k, v, mask))
    one = torch.rand(2, 20, 20) < 0.5  # dropout beside a mask: by a kernel that takes both
    assert layer(q, k, v, mask=one, dropout=0.5).shape == q.shape
    assert not torch.equal(layer(q, k, v, mask=one, dropout=0.5), layer(q, k, v, mask=one))


@needs_native
def test_dropout_compiles_into_one_graph():
    def loss(q, k, v):
        return attention(q, k, v, dropout=0.2).square().sum()

    leaves = [torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = []
    for run in (loss, compiled):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run(*leaves), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
