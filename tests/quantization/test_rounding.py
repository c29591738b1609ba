"""Rounding: every integer is the nearest one, scales are searched well, odd shapes and values are no special case."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.linear import INT8, QuantizedWeight
from hasten.ops.linear.weights import Q3_K, fp8_format, minimum_format
from hasten.quantization import blocks
from hasten.quantization.report import relative_error
from hasten.quantization.rounding import Grid, round_weight, rounded_activations
from rounded import round_int4, round_int8

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SCALE_DTYPES = st.sampled_from([torch.float16, torch.bfloat16])
GROUPS = st.sampled_from([32, 64, 128, 0])


@st.composite
def weights(draw):
    """A matrix of any size, spread and dtype, some rows zero, some values far out."""
    n, k = draw(st.integers(1, 9)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(n, k, generator=generator) * 10.0 ** draw(st.integers(-4, 2))
    weight[torch.rand(n, generator=generator) < 0.2] = 0
    weight[torch.rand(n, k, generator=generator) < 0.02] *= 20
    return (weight + draw(st.sampled_from([0.0, 0.0, 0.3]))).to(draw(DTYPES))


def half_steps(quantized: QuantizedWeight, weight: torch.Tensor) -> torch.Tensor:
    """The error of each element over half its step."""
    k = quantized.shape[1]
    size = quantized.format.group_size or k
    step = quantized.scales.float().abs().repeat_interleave(size, dim=1)[:, :k]
    return (quantized.dequantize() - weight.float()).abs() / (step / 2)


@settings(max_examples=60)
@given(weight=weights())
def test_int8_is_at_most_half_a_step_off(weight):
    quantized = round_int8(weight)
    assert quantized.values.dtype == torch.int8
    assert quantized.scales.shape == (weight.shape[0], 1)
    assert quantized.scales.dtype == torch.float32
    assert half_steps(quantized, weight).max() <= 1 + 1e-3
    assert quantized.values.abs().max() <= 127


@settings(max_examples=80)
@given(weight=weights(), group=GROUPS, symmetric=st.booleans(), scale_dtype=SCALE_DTYPES)
def test_int4_over_the_whole_range_is_at_most_half_a_step_off(weight, group, symmetric, scale_dtype):
    quantized = round_int4(weight, group_size=group, symmetric=symmetric, search="minmax", scale_dtype=scale_dtype)
    groups = -(-weight.shape[1] // (group or weight.shape[1]))
    assert quantized.values.dtype == torch.uint8
    assert quantized.values.max() <= 15
    assert quantized.scales.shape == (weight.shape[0], groups)
    assert quantized.scales.dtype == scale_dtype
    assert (quantized.zeros is None) is symmetric
    assert half_steps(quantized, weight).max() <= 1 + 1e-3


@settings(max_examples=60)
@given(weight=weights(), group=GROUPS, symmetric=st.booleans(), scale_dtype=SCALE_DTYPES)
def test_the_search_never_errs_more_than_the_range(weight, group, symmetric, scale_dtype):
    errors, size = {}, group or weight.shape[1]

    def groups(x):
        return torch.nn.functional.pad(x.double(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))

    counts = (
        groups(weight).abs() + groups(weight).square().mean(-1, keepdim=True).sqrt() if symmetric and group else 1.0
    )
    for search in ("minmax", "mse"):
        quantized = round_int4(weight, group_size=group, symmetric=symmetric, search=search, scale_dtype=scale_dtype)
        wrong = groups(quantized.dequantize()) - groups(weight.float())
        errors[search] = (wrong.square() * counts).sum(-1)  # of each group
    assert (errors["mse"] <= errors["minmax"] * (1 + 1e-4) + 1e-30).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_gains_on_normal_weights(symmetric):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    searched = relative_error(weight, round_int4(weight, symmetric=symmetric, search="mse"))
    assert searched < 0.96 * relative_error(weight, round_int4(weight, symmetric=symmetric, search="minmax"))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("k", [1, 31, 64, 200])
def test_zeros_stay_zero(group, k):
    weight = torch.zeros(3, k)
    for quantized in (
        round_int8(weight),
        round_int4(weight, group_size=group),
        round_int4(weight, group_size=group, symmetric=False),
    ):
        assert torch.equal(quantized.dequantize(), weight)
        assert torch.isfinite(quantized.scales).all()


@settings(max_examples=40)
@given(low=st.floats(-2, -0.05), high=st.floats(0.05, 2), scale_dtype=SCALE_DTYPES)
def test_asymmetric_reaches_both_ends(low, high, scale_dtype):
    weight = torch.linspace(low, high, 64).unsqueeze(0)
    quantized = round_int4(weight, group_size=64, symmetric=False, search="minmax", scale_dtype=scale_dtype)
    assert quantized.values.min() == 0
    assert quantized.values.max() >= 14  # 15, but for the rounding of scale and zero
    assert quantized.zeros is not None
    assert (
        weight.sign()[quantized.dequantize() != 0].eq(quantized.dequantize().sign()[quantized.dequantize() != 0]).all()
    )


def test_the_last_group_may_be_shorter():
    weight = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    whole, tail = round_int4(weight, group_size=64), round_int4(weight[:, 64:].contiguous(), group_size=64)
    assert torch.equal(whole.values[:, 64:], tail.values)
    assert torch.equal(whole.scales[:, 1:], tail.scales)


def test_the_weight_itself_is_left_alone_and_blocks_do_not_show(monkeypatch):
    weight = torch.randn(50, 256, generator=torch.Generator().manual_seed(2))
    before = weight.clone()
    results = []
    for elements in (1, 256 * 7, 1 << 20):
        monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", elements)
        results.append((round_int8(weight), round_int4(weight), round_int4(weight, symmetric=False)))
    assert torch.equal(weight, before)
    for one in results[1:]:
        for a, b in zip(results[0], one, strict=True):
            assert torch.equal(a.values, b.values)
            assert torch.equal(a.scales, b.scales)


def test_a_piece_is_one_threads_whatever_goes_on_beside_it():
    """Torch gives a new thread the number that was set last, by anybody, at its first step."""
    before, gate, x = torch.get_num_threads(), threading.Event(), torch.ones(1 << 20)

    def work(number):
        if number == 1:
            gate.wait(5)
        x.sum()
        return torch.get_num_threads()

    torch.set_num_threads(2)
    try:
        found = []
        for threads in blocks.in_order(range(4), work):
            found.append(threads)
            blocks.each_slice(torch.empty(4), 1, lambda _: None)
            gate.set()
        assert found == [1, 1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_on_a_gpu_the_caller_starts_few_large_pieces():
    """Where there is none: a matrix that says it is on another device, of which nothing is read."""
    matrix = torch.empty(10_000, 4, device="meta")
    found = blocks.each_slice(matrix, 1024, lambda rows: (rows, threading.get_ident(), torch.is_grad_enabled()))
    assert [rows for rows, _, _ in found] == [slice(0, 4096), slice(4096, 8192), slice(8192, 10_000)]
    assert {(thread, gradients) for _, thread, gradients in found} == {(threading.get_ident(), False)}


def test_one_thread_and_then_as_many_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert blocks.on_one_thread(torch.get_num_threads) == 1
        with pytest.raises(ZeroDivisionError):
            blocks.on_one_thread(lambda: 1 / 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_are_as_before(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            round_int4(torch.randn(20, 64))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rounding", [round_int8, round_int4, lambda w: round_int4(w, symmetric=False)])
def test_values_that_are_not_finite_are_refused(value, rounding):
    weight = torch.randn(20, 70)
    weight[13, 69] = value
    with pytest.raises(ConfigError, match="NaN or infinite"):
        rounding(weight)


def test_what_cannot_be_is_refused():
    weight = torch.randn(4, 64)
    for settings_, word in (
        ({"group_size": 7}, "group_size"),
        ({"search": "best"}, "search"),
        ({"scale_dtype": torch.float32}, "scales"),
    ):
        with pytest.raises(ConfigError, match=word):
            round_int4(weight, **settings_)
    for wrong in (torch.randn(4), torch.ones(4, 4, dtype=torch.int32), torch.empty(0, 4)):
        with pytest.raises(ConfigError, match="matrix of floats"):
            round_int8(wrong)
    with pytest.raises(ConfigError, match="bfloat16"):
        round_int4(weight * 1e7, scale_dtype=torch.float16)
    assert torch.isfinite(round_int4(weight * 1e7, scale_dtype=torch.bfloat16).dequantize()).all()


@pytest.mark.parametrize("format", [minimum_format("int4"), Q3_K, fp8_format()], ids=str)
def test_formats_with_minima_or_two_levels_of_scales_are_refused(format):
    with pytest.raises(ConfigError, match="hasten rounds to symmetric int8"):
        round_weight(torch.randn(4, 256), format)


def test_int8_has_as_many_integers_above_zero_as_below():
    """GPTQ adds errors of earlier columns to a number after its scale was chosen."""
    found = Grid(INT8).round(torch.tensor([500.0, 127.6, -127.6, -500.0, 1.6]), torch.tensor(1.0), 0.0)
    assert found.tolist() == [127.0, 127.0, -127.0, -127.0, 2.0]


def test_activations_are_rounded_by_group_and_keep_their_gradient():
    x = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = rounded_activations(x, 32)
    for part, own in zip(found.detach().split(32, dim=-1), x.detach().split(32, dim=-1), strict=True):
        scale = own.abs().amax(-1, keepdim=True) / 127
        torch.testing.assert_close(part, (own / scale).round() * scale)
    weights = torch.randn(x.shape)
    assert torch.equal(torch.autograd.grad((found * weights).sum(), x)[0], weights)


def test_relative_error_is_what_it_says():
    weight = torch.randn(10, 100, generator=torch.Generator().manual_seed(3))
    for quantized in (round_int8(weight), round_int4(weight), round_int4(weight, group_size=32, symmetric=False)):
        difference = (quantized.dequantize() - weight).double()
        expected = difference.square().mean().sqrt() / weight.double().square().mean().sqrt()
        assert relative_error(weight, quantized) == pytest.approx(float(expected), rel=1e-5)
    assert relative_error(torch.zeros(2, 5), round_int8(torch.zeros(2, 5))) == 0
