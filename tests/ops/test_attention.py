"""Attention kernels against a float64 reference, by the rule of docs: twice what plain PyTorch errs, no more."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec, attention
from hasten.ops.attention.masks import causal, visible
from hasten.ops.picker import explain


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Problems this small gain nothing from two threads, and on a busy machine wait for the second."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(q, k, v, *, scale=None, window=None, softcap=None, mask=None):
    """One head at a time in float64, written without any of our code."""
    q, k, v = q.double(), k.double(), v.double()
    batch, queries, heads, size = q.shape
    keys, groups = k.shape[1], heads // k.shape[2]
    scale = size**-0.5 if scale is None else scale
    first = keys - queries  # the position of the first query
    seen = [
        [s <= first + t and (window is None or s > first + t - window) for s in range(keys)] for t in range(queries)
    ]
    mask = torch.tensor(seen) if mask is None else mask
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, :, h] @ k[b, :, h // groups].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores[~(mask if mask.dim() == 2 else mask[b])] = -torch.inf
            out[b, :, h] = scores.softmax(-1) @ v[b, :, h // groups]
    return out


def plain(q, k, v, *, scale=None, window=None, softcap=None, mask=None):
    """What plain PyTorch does in the inputs' own precision."""
    groups = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        places = torch.arange(k.shape[2])
        distance = places[-q.shape[2] :, None] - places
        mask = (distance >= 0) & (distance < (window or 1 << 30))
    elif mask.dim() == 3:
        mask = mask[:, None]
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def error(found, expected):
    return (found.double() - expected).abs().max().item()


@st.composite
def problems(draw):
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    queries = draw(st.integers(1, 9))
    keys = queries + draw(st.integers(0, 9))
    batch, size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 16, 40]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    dtype = draw(st.sampled_from(DTYPES))

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = (random(batch, n, h, size) for n, h in ((queries, kv_heads * groups), (keys, kv_heads), (keys, kv_heads)))
    options = {
        "window": draw(st.none() | st.integers(1, keys + 2)),
        "softcap": draw(st.none() | st.sampled_from([5.0, 50.0])),
        "scale": draw(st.none() | st.sampled_from([0.05, 1.0])),
    }
    mask_kind = draw(st.sampled_from(["none", "2d", "3d"]))
    if mask_kind != "none":
        shape = (queries, keys) if mask_kind == "2d" else (batch, queries, keys)
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 0] = True  # every query sees something
        options |= {"mask": mask, "window": None}
    return q, k, v, options


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_every_kernel_errs_at_most_twice_what_plain_pytorch_errs(problem):
    q, k, v, options = problem
    expected = exact(q, k, v, **options)
    # One rounding of the result is allowed even where plain PyTorch happens to hit it exactly.
    rounding = torch.finfo(q.dtype).eps * expected.abs().max().item()
    allowed = 2 * error(plain(q, k, v, **options), expected) + rounding
    for kernel in KERNELS:
        if kernel.name == "triton" or (kernel.name == "sdpa" and options["softcap"] is not None):
            continue  # Triton's is tested in its interpreter: test_triton_decode.py
        found = attention(q, k, v, kernel=kernel.name, **options)
        assert found.shape == q.shape
        assert found.dtype == q.dtype
        assert error(found, expected) <= allowed, kernel.name


def test_float64_is_computed_in_float64():
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64)
    for name in ("reference", "sdpa"):
        assert error(attention(q, k, v, kernel=name), exact(q, k, v)) < 1e-14


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_float16_scores_that_would_overflow_before_scaling_do_not(name):
    q = torch.full((1, 4, 2, 128), 40.0, dtype=torch.float16)
    k = q.clone()
    k[:, ::2] *= 0.999
    v = torch.randn(1, 4, 2, 128).half()
    assert (q[0, :, 0] @ k[0, :, 0].T).isinf().any()  # 40 · 40 · 128 is past 65,504
    found = attention(q, k, v, kernel=name)
    assert torch.isfinite(found).all()
    expected = exact(q, k, v)
    assert error(found, expected) <= 4 * torch.finfo(torch.float16).eps * expected.abs().max().item()


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 2, 3])
def test_queries_are_the_last_of_the_keys(name, window):
    """Bottom right: a few queries over all keys give the last rows of all queries over all keys."""
    q, k, v = torch.randn(3, 1, 7, 2, 8)
    whole = attention(q, k, v, kernel=name, window=window)
    for count in (1, 3, 7):
        part = attention(q[:, -count:], k, v, kernel=name, window=window)
        torch.testing.assert_close(part, whole[:, -count:], rtol=0, atol=1e-6)


