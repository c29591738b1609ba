"""The native attention for training, on every instruction set: values and gradients against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import allowed, error, inputs, one_rounding, problems
from attention_cases import explicit as explicit_problem
from hasten.errors import ConfigError
from hasten.ops.attention import attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.inputs import Intervals
from hasten.ops.attention.patterns import BigBird, Causal, Fixed, Local, Variable
from hasten.ops.attention.train import native_attention
from hasten.ops.native import library
from instruction_sets import ISAS

NATIVE = library(part="training")
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native kernels cannot be built here (no C++ compiler)")
CPU = torch.device("cpu")


def explicit(q, k, v, mask, scale):
    """softmax(q·kᵀ)·v and its log-sum-exp, step by step in the inputs' dtype; mask broadcasts to (B, H, T, S)."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    sees = mask.any(-1, keepdim=True)
    weights = torch.where(sees, scores, 0).softmax(-1) * sees
    lse = torch.where(sees[..., 0], torch.where(sees, scores, 0).logsumexp(-1), -math.inf)
    return torch.einsum("bhts,bshd->bthd", weights, v), lse


def visible(queries, keys, causal, window):
    places, own = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        mask &= places <= own
    return mask & (places > own - window) if window else mask


def with_gradients(run, tensors, upstream):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = run(*leaves)
    seen = torch.isfinite(lse)
    total = (out * upstream[0].to(out.dtype)).sum() + (torch.where(seen, lse, 0) * upstream[1].to(lse.dtype)).sum()
    return [out.detach(), torch.where(seen, lse, 0).detach(), *torch.autograd.grad(total, leaves)]


def errors(shape, heads, size, dtype, mask, options, first):
    """For output, log-sum-exp and the gradients of q, k, v: our errors, explicit attention's, the largest value."""
    batch, queries, keys = shape
    found = [([], [], []) for _ in range(5)]
    draws = max(2, 64 // queries)  # a few tiny ones can be lucky for either side
    for seed in range(first, first + draws):
        generator = torch.Generator().manual_seed(seed)

        def draw(*sizes, generator=generator):
            return torch.randn(*sizes, generator=generator)

        tensors = [draw(batch, queries, heads[0], size), *(draw(batch, keys, heads[1], size) for _ in range(2))]
        tensors = [t.to(dtype) for t in tensors]
        upstream = (draw(batch, queries, heads[0], size).to(dtype), draw(batch, heads[0], queries))
        scale = size**-0.5
        exact = with_gradients(lambda *t: explicit(*t, mask, scale), [t.double() for t in tensors], upstream)  # noqa: B023
        plain = with_gradients(lambda *t: explicit(*t, mask, scale), tensors, upstream)  # noqa: B023
        ours = with_gradients(lambda *t: native_attention(*t, **options), tensors, upstream)
        for (mine, theirs, values), a, b, c in zip(found, ours, plain, exact, strict=True):
            mine.append((a.double() - c).flatten())
            theirs.append((b.double() - c).flatten())
            values.append(float(c.abs().max()))
    return [(torch.cat(a).abs(), torch.cat(b).abs(), max(c)) for a, b, c in found]


def assert_at_most_twice(found, dtype):
    # Where explicit attention is exact (a query with one key), some units in the last place of the products remain:
    # dout·v and dout·out, which cancel there, are sums of up to 128 terms each.
    rms, largest = (1e-6, 16e-6) if dtype == torch.float32 else (1e-3, 4e-3)
    for mine, theirs, size in found:
        assert mine.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + rms * max(1, size)
        assert mine.max() <= 2 * theirs.max() + largest * max(1, size)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15)
