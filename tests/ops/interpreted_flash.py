"""FlashAttention in Triton's interpreter; run by test_flash_triton.py in a process of its own."""

import random

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cases import all_of, check_flash, error, explicit, tensors, with_tiles
from hasten.errors import ConfigError
from hasten.ops.attention import attention
from hasten.ops.attention.flash_tiles import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, INTERPRETED
from hasten.ops.attention.flash_triton import backward_operator, flash_attention, operator
from hasten.ops.attention.flash_triton_kernels import Constants, keys_of_tile, queries_of_tile

# Without shrinking: the interpreter is slow, and a failure found should be told within the time limit.
QUICK = settings(derandomize=True, phases=[Phase.generate])
HEADS = [(1, 1), (1, 1), (2, 2), (2, 1), (4, 2)]
OPTIONS = {"softcap": st.sampled_from([None, None, 5.0]), "scale": st.sampled_from([None, 0.05, 1.0])}
COUNTS = st.one_of(st.integers(1, 50), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 65]))


@st.composite
def masks(draw):
    causal = draw(st.sampled_from([True, True, False]))
    return {"causal": causal, "window": draw(st.none() | st.integers(1, 80)) if causal else None}


@triton.jit
def ranges(out, cases, C: tl.constexpr, OF_KEYS: tl.constexpr):
    """The four numbers for each of the cases: first row of the tile, queries, keys, window, keys that exist."""
    at = tl.program_id(0) * 6
    first, queries, keys = tl.load(cases + at), tl.load(cases + at + 1), tl.load(cases + at + 2)
    window, low, high = tl.load(cases + at + 3), tl.load(cases + at + 4), tl.load(cases + at + 5)
    if OF_KEYS:
        a, b, c, d = queries_of_tile(first, queries, keys, low, high, window, C)
    else:
        a, b, c, d = keys_of_tile(first, queries, keys, low, high, window, C)
    p = tl.program_id(0) * 4
    tl.store(out + p, a)
    tl.store(out + p + 1, b)
    tl.store(out + p + 2, c)
    tl.store(out + p + 3, d)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    ("causal", "windowed", "padded"),
    [(True, False, False), (True, True, False), (False, False, False), (True, True, True), (False, False, True)],
)
def test_which_tiles_are_visited_and_which_are_whole(causal, windowed, padded, of_keys):
    """Exactly those of which something is seen, and without a mask only those that are seen whole."""
    block_q, block_k = (4, 8) if of_keys else (8, 4)
    draw = random.Random(0)
    own, other = (block_k, block_q) if of_keys else (block_q, block_k)
    cases = []
    for _ in range(250):
        queries, keys = draw.randint(1, 40), draw.randint(1, 40)
        first = draw.randrange(0, keys if of_keys else queries, own)
        low = draw.randint(0, keys) if padded else 0
        cases.append([first, queries, keys, draw.randint(1, 45), low, draw.randint(low, keys) if padded else keys])
    found = torch.zeros(len(cases), 4, dtype=torch.int32)
    sizes = {"group": 1, "d": 16, "d_side": 16, "block_q": block_q, "block_k": block_k}
    known = Constants(scale=1.0, factor=1.0, inner=0.0, causal=causal, has_window=windowed, padded=padded, **sizes)
    ranges[(len(cases),)](found, torch.tensor(cases).int(), known, of_keys)
    for case, (start, whole, until, stop) in zip(cases, found.tolist(), strict=True):
        first, queries, keys, window, low, high = case
        behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        seen = torch.ones(queries, keys, dtype=torch.bool) if not causal else behind >= 0
        seen = seen & (behind < window) if windowed else seen
        seen = seen & (torch.arange(keys) >= low) & (torch.arange(keys) < high)
        seen = (seen.T if of_keys else seen)[first : first + own]  # (rows of the tile, what it meets)
        masked = {*range(start, whole, other), *range(until, stop, other)}
        unmasked = set(range(whole, until, other))
        assert not masked & unmasked, case
        for there in range(0, seen.shape[1], other):
            part = seen[:, there : there + other]
            assert (there in masked or there in unmasked) == bool(part.any()), (case, there)
            if there in unmasked:
                assert part.all(), (case, there)
                assert part.shape[1] == other, (case, there)
            elif there in masked and part.all() and part.shape == (own, other):
                raise AssertionError((case, there, "is masked for nothing"))
        assert max(masked | unmasked, default=0) < seen.shape[1], case