def test_a_query_does_not_see_later_or_too_early_keys():
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    changed = v.clone()
    changed[:, 0] += 100
    changed[:, 5] += 100
    for name in ("reference", "sdpa"):
        difference = (attention(q, k, changed, window=3, kernel=name) - attention(q, k, v, window=3, kernel=name)).abs()
        assert difference[:, 3:5].max() == 0
        assert difference[:, :3].max() > 1
        assert difference[:, 5].max() > 1


def test_gradients_agree():
    inputs = [torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    grads = []
    for name in ("reference", "sdpa"):
        attention(*inputs, kernel=name, window=3).square().sum().backward()
        grads.append([x.grad.clone() for x in inputs])
        for x in inputs:
            x.grad = None
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_dropout_is_random_and_unbiased():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 1, 8)
    many = [x.expand(4000, -1, -1, -1) for x in (q, k, v)]
    for name in ("reference", "sdpa"):
        without, dropped = attention(q, k, v, kernel=name), attention(*many, dropout=0.5, kernel=name)
        assert (dropped.mean(0) - without[0]).abs().max() < 0.15
        assert dropped.std(0).min() > 0.01


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        ((2, 3, 4), (2, 3, 4, 8), (2, 3, 4, 8), "(2, 3, 4)"),
        ((2, 3, 4, 8), (2, 3, 8), (2, 3, 8), "(2, 3, 8)"),
        ((2, 3, 4, 8), (2, 3, 4, 8), (2, 4, 4, 8), "(2, 4, 4, 8)"),
        ((1, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), "batch"),
        ((2, 3, 4, 8), (2, 3, 4, 9), (2, 3, 4, 9), "head size"),
        ((2, 3, 4, 8), (2, 3, 3, 8), (2, 3, 3, 8), "whole number"),
        ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8), "whole number"),
        ((2, 4, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), "would see nothing"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v, words):
    with pytest.raises(ConfigError) as caught:
        attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": torch.ones(3, 4, dtype=torch.bool)}, "(3, 4)"),
        ({"mask": torch.ones(1, 3, 3, dtype=torch.bool)}, "(1, 3, 3)"),
        ({"mask": torch.ones(3, 3)}, "bool"),
        ({"mask": torch.ones(2, 3, 3, dtype=torch.bool), "window": 2}, "window"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"dropout": 1.5}, "dropout"),
        ({"kernel": "flash"}, "known: triton, sdpa, reference"),
        ({"kernel": "sdpa", "softcap": 5.0}, "soft-capping"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    q = torch.zeros(2, 3, 4, 8)
    with pytest.raises(ConfigError) as caught:
        attention(q, q, q, **options)
    assert words in str(caught.value)


def test_mixed_dtypes_are_refused():
    q = torch.zeros(2, 3, 4, 8)
    with pytest.raises(ConfigError, match="float16"):
        attention(q, q.half(), q.half())


def test_soft_capping_chooses_the_reference_and_says_why():
    spec = AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=1.0, softcap=50.0)
    choice = explain(KERNELS, AttentionRequest(spec=spec, device=torch.device("cpu"), dtype=torch.float32))
    assert choice.kernel == "reference"
    assert ("sdpa", "PyTorch's SDPA has no soft-capping of scores") in choice.others


@given(st.integers(1, 8), st.integers(0, 8), st.none() | st.integers(1, 10))
def test_masks(queries, more, window):
    mask = causal(queries, queries + more, window)
    assert mask.shape == (queries, queries + more)
    for t in range(queries):
        seen = mask[t].nonzero().flatten().tolist()
        place = more + t
        assert seen == list(range(max(0, place + 1 - (window or math.inf)) if window else 0, place + 1))
    assert torch.equal(visible(torch.arange(queries) + more, torch.arange(queries + more), window), mask)