@given(
    st.integers(0, 1000),
    st.integers(1, 2),
    st.sampled_from([1, 2, 37, 64, 130]),
    st.sampled_from([0, 0, 1, 64, 90]),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (9, 9)]),
    st.sampled_from([1, 8, 20, 64, 80, 128, 512, 576]),
    st.sampled_from([(True, None), (False, None), (True, 1), (True, 50), (True, 100)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_dense_errs_at_most_twice_as_much_as_explicit_attention(
    isa, seed, batch, queries, before, heads, size, sight, dtype
):
    causal, window = sight
    mask = visible(queries, queries + before, causal, window)
    options = {"causal": causal, "window": window, "isa": isa}
    assert_at_most_twice(errors((batch, queries, queries + before), heads, size, dtype, mask, options, seed), dtype)


blocks = st.sampled_from([16, 32, 64, 128])
patterns = st.one_of(
    st.builds(BigBird, block=blocks, per_head=st.booleans(), causal=st.booleans()),
    st.builds(Fixed, block=blocks, global_patterns=st.sampled_from([1, 2])),
    st.builds(Variable, block=blocks, windows=st.just((1, 2)), causal=st.booleans(), random_blocks=st.integers(0, 1)),
    st.builds(Local, block=blocks, radius=st.integers(0, 2)),
)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=12)
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 37, 200, 330]),
    st.sampled_from([0, 1, 64, 90]),
    st.sampled_from([(1, 1), (4, 2)]),
    patterns,
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sparse_errs_at_most_twice_as_much_as_the_dense_mask(isa, seed, queries, before, heads, pattern, dtype):
    keys = queries + before
    block_mask = BlockMask.of(pattern, keys, queries=queries, heads=heads[0], layer=seed)
    mask = block_mask.dense(queries, keys, CPU)
    options = {"block_mask": block_mask, "isa": isa}
    assert_at_most_twice(errors((1, queries, keys), heads, 24, dtype, mask, options, seed), dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_intervals_hide_keys_and_queries_that_see_nothing_give_zeros(isa):
    tensors = inputs(0, 2, 150, 4, 2, 32)
    generator = torch.Generator().manual_seed(1)
    low = torch.randint(0, 150, (2, 150), generator=generator, dtype=torch.int32)
    high = low + torch.randint(-5, 60, (2, 150), generator=generator, dtype=torch.int32)
    places = torch.arange(150)
    mask = (places >= low[..., None]) & (places <= high[..., None])  # (B, T, S)
    assert not mask.any(-1).all()
    upstream = (torch.randn(2, 150, 4, 32, generator=generator), torch.randn(2, 4, 150, generator=generator))
    found = with_gradients(
        lambda *t: native_attention(*t, causal=False, low=low, high=high, isa=isa), tensors, upstream
    )
    exact = with_gradients(lambda *t: explicit(*t, mask[:, None], 32**-0.5), [t.double() for t in tensors], upstream)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-4)
    empty = ~mask.any(-1)
    assert (found[0][empty] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_gradients_hold_against_finite_differences(isa):
    tensors = inputs(2, 1, 9, 2, 1, 4)
    torch.autograd.gradcheck(
        lambda *t: native_attention(*t, isa=isa), tensors, eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0
    )


@pytest.mark.parametrize("kv_heads", [1, 6])
@pytest.mark.parametrize("sparse", [False, True])
def test_bits_do_not_depend_on_the_number_of_threads(kv_heads, sparse):
    tensors = inputs(3, 2, 400, 6, kv_heads, 64, torch.bfloat16)
    options = {"block_mask": BlockMask.of(BigBird(block=32), 400)} if sparse else {}
    upstream = (torch.randn(2, 400, 6, 64), torch.randn(2, 6, 400))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(with_gradients(lambda *t: native_attention(*t, **options), tensors, upstream))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_are_taken_as_they_are(dtype):
    together = torch.randn(2, 70, 3, 4, 32, generator=torch.Generator().manual_seed(4)).to(dtype)  # (B, T, qkv, H, D)
    q, k, v = together.unbind(2)
    out, _ = native_attention(q, k, v)
    again, _ = native_attention(*(t.contiguous() for t in (q, k, v)))
    assert torch.equal(out, again)
    turned, _ = native_attention(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))
    assert torch.equal(out, turned)
    odd, _ = native_attention(*(t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)))
    assert torch.equal(out, odd)


