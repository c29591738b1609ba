"""Experts in one native call, against the operators of a dense layer, on every instruction set and in every format."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.model.fused_linear import ACTIVATION_ORDER, weight_fields
from hasten.ops.native import library
from instruction_sets import ISAS
from linear_cases import LAYERS, PACKED_FORMATS, layer_of, make_weight, random_weight

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
NONE = {"norm_weight": None, "norm_bias": None, "eps": 0.0, "offset": 0.0, "centred": False}
FORMATS = [*LAYERS, *PACKED_FORMATS]


def layer(format, n, k, *, isa, seed, biased=False):
    bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)) if biased else None
    if isinstance(format, str):
        return layer_of(random_weight(format, n, k, seed), bias, isa=isa)
    element, group, activations = format
    weight = make_weight(n, k, format=element, group_size=group, seed=seed)
    return layer_of(weight, bias, isa=isa, activations=activations)


class Case:
    """Random experts with a hidden and an inner size, their plan, and what each expert makes of rows alone."""

    def __init__(self, isa, format, *, count, hidden, inner, activation="silu", limit=0.0, up_offset=0.0, biased=False):
        self.ops, self.count, self.inner, self.hidden = library(isa).ops, count, inner, hidden
        self.kind = ACTIVATION_ORDER.index(activation)
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.layers = {
            name: [layer(format, *size, isa=isa, seed=3 * i + j, biased=biased) for i in range(count)]
            for j, (name, size) in enumerate(sizes.items())
        }
        self.plans = {name: [self._plan(one) for one in layers] for name, layers in self.layers.items()}
        self.plan = self.ops.plan_experts(**self.plans, activation=self.kind, limit=limit, up_offset=up_offset)

    def _plan(self, one):
        size = {"out_features": one.out_features, "in_features": one.in_features}
        return self.ops.plan_weight(**size, **weight_fields(one), lora_a=None, lora_b=None)

    def __call__(self, x, chosen, shares):
        return self.ops.experts(plan=self.plan, x=x, chosen=chosen, shares=shares)

    def alone(self, expert, x):
        both = [self.plans["gate"][expert], self.plans["up"][expert]]
        inner = {"inner_size": self.inner, "gated": True, "activation": self.kind}
        act = self.ops.mlp_input(x=x, **NONE, weights=both, **inner)
        down = weight_fields(self.layers["down"][expert])
        return self.ops.linear_add(x=act, residual=torch.zeros(len(x), self.hidden), **down, **NONE)

    def expected(self, x, chosen, shares):
        outputs = torch.stack([self.alone(expert, x) for expert in range(self.count)])  # (E, R, C)
        picked = outputs[chosen.T, torch.arange(len(x))]  # (k, R, C)
        return (picked.double() * shares.T[..., None].double()).sum(0)


def routes(rows, top, count, generator):
    shares, chosen = torch.rand(rows, count, generator=generator).softmax(-1).topk(top, -1)
    return chosen, shares


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_each_row_gets_the_sum_of_its_experts(isa, format):
    g = torch.Generator().manual_seed(0)
    case = Case(isa, format, count=5, hidden=256, inner=512)
    for rows in (1, 3, 41):
        x, (chosen, shares) = torch.randn(rows, 256, generator=g), routes(rows, 2, 5, g)
        found, expected = case(x, chosen, shares), case.expected(x, chosen, shares)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15)
@given(
    st.integers(0, 99),
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(1, 150),
    st.integers(1, 150),
    st.sampled_from(["silu", "gelu_tanh", "relu2"]),
    st.data(),
)
def test_sizes_that_fit_nothing(isa, seed, rows, count, hidden, inner, activation, data):
    g = torch.Generator().manual_seed(seed)
    top = data.draw(st.integers(1, count))
    case = Case(isa, ("bfloat16", 0, "float"), count=count, hidden=hidden, inner=inner, activation=activation)
    x, (chosen, shares) = torch.randn(rows, hidden, generator=g), routes(rows, top, count, g)
    found, expected = case(x, chosen, shares), case.expected(x, chosen, shares)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(1 + expected.abs().max()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", [("bfloat16", 0, "float"), ("int8", 0, "int8"), ("int4", 32, "int8")], ids=str)
@settings(max_examples=8)
@given(st.integers(0, 99), st.integers(1, 20), st.integers(1, 150), st.integers(1, 150), st.data())
def test_biases_limits_and_the_offset_of_up(isa, format, seed, rows, hidden, inner, data):
    """down((min(gate, limit)·σ(1.702·…))·(clamp(up) + offset)), each product with its bias."""
    limit, offset = data.draw(st.sampled_from([0.0, 0.3, 7.0])), data.draw(st.sampled_from([0.0, 1.0]))
    limits = {"limit": limit, "up_offset": offset}
    case = Case(isa, format, count=3, hidden=hidden, inner=inner, activation="quick_gelu", **limits, biased=True)
    g = torch.Generator().manual_seed(seed)
    x, (chosen, shares) = torch.randn(rows, hidden, generator=g), routes(rows, 2, 3, g)

    def product(name, expert, rows):
        one = case.layers[name][expert]
        return case.ops.norm_linear(x=rows, **NONE, **weight_fields(one), out_features=one.out_features)

    outputs = []
    for expert in range(3):
        gate, up = (product(name, expert, x) for name in ("gate", "up"))
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        outputs.append(product("down", expert, gate * torch.sigmoid(1.702 * gate) * (up + offset)))
    picked = torch.stack(outputs)[chosen.T, torch.arange(rows)]  # (k, R, C)
    expected = (picked.double() * shares.T[..., None].double()).sum(0)
    found = case(x, chosen, shares)
    # Rounding of what is between the products to int8 or bfloat16 may fall to the other side.
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "format", [("bfloat16", 0, "float"), ("int8", 0, "int8"), ("int4", 32, "int8"), "Q4_K"], ids=str
)
def test_rows_do_not_depend_on_each_other(format):
    g = torch.Generator().manual_seed(1)
    case = Case(ISAS[0], format, count=7, hidden=256, inner=256)
    x, (chosen, shares) = torch.randn(700, 256, generator=g), routes(700, 3, 7, g)
    together = case(x, chosen, shares)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads != 3 else 1)
        assert torch.equal(case(x, chosen, shares), together)
    finally:
        torch.set_num_threads(threads)
    for some in (slice(0, 1), slice(5, 9), slice(3, 40), slice(500, 530)):
        assert torch.equal(case(x[some], chosen[some], shares[some]), together[some])
    everybody = torch.full((300, 1), 4)  # more rows of one expert than are multiplied at a time
    assert torch.equal(case(x[:300], everybody, torch.ones(300, 1))[7:8], case(x[7:8], everybody[:1], torch.ones(1, 1)))


def test_what_does_not_fit_is_refused():
    case = Case(ISAS[0], ("bfloat16", 0, "float"), count=3, hidden=40, inner=24)
    x, chosen, shares = torch.randn(2, 40), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    for message, arguments in {
        "there is no expert 3": (x, chosen + 3, shares),
        "there is no expert -1": (x, chosen - 1, shares),
        "in float32": (x.bfloat16(), chosen, shares),
        "experts want x": (torch.randn(2, 20), chosen, shares),
        "as many shares": (x, chosen, shares[:1]),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            case(*arguments)
    kind = {"activation": 0, "limit": 0.0, "up_offset": 0.0}
    with pytest.raises(RuntimeError, match="does not fit the others"):
        case.ops.plan_experts(gate=case.plans["gate"], up=case.plans["down"], down=case.plans["down"], **kind)
    with pytest.raises(RuntimeError, match="each expert has"):
        case.ops.plan_experts(gate=case.plans["gate"], up=case.plans["up"][:2], down=case.plans["down"], **kind)
