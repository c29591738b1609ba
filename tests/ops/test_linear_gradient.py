"""The gradient of the input of a frozen weight: from the packed numbers, at most a piece of them as floats."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.linear import gradient
from hasten.ops.linear.wide import WideLinear
from instruction_sets import ISAS, NATIVE
from linear_cases import PACKED_FORMATS, layer_of, make_weight, random_weight, rms, whole

KINDS = ("bfloat16", "float16", "int8", "int8 g32", "int4 g32", "int4 g128", *PACKED_FORMATS)


def weight_of(kind, n, k, seed):
    if kind in PACKED_FORMATS:
        return random_weight(kind, n, whole(kind, k), seed)
    element, _, group = kind.partition(" g")
    return make_weight(n, k, format=element, group_size=int(group or 0), symmetric=seed % 2 == 0, seed=seed)


@pytest.mark.parametrize("where", [*(ISAS if NATIVE else ()), "pytorch"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_dy_times_the_weight(kind, where, monkeypatch):
    """Every format: the rows are the numbers of `dequantize`, the product errs at most twice what PyTorch's does."""
    if where != "pytorch":
        monkeypatch.setenv("HASTEN_ISA", where)
    monkeypatch.setattr(gradient, "PIECE", 64 * 200 * 4)  # several pieces of several panels

    @settings(max_examples=6, derandomize=True)
    @given(
        n=st.integers(1, 300), k=st.integers(1, 200), m=st.integers(1, 5), seed=st.integers(0, 9), wide=st.booleans()
    )
    def check(n, k, m, seed, wide):
        torch.manual_seed(seed)
        weight = weight_of(kind, n, k, seed)
        layer = layer_of(weight, kernel="native" if where in ISAS else where, activations="float")
        full, dtype = layer.dequantize(), torch.float32 if wide else torch.bfloat16
        rows = layer._some_rows(0, n, torch.float32)
        if layer.format.zero != "minimum":  # else two roundings, or one where they are contracted
            assert torch.equal(rows, full)
        x = torch.randn(m, full.shape[1]).to(dtype).requires_grad_()
        dy = torch.randn(m, n).to(dtype)
        layer(x).backward(dy)
        exact = dy.double() @ full.double()
        assert x.grad.dtype == dtype
        assert rms(x.grad - exact) <= 2 * rms(dy @ full.to(dtype) - exact) + 1e-7 * rms(exact)

    check()


def test_a_frozen_weight_of_fewer_bits_keeps_no_floats(monkeypatch):
    """Between forward and backward no tensor is kept; the gradient is that of the float32 product."""
    monkeypatch.setattr(gradient, "PIECE", 64 * 40 * 4)
    torch.manual_seed(0)
    layer = WideLinear(40, 200).bfloat16().requires_grad_(False)
    x, dy = torch.randn(3, 40, requires_grad=True), torch.randn(3, 200)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert not kept
    y.backward(dy)
    expected = torch.autograd.grad(F.linear(x, layer.weight.float(), layer.bias.float()), x, dy)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)
