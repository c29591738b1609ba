"""Attention kernels against a float64 reference, by the rule of docs: twice what plain PyTorch errs, no more."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from attention_cases import allowed, error, exact, explicit, one_rounding, problems
from hasten.errors import ConfigError
from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec, attention, chunked, operator, sdpa
from hasten.ops.attention.inputs import causal, visible
from hasten.ops.picker import Kernel, explain


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Problems this small gain nothing from two threads, and on a busy machine wait for the second."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The native ones are tested in test_train_attention.py, flex in test_patterns.py.
ELSEWHERE = ("triton", "flash-triton", "cudnn", "memory-efficient", "native", "native-sparse", "flex")
HERE = [kernel.name for kernel in KERNELS if kernel.name not in ELSEWHERE]


def served(options):
    """The kernels that serve a problem here. Triton's are tested in its interpreter: test_triton_*.py."""
    if options["softcap"] is None and options["sinks"] is None:
        return HERE
    return [name for name in HERE if name not in ("flash", "sdpa", "math")]


@settings(max_examples=300, derandomize=True)
@given(problems(sinks=True))
def test_every_kernel_errs_at_most_twice_what_plain_pytorch_errs(problem):
    q, k, v, options = problem
    expected = exact(q, k, v, **options)
    limit = allowed(explicit(q, k, v, **options), expected, q.dtype) + one_rounding(q, k, v, options)
    for name in served(options):
        found = attention(q, k, v, kernel=name, **options)
        assert found.shape == q.shape
        assert found.dtype == q.dtype
        assert error(found, expected) <= limit, name


@settings(max_examples=150, derandomize=True)
@given(problems(sinks=True), st.booleans())
def test_gradients_err_at_most_twice_what_plain_pytorch_errs(problem, learned):
    *inputs, options = problem
    names = [name for name in ("bias", "sinks") if learned and options.get(name) is not None]
    inputs = [*inputs, *(options[name] for name in names)]
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def gradients(run, dtype, **more):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        own = dict(zip(names, leaves[3:], strict=True))
        (run(*leaves[:3], **options | own, **more) * weights.to(dtype)).sum().backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    dtype = inputs[0].dtype
    expected = gradients(explicit, torch.float64)
    plain = gradients(explicit, dtype)
    limits = [allowed(one, other, dtype) for one, other in zip(plain, expected, strict=True)]
    # A score's gradient is a difference of sums (dO·V - D) that may cancel: its rounding is as large as they are, and
    # reaches q and k times the other one.
    q, k, v = (x.abs().max().item() for x in inputs[:3])
    scale = options["scale"] or inputs[0].shape[3] ** -0.5
    lucky = one_rounding(*inputs[:3], options) + torch.finfo(dtype).eps * v
    lucky *= weights.abs().sum(-1).max().item() * max(1, scale * max(q, k))
    for name in served(options):
        if name == "flash" and "bias" in names:
            continue  # on a CPU it gives a bias no gradient
        found = gradients(attention, dtype, kernel=name)
        for index, (one, other, limit) in enumerate(zip(found, expected, limits, strict=True)):
            # The gradient of a sink is a sum over all queries.
            rows = weights.shape[0] * weights.shape[1] if "sinks" in names and index == len(inputs) - 1 else 1
            assert error(one, other) <= limit + rows * lucky, name


def test_float64_is_computed_in_float64():
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64)
    for name in HERE:
        assert error(attention(q, k, v, kernel=name), exact(q, k, v)) < 1e-14


@pytest.mark.parametrize("name", HERE)
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


@pytest.mark.parametrize("name", HERE)
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
    for name in HERE:
        difference = (attention(q, k, changed, window=3, kernel=name) - attention(q, k, v, window=3, kernel=name)).abs()
        assert difference[:, 3:5].max() == 0
        assert difference[:, :3].max() > 1
        assert difference[:, 5].max() > 1


