"""Native attention on every instruction set: against float64, and the same bits for a query in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.attention import attention
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.native import library
from instruction_sets import ISAS

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")


def run(isa, q, k, v, lengths, *, window=None, softcap=None, scale=None, rows=PLAIN, sinks=None):
    """q (B, T, H, D); k, v (B, S, Hkv, D): T queries of each sequence, the last of its lengths[b] positions."""
    batch, tokens, _, size = q.shape
    room = k.shape[1]
    out = library(isa).ops.attention(
        q.flatten(0, 1),
        k.flatten(0, 1).contiguous(),
        v.flatten(0, 1).contiguous(),
        torch.arange(batch + 1) * tokens,
        torch.tensor(lengths),
        torch.arange(batch) * room,
        None,
        0,
        rows.rotated,
        size**-0.5 if scale is None else scale,
        window or 0,
        softcap or 0.0,
        None,
        sinks,
    )
    return out.view(q.shape)


def case(seed, batch, tokens, room, heads, kv_heads, size, dtype):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    q = draw(batch, tokens, heads, size).to(dtype)
    k, v = (draw(batch, room, kv_heads, size).bfloat16() for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20)
@given(
    st.integers(0, 1000),
    st.integers(1, 2),
    st.sampled_from([1, 2, 3, 7, 65]),
    st.integers(0, 600),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (8, 1), (6, 2)]),
    st.sampled_from([8, 16, 20, 64, 80, 128, 256, 500, 512, 576]),
    st.sampled_from([None, 1, 5, 64, 100]),
    st.sampled_from([None, 20.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_at_most_twice_that_of_plain_bfloat16(
    isa, seed, batch, tokens, before, heads, size, window, softcap, with_sinks, dtype
):
    room = tokens + before
    errors, allowed = [], []
    for draw in range(8):  # a single tiny draw can be lucky for either side
        q, k, v = case(8 * seed + draw, batch, tokens, room, *heads, size, dtype)
        lengths = [room - b for b in range(batch)] if before else [room] * batch
        sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(draw)) * 3 if with_sinks else None
        found = run(isa, q, k, v, lengths, window=window, softcap=softcap, sinks=sinks)
        for b, length in enumerate(lengths):
            kb, vb = k[b : b + 1, :length], v[b : b + 1, :length]
            options = {"window": window, "softcap": softcap, "sinks": sinks, "kernel": "reference"}
            exact = attention(q[b : b + 1].double(), kb.double(), vb.double(), **options)[0]
            # Plain PyTorch in bfloat16: every step rounded, as an explicit bf16 attention does.
            plain = explicit_bfloat16(q[b], kb[0], vb[0], window, softcap, sinks)
            errors.append((found[b].double() - exact).flatten())
            allowed.append((plain.double() - exact).flatten())
    error, limit = torch.cat(errors).abs(), torch.cat(allowed).abs()
    assert error.square().mean().sqrt() <= 2 * limit.square().mean().sqrt() + 1e-7
    assert error.max() <= 2 * limit.max() + 1e-6


def explicit_bfloat16(q, k, v, window, softcap, sinks):
    """softmax(q·kᵀ)·v of one sequence with every intermediate result in bfloat16."""
    q, groups = q.bfloat16(), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(k.shape[0])
    distance = places[k.shape[0] - q.shape[0] :, None] - places
    hidden = (distance < 0) | (distance >= (window or 1 << 30))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        own = sinks.bfloat16()[:, None, None].expand(*scores.shape[:2], 1)
        return torch.einsum("hts,shd->thd", torch.cat((scores, own), -1).softmax(-1)[..., :-1], v)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [PLAIN, RowFormat(8)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 70])
def test_a_query_gets_the_same_bits_alone_and_in_company(isa, window, size, rows):
    q, *kept = case(0, 2, 90, 700, 4, 2, size, torch.bfloat16)
    k, v = (rows.write(t) for t in kept)
    lengths = [700, 613]
    together = run(isa, q, k, v, lengths, window=window, rows=rows)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for b in range(2):
            for t in (0, 1, 44, 88, 89):
                alone = run(
                    isa,
                    q[b : b + 1, t : t + 1],
                    k[b : b + 1],
                    v[b : b + 1],
                    [lengths[b] - 89 + t],
                    window=window,
                    rows=rows,
                )
                assert torch.equal(alone[0, 0], together[b, t])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=6)
@given(
    st.integers(0, 1000),
    st.sampled_from([130, 515, 640]),
    st.sampled_from([0, 1, 500, 700]),
    st.sampled_from([(8, 1), (16, 1), (16, 2), (6, 2), (4, 4)]),
    st.sampled_from([64, 80, 128, 512, 576]),
    st.sampled_from([None, 100, 513]),
    st.sampled_from([PLAIN, RowFormat(8), RowFormat(4, rotated=True)]),
)
def test_long_prompts_have_the_bits_of_single_queries(isa, seed, tokens, before, heads, size, window, rows):
    """Pieces of many lines, several of them, over several spans: from 130 × 8 lines on with two threads."""
    room = tokens + before
    q, k, v = case(seed, 1, tokens, room, *heads, size, torch.bfloat16)
    kept = [rows.write(t) for t in (k, v)]
    exact_k, exact_v = (rows.read(t, size, torch.float64) for t in kept)
    torch.set_num_threads(2)
    found = run(isa, q, *kept, [room], window=window, rows=rows)
    exact = attention(q.double(), exact_k, exact_v, window=window, kernel="reference")
    # Weights and results in bf16; a wrong tile or line is off by far more.
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)
    for t in {0, 31, 64, tokens // 2, tokens - 1}:
        alone = run(isa, q[:, t : t + 1], *kept, [before + t + 1], window=window, rows=rows)
        assert torch.equal(alone[0, 0], found[0, t]), t


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("tokens", "size", "block"), [(5, 32, 16), (1, 64, 16), (5, 64, 8), (1, 128, 6)])
def test_block_table_reads_what_a_contiguous_cache_holds(isa, tokens, size, block):
    q, k, v = case(1, 2, tokens, 96, 4, 2, size, torch.float32)
    lengths = [93, 40]
    expected = run(isa, q, k, v, lengths)
    order = torch.randperm(192 // block, generator=torch.Generator().manual_seed(0))
    blocks_k, blocks_v = (t.reshape(len(order), block, 2, size)[order.argsort()].flatten(0, 1) for t in (k, v))
    found = library(isa).ops.attention(
        q.flatten(0, 1),
        blocks_k.contiguous(),
        blocks_v.contiguous(),
        torch.tensor([0, tokens, 2 * tokens]),
        torch.tensor(lengths),
        None,
        order.view(2, -1),
        block,
        False,
        size**-0.5,
        0,
        0.0,
    )
    assert torch.equal(found.view(q.shape), expected)


def test_what_lies_past_a_sequence_is_never_read():
    q, k, v = case(2, 1, 3, 200, 2, 1, 64, torch.float32)
    expected = run(None, q, k, v, [100])
    k[:, 100:], v[:, 100:] = float("nan"), float("nan")
    assert torch.equal(run(None, q, k, v, [100]), expected)


def test_opcheck():
    q, k, v = case(3, 1, 3, 20, 2, 1, 16, torch.float32)
    arguments = (
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        torch.tensor([0, 3]),
        torch.tensor([20]),
        torch.tensor([0]),
        None,
        0,
        False,
        0.25,
        0,
        0.0,
    )
    torch.library.opcheck(library().ops.attention.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("own", [2, 7, 9])
def test_nothing_of_an_earlier_call_is_left_where_a_chunk_crosses_a_span(isa, own):
    """Queries that see nothing of a span of 512 keys stand beside others that do."""
    for heads, kv_heads in ((8, 8), (4, 2)):
        q, k, v = case(5, 1, own, 900, heads, kv_heads, 64, torch.bfloat16)
        expected = [run(isa, q, k, v, [length]) for length in range(513, 513 + own)]
        for length, wanted in zip(range(513, 513 + own), expected, strict=True):
            run(isa, q, k, torch.full_like(v, float("nan")), [814])
            assert torch.equal(run(isa, q, k, v, [length]), wanted)
            assert wanted.isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_nan_key_reaches_every_query_that_sees_it(isa, softcap):
    q, k, v = case(3, 1, 4, 200, 2, 1, 64, torch.bfloat16)
    k[:, 197] = float("nan")  # the second query's own
    found = run(isa, q, k, v, [200], softcap=softcap)[0]
    assert found[:1].isfinite().all()
    assert found[1:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [PLAIN, RowFormat(8), RowFormat(4, rotated=True)], ids=str)
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_join_the_softmax_over_spans_and_caches_of_any_kind(isa, rows, window):
    q, k, v = case(6, 2, 5, 1300, 8, 2, 64, torch.float32)
    sinks = torch.linspace(-4, 11, 8)
    kept = [rows.write(t) for t in (k, v)]
    exact_k, exact_v = (rows.read(t, 64, torch.float64) for t in kept)
    found = run(isa, q, *kept, [1300, 700], window=window, rows=rows, sinks=sinks)
    options = {"window": window, "sinks": sinks, "kernel": "reference"}
    for b, length in enumerate((1300, 700)):
        keys, values = exact_k[b : b + 1, :length], exact_v[b : b + 1, :length]
        exact = attention(q[b : b + 1].double(), keys, values, **options)
        plain = attention(q[b : b + 1].double(), keys, values, **options | {"sinks": None})
        torch.testing.assert_close(found[b : b + 1].double(), exact, rtol=0.02, atol=0.003)
        assert (exact - plain).abs().max() > 0.4 * plain.abs().max()  # without sinks it would be another function
    alone = run(isa, q[1:, 4:], *(t[1:] for t in kept), [700], window=window, rows=rows, sinks=sinks)
    assert torch.equal(alone[0, 0], found[1, 4])


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_and_the_smallest_sink(isa):
    q, k, v = case(7, 1, 3, 70, 4, 4, 16, torch.float32)
    plain = run(isa, q, k, v, [70])
    assert torch.equal(run(isa, q, k, v, [70], sinks=torch.full((4,), -1e30)), plain)
    assert run(isa, q, k, v, [70], sinks=torch.full((4,), 1e30)).abs().max() < 1e-30
    with pytest.raises(RuntimeError, match="one sink for each head"):
        run(isa, q, k, v, [70], sinks=torch.zeros(3))