@settings(QUICK, max_examples=14)
@given(COUNTS, COUNTS, st.sampled_from(HEADS), st.sampled_from([1, 8, 16, 24]), masks(), st.fixed_dictionaries(OPTIONS))
def test_in_float64_it_is_exact(queries, keys, heads, head_dim, mask, options):
    sizes = {"queries": queries, "keys": keys, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
    inputs = tensors(**sizes, dtype=torch.float64, batch=1)
    exact = all_of(explicit, *inputs, **mask, **options)
    assert error(all_of(flash_attention, *inputs, **mask, **options), exact) < 1e-13 * max(map(magnitude, exact))


def magnitude(x):
    return max(1.0, x[x.isfinite()].abs().max().item() if x.isfinite().any() else 1.0)


@settings(QUICK, max_examples=10)
@given(
    queries=COUNTS,
    keys=COUNTS,
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    mask=masks(),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_errs_at_most_twice_plain_pytorch(queries, keys, heads, head_dim, dtype, mask, options):
    sizes = {"queries": queries, "keys": keys, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
    check_flash(*tensors(**sizes, dtype=dtype, batch=1), **mask, **options)


@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, 60), (256, None)])
def test_with_the_tiles_of_a_gpu(head_dim, window):
    tiles = FORWARD[head_dim], (BACKWARD_QUERIES[head_dim], BACKWARD_KEYS[head_dim])
    sizes = {"queries": 150, "keys": 200, "heads": 2, "kv_heads": 1, "head_dim": head_dim}
    check_flash(*tensors(**sizes, dtype=torch.float16, batch=1), window=window, tiles=tiles)


@settings(QUICK, max_examples=12)
@given(COUNTS, COUNTS, st.sampled_from(HEADS), masks(), st.integers(0, 1000))
def test_keys_that_do_not_exist(queries, keys, heads, mask, seed):
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, keys + 1, (3, 2), generator=generator, dtype=torch.int32).sort(dim=1).values
    sizes = {"queries": queries, "keys": keys, "heads": heads[0], "kv_heads": heads[1], "head_dim": 8}
    inputs = tensors(**sizes, dtype=torch.float64, batch=3)
    exact = all_of(explicit, *inputs, **mask, key_bounds=bounds)
    assert error(all_of(flash_attention, *inputs, **mask, key_bounds=bounds), exact) < 1e-12


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 5, "softcap": 2.0}, {"scale": 0.7}])
def test_gradients_by_differences(options):
    q, k, v = (torch.randn(1, n, h, 3, dtype=torch.float64, requires_grad=True) for n, h in ((3, 2), (18, 1), (18, 1)))
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, **options), (q, k, v), fast_mode=True)


@pytest.mark.parametrize(("queries", "keys", "window"), [(70, 20, None), (70, 40, 3), (5, 0, None), (40, 40, 1)])
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(queries, keys, window):
    q, k, v, weight, _ = tensors(
        queries=queries, keys=keys, heads=2, kv_heads=1, head_dim=16, dtype=torch.float16, batch=1
    )
    # Whatever comes back into a log-sum-exp of -inf, nothing is to come of it.
    nan = torch.full((1, 2, queries), torch.nan)
    run = with_tiles(INTERPRETED, (INTERPRETED, INTERPRETED))
    out, lse, dq, dk, _ = run(q, k, v, weight, nan, window=window)
    empty = max(0, queries - keys)
    assert (out[:, :empty] == 0).all()
    assert (lse[..., :empty] == -torch.inf).all()
    assert torch.isfinite(lse[..., empty:]).all()
    assert torch.isfinite(out).all()
    assert (dq[:, :empty] == 0).all()
    lse_weight = torch.zeros(1, 2, queries)
    for x in run(q, k, v, weight, lse_weight, window=window)[2:]:
        assert torch.isfinite(x).all()
    if window != 1:  # with one key the probability is 1, whatever the scores are
        assert dk.isnan().any() == (keys > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [100.0, 250.0])
def test_large_scores(dtype, size):
    """q·k goes to some 10^6, beyond float16: the largest takes all, nothing overflows."""
    inputs = tensors(queries=40, keys=50, heads=2, kv_heads=2, head_dim=64, dtype=torch.float64, size=size)
    inputs = [x.to(dtype).double() for x in inputs]
    exact = all_of(explicit, *inputs)
    found = all_of(flash_attention, *(x.to(dtype) for x in inputs))
    for one, other in zip(found, exact, strict=True):
        # A score of 10^6 is itself only known to some 0.06 in float32.
        assert torch.isfinite(one).all()
        assert (one.double() - other).square().mean().sqrt() <= 0.02 * max(1, other.abs().max())