def test_dropout_is_random_and_unbiased():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 1, 8)
    many = [x.expand(4000, -1, -1, -1) for x in (q, k, v)]
    for name in ("reference", "sdpa", "math", "chunked"):
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
        ({"kernel": "warp"}, "known: triton, native"),
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


@settings(max_examples=150, derandomize=True)
@given(problems(dtypes=[torch.float64], sinks=True), st.integers(4, 4000), st.integers(1, 8))
def test_chunks_of_every_size_give_the_same_result_and_gradients(problem, scores_bytes, fewest_rows):
    """The problems above fit into one chunk; here there are many, of queries, key heads and sequences."""
    q, k, v, options = problem
    names = [name for name in ("bias", "sinks") if options.get(name) is not None]
    learned = {name: options[name].clone().requires_grad_() for name in names}
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]

    def results(run, **more):
        out = run(*inputs, **options | learned, **more)
        leaves = [*inputs, *learned.values()]
        found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        return [out, *(torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CPU_SCORES", scores_bytes)
        patch.setattr(chunked, "FEWEST_ROWS", fewest_rows)
        found = results(attention, kernel="chunked")
    for one, other in zip(found, results(explicit), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # ALiBi's slopes are float32


def test_chunks_cover_every_query_once_and_keep_to_their_size(monkeypatch):
    monkeypatch.setattr(chunked, "CPU_SCORES", 4 * 2 * 64 * 8)  # 8 queries of a group of 2 over 64 keys
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 8)  # 4 queries of it
    q, k = torch.randn(3, 40, 6, 8), torch.randn(3, 64, 3, 8)
    spec = AttentionSpec(heads=6, kv_heads=3, head_dim=8, scale=0.35, window=9)
    work = chunked.ChunkPlan.of(spec, q, k, k, *[None] * 6)
    times = torch.zeros(3, 3, 2, 40)
    for chunk in work.chunks():
        times[chunk.rows] += 1
        assert work.scores(chunk)[0].nbytes <= 4 * 2 * 64 * 8
        assert chunk.seen.stop - chunk.seen.start <= 9 + chunk.queries.stop - chunk.queries.start - 1
    assert (times == 1).all()


def test_gradcheck_of_chunked():
    inputs = [torch.randn(1, 5, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    bias, sinks = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((1, 4, 5, 5), (4,)))

    def run(q, k, v, bias, sinks):
        given = {"bias": bias, "sinks": sinks, "softcap": 3.0, "window": 3, "alibi": True}
        return attention(q, k, v, **given, kernel="chunked")

    assert torch.autograd.gradcheck(run, (*inputs, bias, sinks))


def test_dropout_of_chunked_is_repeated_in_its_backward_pass():
    """With fixed draws the result is linear in v, so its gradient of v is known from the result itself."""
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.manual_seed(3)
    out = attention(q, k, v, dropout=0.4, kernel="chunked")
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weights).sum(), v)
    assert (gradient * v).sum().item() == pytest.approx((out * weights).sum().item())
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v, dropout=0.4, kernel="chunked"), out)

    def run(q, k):
        torch.manual_seed(3)
        return attention(q, k, v.detach(), dropout=0.4, kernel="chunked")

    assert torch.autograd.gradcheck(run, (q, k))


@settings(max_examples=60, derandomize=True)
@given(problems(dtypes=[torch.float64]))
def test_one_call_a_group_of_heads_is_grouped_attention(problem):
    """How memory-efficient, which runs on CUDA only, serves grouped heads; here with another backend in its place."""
    q, k, v, options = problem
    options = options | {"softcap": None, "sinks": None}
    backends = []

    def instead(backend):
        backends.append(backend)
        return sdpa.sdpa

    kernel = Kernel("here", sdpa.memory_efficient, lambda request: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "only", instead)
        patch.setattr(operator, "KERNELS", (kernel,))
        found = attention(q, k, v, **options)
    assert backends == [SDPBackend.EFFICIENT_ATTENTION]
    torch.testing.assert_close(found, exact(q, k, v, **options), rtol=1e-6, atol=1e-6)