def test_large_scores_neither_overflow_nor_lose_the_maximum():
    q, k, v = (t.detach() for t in inputs(5, 1, 200, 2, 2, 64))
    for factor in (1e3, -1e3, 1e-20):
        out, lse = native_attention(q * factor, k, v)
        exact, exact_lse = explicit((q * factor).double(), k.double(), v.double(), visible(200, 200, True, None), 0.125)
        torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5)


def test_float32_scores_of_long_heads_err_no_more_than_those_of_pytorch():
    q, k, v = (torch.randn(1, 192, 4, 256, generator=torch.Generator().manual_seed(seed)) * 3 for seed in range(3))
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in rows), is_causal=True, scale=0.1)
    plain = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=0.1)
    ours = native_attention(q, k, v, causal=True, scale=0.1)[0].transpose(1, 2)
    errors = [float((found - exact).square().mean().sqrt()) for found in (ours, plain)]
    assert errors[0] <= 1.2 * errors[1]


def test_nan_reaches_the_rows_that_see_it_and_no_others():
    q, k, v = (t.detach() for t in inputs(6, 1, 150, 2, 2, 64, torch.bfloat16))
    k[:, 100, 0] = float("nan")
    out, _ = native_attention(q, k, v)
    assert out[:, 100:, 0].isnan().all()
    assert not out[:, :100].isnan().any()
    assert not out[:, :, 1].isnan().any()


def test_absent_blocks_are_never_read():
    q, k, v = (t.detach() for t in inputs(7, 1, 512, 2, 2, 32))
    mask = BlockMask.of(Local(radius=0, block=64), 512)
    expected, _ = native_attention(q, k, v, block_mask=mask)
    k[:, :64], v[:, :64] = float("nan"), float("nan")
    out, _ = native_attention(q, k, v, block_mask=mask)
    assert torch.equal(out[:, 64:], expected[:, 64:])


def test_full_pattern_equals_dense():
    tensors = [t.detach() for t in inputs(8, 1, 300, 4, 2, 64, torch.bfloat16)]
    dense, _ = native_attention(*tensors)
    blocks, _ = native_attention(*tensors, block_mask=BlockMask.of(Causal(block=64), 300))
    assert torch.equal(dense, blocks)


def test_no_tokens_and_no_keys():
    q = torch.randn(1, 0, 2, 16, requires_grad=True)
    k, v = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(2))
    out, lse = native_attention(q, k, v)
    assert out.shape == (1, 0, 2, 16)
    assert lse.shape == (1, 2, 0)
    out.sum().backward()
    assert (k.grad == 0).all()
    out, lse = native_attention(torch.randn(1, 3, 2, 16), k[:, :0], v[:, :0], causal=False)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    q, k, v = inputs(9, 1, 40, 4, 2, 16, dtype)
    tiles = BlockMask.of(BigBird(block=16), 40).tiles()
    native_attention(q, k, v)  # the gradient is registered with the first call
    operator = NATIVE.ops.train_attention.default
    for layout, causal in (((None, None, None), False), ((tiles.starts, tiles.columns, tiles.cells), True)):
        torch.library.opcheck(operator, (q, k, v, None, None, *layout, causal, 0, 0.25))