def test_nan_and_infinity_are_passed_on():
    q, k, v, *_ = tensors(queries=20, keys=20, heads=1, kv_heads=1, head_dim=16, dtype=torch.float32, batch=1)
    q[0, 3], v[0, 7, 0, 2] = torch.nan, torch.inf
    out, lse = flash_attention(q, k, v)
    assert out[0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()
    assert (out[0, 7:, 0, 2] == torch.inf).all()
    assert torch.isfinite(out[0, [0, 1, 2, 4, 5, 6]][..., :2]).all()


def test_tiles_that_nobody_sees_are_not_visited():
    """NaN beyond the diagonal's tiles and before the window's reaches nothing."""
    step = INTERPRETED.queries
    q, k, v, weight, lse_weight = tensors(
        queries=3 * step, keys=3 * step, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32
    )
    k[:, :step], v[:, :step], k[:, 2 * step :], v[:, 2 * step :] = [torch.nan] * 4
    run = with_tiles(INTERPRETED, (INTERPRETED, INTERPRETED))
    out, *_ = run(q, k, v, weight, lse_weight, window=step // 4)
    # The second tile of queries sees its own keys and, at its top, some of those before: those it must visit.
    clean = slice(step + step // 4, 2 * step)
    assert out[:, :step].isnan().any()
    assert out[:, 2 * step :].isnan().all()
    k[:, step - 16 : step], v[:, step - 16 : step] = 0, 0  # the tile of keys that the window reaches back to
    out, lse, dq, *_ = run(q, k, v, weight, lse_weight, window=step // 4)
    for x in (out[:, clean], lse[..., clean], dq[:, clean]):
        assert torch.isfinite(x).all()


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave, in elements."""

    found = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.numel())
        return result


def test_memory_is_linear():
    q, k, v = (torch.randn(1, 320, 1, 16, requires_grad=True) for _ in range(3))
    with Largest() as mode:
        out, lse = flash_attention(q, k, v)
        (out.sum() + lse.sum()).backward()
    assert mode.found == q.numel()  # a matrix of scores would have 20 times as many


def test_the_same_bits_every_time_and_neighbours_change_nothing():
    inputs = tensors(queries=34, keys=40, heads=2, kv_heads=1, head_dim=16, dtype=torch.float16, batch=3)
    found = all_of(flash_attention, *inputs)
    for one, other in zip(found, all_of(flash_attention, *inputs), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found, all_of(flash_attention, *(x[1:2] for x in inputs)), strict=True):
        assert torch.equal(one[1:2], other)


def test_strides_of_slices_and_transposes():
    """q, k, v out of one product, and as (B, H, T, D), as they come out of models."""
    whole = torch.randn(2, 40, 8, 16, requires_grad=True)
    q, k, v = whole.split([4, 2, 2], dim=2)
    assert not q.is_contiguous()
    found = flash_attention(q, k, v)[0]
    expected = flash_attention(q.contiguous(), k.contiguous(), v.contiguous())[0]
    assert torch.equal(found, expected)
    weight = torch.randn(2, 4, 40, 16)
    found.backward(weight.transpose(1, 2))
    gradient, whole.grad = whole.grad, None
    expected.backward(weight.transpose(1, 2).contiguous())
    assert torch.equal(gradient, whole.grad)
    turned = [x.detach().transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]  # D is not innermost
    assert torch.equal(flash_attention(*turned)[0], found)
    flash_attention(q, k, v)[0].sum().backward()  # the gradient of a sum has strides of 0


@settings(QUICK, max_examples=5)
@given(
    st.lists(st.tuples(st.integers(0, 34), st.integers(0, 34)), min_size=1, max_size=4),
    masks(),
    st.sampled_from(HEADS),
)
def test_packed_documents_are_alone(lengths, mask, heads):
    starts = torch.tensor([[0, 0], *lengths]).cumsum(0)  # (documents + 1, 2)
    queries, keys = starts[-1].tolist()
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": 8}
    inputs = tensors(queries=queries, keys=keys, **sizes, dtype=torch.float64, batch=1)
    packed = {"query_starts": starts[:, 0].int(), "key_starts": starts[:, 1].int()}
    found = all_of(flash_attention, *inputs, **mask, **packed)
    q, k, v, weight, lse_weight = inputs
    for (first, first_key), (end, end_key) in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        own, others = slice(first, end), slice(first_key, end_key)
        alone = (q[:, own], k[:, others], v[:, others], weight[:, own], lse_weight[..., own])
        exact = all_of(explicit, *alone, **mask) if end_key > first_key else nothing(*alone)
        part = [found[0][:, own], found[1][..., own], found[2][:, own], found[3][:, others], found[4][:, others]]
        assert error(part, exact) < 1e-12


def nothing(q, k, v, weight, lse_weight):
    """Queries without any key."""
    return [q * 0, lse_weight * 0 - torch.inf, q * 0, k * 0, v * 0]


def test_rows_of_no_document_give_zeros():
    q, k, v, weight, _ = tensors(queries=30, keys=30, heads=1, kv_heads=1, head_dim=8, dtype=torch.float32, batch=1)
    starts = torch.tensor([0, 7, 20])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attention(*leaves, query_starts=starts, key_starts=starts)
    (out * weight).sum().backward()
    assert (out[:, 20:] == 0).all()
    assert (lse[..., 20:] == -torch.inf).all()
    assert all((x.grad[:, 20:] == 0).all() and torch.isfinite(x.grad).all() for x in leaves)


def test_the_public_operator_takes_it_by_name():
    q, k, v = (torch.randn(2, 20, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    options = {"window": 7, "softcap": 20.0, "scale": 0.3}
    expected = attention(q, k, v, **options, kernel="reference")
    found = attention(q, k, v, **options, kernel="flash-triton")
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)
    starts = torch.tensor([0, 3, 25, 40])
    for causal in (True, False):
        options = {"cu_seqlens": starts, "causal": causal}
        found = attention(q, k, v, **options, kernel="flash-triton")
        torch.testing.assert_close(found, attention(q, k, v, **options, kernel="reference"), atol=1e-13, rtol=0)
    lengths = torch.tensor([20, 13])
    for padding in (
        lengths,
        torch.arange(20) < lengths[:, None],
        (torch.arange(20) >= lengths[:, None])[:, None, None],
    ):
        options = {"key_padding_mask": padding, "causal": False}
        found = attention(q, k, v, **options, kernel="flash-triton")
        torch.testing.assert_close(found, attention(q, k, v, **options, kernel="reference"), atol=1e-13, rtol=0)
    for options in ({"dropout": 0.1}, {"mask": torch.ones(20, 20, dtype=torch.bool)}, {"alibi": True}):
        with pytest.raises(ConfigError, match="'flash-triton' cannot be used here: it takes no"):
            attention(q, k, v, **options, kernel="flash-triton")


def test_compiles_as_one_graph():
    inputs = tensors(queries=20, keys=25, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    for one, other in zip(all_of(compiled, *inputs), all_of(flash_attention, *inputs), strict=True):
        assert torch.equal(one, other)


def test_operators_are_registered_as_pytorch_wants_them():
    q, k = torch.randn(1, 20, 2, 16, requires_grad=True), torch.randn(1, 24, 1, 16, requires_grad=True)
    options = (0.25, True, 0, 0.0)
    torch.library.opcheck(operator, (q, k, k.detach().clone(), None, None, None, *options))
    starts = torch.tensor([0, 4, 20])
    torch.library.opcheck(operator, (q, k, k.detach().clone(), starts, starts + 2, None, *options))
    q, k = q.detach(), k.detach()
    out, lse = operator(q, k, k, None, None, None, *options)
    inputs = (torch.randn_like(out), None, q, k, k.clone(), out, lse, None, None, None, *options)
    torch.library.opcheck(backward_operator, inputs)


@pytest.mark.parametrize(
    ("q", "k", "options", "words"),
    [
        ((2, 3, 4), (2, 3, 4, 8), {}, "(2, 3, 4)"),
        ((2, 3, 4, 8), (2, 3, 3, 8), {}, "4 heads over 3"),
        ((1, 3, 4, 8), (2, 3, 4, 8), {}, "(1, 3, 4, 8)"),
        ((1, 3, 1, 512), (1, 3, 1, 512), {}, "up to 256"),
        ((1, 3, 4, 8), (1, 3, 4, 8), {"window": 2, "causal": False}, "causal=True"),
        ((1, 3, 4, 8), (1, 3, 4, 8), {"window": 0}, "found 0"),
        ((1, 3, 4, 8), (1, 3, 4, 8), {"scale": -1.0}, "positive"),
        ((1, 3, 4, 8), (1, 3, 4, 8), {"softcap": 0.0}, "above 0"),
        ((1, 3, 4, 8), (1, 3, 4, 8), {"query_starts": torch.tensor([0, 3])}, "and of the keys"),
        ((2, 3, 4, 8), (2, 3, 4, 8), dict.fromkeys(("query_starts", "key_starts"), torch.tensor([0, 3])), "batch"),
    ],
)
def test_what_does_not_fit_is_refused(q, k, options, words):
    with pytest.raises(ConfigError) as caught:
        flash_attention(torch.zeros(q), torch.zeros(k), torch.zeros(k), **options)
    assert words in str(caught.value)
