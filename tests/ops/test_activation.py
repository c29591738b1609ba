"""The native activation functions against float64: values, gradients, bits that no number of threads changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.activation import KERNELS, ActivationRequest, bias_gelu, silu_mul
from hasten.ops.picker import explain
from instruction_sets import ISAS, needs_native

CASES = ("bias_gelu", "gelu", "silu_mul")


def leaves(case, rows, width, dtype, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(rows, width, generator=generator) * spread
    second = torch.randn((rows, width) if case == "silu_mul" else (width,), generator=generator)
    upper = torch.randn(rows, width, generator=generator).to(dtype)
    return first.to(dtype), second.to(dtype) if case == "silu_mul" else second, upper


def run(case, first, second, upper, kernel):
    first, second = first.detach().clone().requires_grad_(), second.detach().clone().requires_grad_()
    if case == "silu_mul":
        out = silu_mul(first, second, kernel=kernel)
    else:
        out = bias_gelu(first, second if case == "bias_gelu" else None, kernel=kernel)
    out.backward(upper)
    return out.detach(), first.grad, second.grad


@needs_native
@settings(max_examples=40)
@given(
    case=st.sampled_from(CASES),
    rows=st.integers(1, 140),
    width=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_it_errs_no_more_than_the_reference(case, rows, width, dtype, seed):
    given = leaves(case, rows, width, dtype, seed)
    exact = run(case, *(t.double() for t in given), "reference")
    native, plain = run(case, *given, "native"), run(case, *given, "reference")
    for ours, theirs, true in zip(native, plain, exact, strict=True):
        if true is None:
            assert ours is None
            continue
        assert ours.dtype == theirs.dtype
        error, allowed = (ours.double() - true).norm(), (theirs.double() - true).norm()
        size = max(true.norm(), given[2].double().norm())  # the bias's gradient is a sum that may cancel
        assert error <= 2 * allowed + 4e-6 * size, (error, allowed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(case, isa, monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", isa)
    given = leaves(case, 70, 37, torch.float32)
    for ours, true in zip(
        run(case, *given, "native"), run(case, *(t.double() for t in given), "reference"), strict=True
    ):
        if true is not None:
            torch.testing.assert_close(ours.double(), true, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_value(case):
    first, second, _ = leaves(case, 5, 6, torch.float64)
    first, second = first.requires_grad_(), second.double().requires_grad_()
    if case == "silu_mul":
        assert torch.autograd.gradcheck(lambda a, b: silu_mul(a, b, kernel="reference"), (first, second))
    else:
        assert torch.autograd.gradcheck(lambda a, b: bias_gelu(a, b, kernel="reference"), (first, second))


@needs_native
@pytest.mark.parametrize("case", CASES)
def test_far_out_it_is_the_limit(case):
    far = torch.tensor([[-1e30, -200.0, -50.0, 50.0, 200.0, 1e30, 0.0, float("nan")]])
    other = torch.zeros(8) if case != "silu_mul" else torch.ones(1, 8)
    out, gradient, _ = run(case, far, other, torch.ones(1, 8), "native")
    expected = torch.tensor([[0, 0, 0, 50.0, 200.0, 1e30, 0, float("nan")]])
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-6, rtol=1e-6)
    slope = torch.tensor([0, 0, 1, 1, 0.5])
    torch.testing.assert_close(gradient[0, [1, 2, 3, 4, 6]], slope, atol=1e-6, rtol=0)
    assert gradient[0, 7].isnan()


@needs_native
def test_the_same_bits_on_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run("bias_gelu", *leaves("bias_gelu", 1000, 48, torch.bfloat16), "native"))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


@needs_native
def test_leading_dimensions_strides_and_nothing_at_all():
    first, second, upper = leaves("bias_gelu", 12, 16, torch.float32)
    flat = bias_gelu(first, second)
    assert torch.equal(bias_gelu(first.view(3, 4, 16), second).view(12, 16), flat)
    wide = torch.randn(12, 32)
    torch.testing.assert_close(bias_gelu(wide[:, ::2], second), bias_gelu(wide[:, ::2].contiguous(), second))
    assert bias_gelu(first[:0], second).shape == (0, 16)
    bias = run("bias_gelu", first[:0], second, upper[:0], "native")[2]
    assert torch.equal(bias, torch.zeros(16))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"z \(\.\.\., W\) and bias \(W,\)"):
        bias_gelu(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ConfigError, match="one shape and dtype"):
        silu_mul(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="takes float32 and bfloat16, not float16"):
        bias_gelu(torch.zeros(2, 3, dtype=torch.float16), kernel="native")
    assert bias_gelu(torch.zeros(2, 3, dtype=torch.float16)).dtype == torch.float16
    choice = explain(KERNELS, ActivationRequest(device=torch.device("cuda"), dtype=torch.bfloat16))
    assert dict(choice.others)["native"] == "it needs a CPU; the tensors are on cuda"