def test_compiles_into_one_graph():
    q, k, v = inputs(10, 1, 70, 2, 2, 32)
    mask = BlockMask.of(Local(block=16), 70)

    def loss(q, k, v):
        return native_attention(q, k, v)[0].sum() + native_attention(q, k, v, block_mask=mask)[0].square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(q, k, v), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(1, 8, 2, 16).half()}, "float32 and bfloat16; found torch.float16"),
        ({"q": torch.randn(1, 9, 2, 16)}, "9 queries are the last ones of 8 keys"),
        ({"block_mask": BlockMask.of(BigBird(block=16, per_head=True), 8, heads=3)}, "has 3 heads; found 2"),
        ({"block_mask": BlockMask.of(Local(block=16), 9)}, "9 keys; found 8"),
        ({"block_mask": BlockMask.of(Local(block=8), 8)}, "its blocks have 8 positions"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {name: torch.randn(1, 8, 2, 16) for name in "qkv"} | change
    with pytest.raises(ConfigError, match=message):
        native_attention(**arguments)


def test_the_operator_refuses_layouts_that_lead_out_of_the_keys():
    q = torch.randn(1, 64, 1, 16)
    operator = NATIVE.ops.train_attention
    for starts, columns in (([0, 1], [1]), ([0, 1], [-1]), ([0, 2], [0]), ([1, 0], [0])):
        layout = (torch.tensor(starts, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32))
        with pytest.raises(RuntimeError, match=r"column|starts"):
            operator(q, q, q, None, None, *layout, torch.tensor([0xFFFF], dtype=torch.int32), True, 0, 1.0)


@settings(max_examples=100, derandomize=True)
@given(problems(dtypes=[torch.float32, torch.bfloat16]))
def test_the_operator_takes_it_for_causal_windowed_full_padded_and_packed_attention(problem):
    *inputs, options = problem
    padding = options.get("key_padding_mask")
    taken = ["causal", "window", "scale", "cu_seqlens", "cu_seqlens_k"]
    if padding is not None and Intervals.of_padding(padding) is not None:
        taken.append("key_padding_mask")
    options = {name: value for name, value in options.items() if name in taken}
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def results(run, dtype, **more):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        out = run(*leaves, **options, **more)
        (out * weights.to(dtype)).sum().backward()
        return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]

    dtype = inputs[0].dtype
    expected = results(explicit_problem, torch.float64)
    plain = results(explicit_problem, dtype)
    q, k, v = (x.abs().max().item() for x in inputs)
    scale = options["scale"] or inputs[0].shape[3] ** -0.5
    # As in test_attention.py: dO·V - D may cancel, and its rounding is as large as they are.
    floor = torch.finfo(dtype).eps * weights.abs().sum(-1).max().item() * v * max(1, scale * max(q, k))
    for index, (mine, theirs, true) in enumerate(
        zip(results(attention, dtype, kernel="native"), plain, expected, strict=True)
    ):
        assert error(mine, true) <= allowed(theirs, true, dtype) + (floor if index else 0)


@settings(max_examples=60, derandomize=True)
@given(problems(dtypes=[torch.float32, torch.bfloat16], sinks=True), st.booleans())
def test_sinks_join_the_softmax_of_the_operator(problem, causal):
    """The factor σ(lse - sink) behind the operator gives the values and gradients of a softmax with a column more."""
    q, k, v, options = problem
    sinks = torch.linspace(-2, 3, q.shape[2]) if options["sinks"] is None else options["sinks"]
    options = {"causal": causal, "scale": options["scale"], "softcap": None, "alibi": None}
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

    def results(run, dtype, **more):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (q, k, v, sinks)]
        out = run(*leaves[:3], sinks=leaves[3], causal=causal, scale=options["scale"], **more)
        return [out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)]

    expected, plain = results(explicit_problem, torch.float64), results(explicit_problem, q.dtype)
    once = one_rounding(q, k, v, options)
    # As in test_attention.py: dO·V - D may cancel; and the gradient of a sink is a sum over all queries.
    largest = max(1.0, (options["scale"] or q.shape[3] ** -0.5) * max(q.abs().max().item(), k.abs().max().item()))
    floor = (once + torch.finfo(q.dtype).eps * v.abs().max().item()) * weights.abs().sum(-1).max().item() * largest
    floors = [once, floor, floor, floor, floor * q.shape[0] * q.shape[1]]
    found = results(attention, q.dtype, kernel="native")
    for mine, theirs, true, own in zip(found, plain, expected, floors, strict=True):
        assert error(mine, true) <= allowed(theirs, true, q.dtype) + own
