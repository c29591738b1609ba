"""Layers that multiply with rounded weights while they train: their numbers, their gradients, MoQ's schedule."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hasten.errors import ConfigError
from hasten.model.layer_format import held_format, regrouped
from hasten.model.lora import AdapterChoice, Factors, LoRALinear
from hasten.model.vocabulary import pad_vocabulary
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.weights import INT8
from hasten.quantization.qat import (
    FakeQuantized,
    FakeRounding,
    as_stored,
    bits_at,
    fake_layers,
    fake_quantize,
    set_bits,
)
from hasten.quantization.rounding import round_weight
from tiny_model import tiny_llama


def layer(n=6, k=64, seed=0, **rounding):
    linear = nn.Linear(k, n, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)))
    return FakeQuantized.of(linear, FakeRounding(**rounding))


@settings(max_examples=40)
@given(
    bits=st.sampled_from([8, 4, 3, 2]),
    group=st.sampled_from([32, 64, 128, 0]),
    learned=st.booleans(),
    rows=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_what_is_stored_is_what_was_trained(bits, group, learned, rows, seed):
    made = layer(rows, 256, seed, bits=bits, group_size=group, learned=learned)
    if made.scales is not None:
        with torch.no_grad():
            made.scales.add_(torch.rand(made.scales.shape, generator=torch.Generator().manual_seed(seed)) - 0.5)
    stored = made.quantized()
    assert torch.equal(stored.dequantize(), made.weight.detach())
    assert made.weight.unique().numel() <= 2**bits * made.out_features * (256 // made.group)
    if not learned and bits in (4, 3) and group:  # rounding to nearest as everywhere else
        wanted = round_weight(made.exact.detach(), made.rounding.format, search="minmax")
        assert torch.equal(stored.values, wanted.values)
        assert torch.equal(stored.scales, wanted.scales)
    if bits == 8:
        wanted = round_weight(made.exact.detach(), INT8)
        assert torch.equal(stored.values, wanted.values)
        assert torch.equal(stored.scales, wanted.scales)


def test_two_bits_are_four_levels_around_zero():
    made = layer(bits=2)
    units = made.quantized()
    assert set((units.values.int() - 8).unique().tolist()) == {-3, -1, 1, 3}
    assert units.format.bits == 4


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_gradients_of_learned_scales_are_lsqs(bits):
    made = layer(bits=bits)
    upstream = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    (made.weight * upstream).sum().backward()
    most = 2 ** (bits - 1)
    low, high, stored = -most, most - 1, made.quantized()
    for n in range(6):
        for g in range(2):
            s, ds = float(stored.scales[n, g]) * (2 if bits == 2 else 1), 0.0
            for k in range(32 * g, 32 * g + 32):
                v, up = (made.exact[n, k] / s).item(), float(upstream[n, k])
                near = min(max(v, low), high)
                level = max(min(math.floor(v), 1), -2) + 0.5 if bits == 2 else round(near)  # to even, as torch
                inside = low <= v <= high + (bits == 2)  # v is in units of the scale, which may be negative
                assert made.exact.grad[n, k] == pytest.approx(up if inside else 0.0, abs=1e-6)
                ds += up * (level - v if inside else level)
            share = 1 / (32 * max(1, high)) ** 0.5
            # Trained is a tenth of a logarithm (the sign stays).
            assert made.scales.grad.view(6, 2)[n, g] == pytest.approx(10 * abs(s) * ds * share, rel=5e-3, abs=1e-3)


@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("bits", [4, 3])
def test_learned_scales_start_where_rounding_to_nearest_puts_them(bits, group):
    made = layer(bits=bits, group_size=group)
    nearest = round_weight(made.exact.detach(), made.rounding.format).scales.float()
    assert torch.equal(made.quantized().scales.float(), nearest)
    assert torch.equal(made.quantized().values, round_weight(made.exact.detach(), made.rounding.format).values)
    assert (nearest < 0).any(), "either sign: the lowest integer is the largest value's"
    made.scales.grad = torch.ones_like(made.scales)
    torch.optim.SGD([made.scales], lr=0.025).step()
    sizes = made.quantized().scales.float() / nearest
    torch.testing.assert_close(
        sizes[nearest > 0], torch.full_like(sizes[nearest > 0], math.exp(-0.25)), rtol=0.02, atol=0
    )
    torch.testing.assert_close(
        sizes[nearest < 0], torch.full_like(sizes[nearest < 0], math.exp(0.25)), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("bits", [4, 3])
def test_training_can_begin_with_any_integers_and_scales(bits, group):
    made = layer(bits=bits, group_size=group)
    nearest = made.quantized()
    values = nearest.values.clone()
    values[:, ::3] = (values[:, ::3] + 1).clamp(max=2**bits - 1)
    stored = replace(nearest, values=values, scales=nearest.scales * 1.25)
    made.begin_with(stored)
    begun = made.quantized()
    assert torch.equal(begun.values, stored.values)
    assert torch.equal(begun.scales, stored.scales)
    torch.testing.assert_close(made.exact.detach(), stored.dequantize())
    with pytest.raises(ConfigError, match="belong to another weight"):
        made.begin_with(replace(stored, values=(2**bits - 1) - stored.values, scales=3 * stored.scales))
    with pytest.raises(ConfigError, match=rf"2 bits, .*; training rounds .* to {bits} bits"):
        made.begin_with(replace(stored, format=replace(stored.format, element="int2")))


def test_without_learned_scales_the_gradient_goes_straight_through():
    made = layer(bits=4, learned=False)
    upstream = torch.randn(6, 64)
    (made.weight * upstream).sum().backward()
    assert torch.equal(made.exact.grad, upstream)
    assert [name for name, _ in made.named_parameters()] == ["weight"]


@pytest.mark.parametrize(
    ("bits", "group", "rounded"), [(8, 32, 256), (4, 32, 32), (4, 0, 128), (3, 32, 32), (2, 32, 32)]
)
def test_what_comes_in_is_rounded_as_by_the_kernel_that_will_serve(bits, group, rounded):
    """By row in int8, by group of the weight in int4, as which 3 and 2 bits are held."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    made = layer(8, 256, bits=bits, group_size=group)
    wide = x.detach().unflatten(-1, (-1, rounded))
    size = wide.abs().amax(-1, keepdim=True) / 127
    expected = ((wide / size).round() * size).flatten(-2)
    torch.testing.assert_close(made(x), expected @ made.weight.T)
    plain = layer(8, 256, bits=bits, group_size=group, activations="float")
    torch.testing.assert_close(plain(x), x @ plain.weight.T)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, made.weight.detach().sum(0).expand(3, -1))
    held = regrouped(made.quantized(), held_format(made.rounding.format))
    served = PackedLinear.from_weight(held, dtype=torch.float32)(x.detach())
    if torch.allclose(served, plain(x), rtol=1e-5, atol=1e-5):
        pytest.skip("the kernel that was picked does not round activations")
    torch.testing.assert_close(served, made(x).detach(), rtol=1e-4, atol=1e-4)


def test_rounding_up_and_down_keeps_the_mean():
    made = layer(bits=3, learned=False, stochastic=True)
    mean = torch.stack([made.weight.detach() for _ in range(3000)]).mean(0)
    step = made.quantized().scales.float().repeat_interleave(32, dim=1)
    inside = (made.exact / step).abs() < 3
    assert ((mean - made.exact).abs() / step)[inside].max() < 0.06
    made.eval()
    assert torch.equal(made.weight, made.weight)


def test_moqs_bits_fall_at_doubling_steps():
    def bits(step, mixing=0):
        return bits_at(step, start=8, target=4, period=10, mixing=mixing)

    assert [bits(step)[0] for step in (0, 9, 10, 19, 20, 39, 40, 79, 80, 500)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]
    assert [bits(step, mixing=4)[1] for step in (9, 10, 11, 12, 13, 14, 20, 22)] == [0, 1, 0.75, 0.5, 0.25, 0, 1, 0.5]
    assert bits_at(7, start=4, target=4, period=1, mixing=2) == (4, 0.0)


def test_bits_and_mix_of_a_model():
    model = tiny_llama()
    fake_quantize(model, FakeRounding(bits=4, group_size=32, learned=False), head="int8")
    layers = fake_layers(model)
    one = layers["blocks.0.mlp.up"]
    final = one.weight.detach().clone()
    set_bits(model, 6, 0.0)
    finer = (one.weight - one.exact).abs().mean()
    set_bits(model, 4, 0.25)
    torch.testing.assert_close(one.weight.detach(), 0.75 * final + 0.25 * one.exact.detach())
    set_bits(model, 4, 0.0)
    assert torch.equal(one.weight, final)
    assert finer < (one.weight - one.exact).abs().mean() / 2
    assert layers["head"].rounding.bits == 8
    assert layers["head"].bits == 8


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("start", [16, 9])
def test_moq_begins_with_finer_weights(bits, start):
    made = layer(bits=bits, learned=False)
    stored = made.quantized()
    set_bits(made, start, 0.0)
    assert (made.weight - made.exact).abs().max() < made.exact.abs().max() / 2 ** (start - 1)
    set_bits(made, bits, 0.0)
    assert torch.equal(made.weight.detach(), stored.dequantize())


def test_a_width_that_is_no_whole_group_is_refused():
    with pytest.raises(ConfigError, match="48 inputs cannot be cut into groups of 32"):
        layer(4, 48, bits=4)


def test_an_adapter_is_rounded_together_with_its_frozen_weight():
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(64, 6)
    a, b = (nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in ((4, 64), (6, 4)))
    joined = nn.Linear(64, 6)
    joined.weight.data, joined.bias = base.weight.detach() + 2.0 * (b @ a).detach(), base.bias
    lora = LoRALinear(base, [Factors(a, b, alpha=8.0)], AdapterChoice())
    found, expected = (FakeQuantized.of(one, FakeRounding(bits=4, learned=False)) for one in (lora, joined))
    torch.testing.assert_close(found.exact, joined.weight)
    torch.testing.assert_close(found.weight, expected.weight)
    x, upstream = torch.randn(3, 64, generator=generator), torch.randn(6, 64, generator=generator)
    torch.testing.assert_close(found(x), expected(x))
    gradients = torch.autograd.grad((found.weight * upstream).sum(), (a, b))
    for gradient, wanted in zip(gradients, (2.0 * b.T @ upstream, 2.0 * upstream @ a.T), strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("change", ["two bits", "not learned", "zero points", "group", "shape"])
def test_training_begins_with_integers_of_its_own_format_only(change):
    settings = {"two bits": {"bits": 2}, "not learned": {"learned": False}}.get(change, {})
    made = layer(**{"bits": 4} | settings)
    stored = layer(7 if change == "shape" else 6, bits=4, group_size=64 if change == "group" else 32).quantized()
    if change == "zero points":
        zeros = torch.full(stored.scales.shape, 8, dtype=torch.uint8)
        stored = replace(stored, format=replace(stored.format, zero="point"), zeros=zeros)
    with pytest.raises(ConfigError, match="training rounds"):
        made.begin_with(stored)


def test_a_frozen_weight_stays_frozen_and_its_file_unchanged():
    made = layer(bits=4)
    before = made._parameters["weight"].requires_grad_(False)
    held = before.detach().clone()
    made.begin_with(replace(nearest := made.quantized(), scales=nearest.scales.half(), format=nearest.format))
    assert not made._parameters["weight"].requires_grad
    assert torch.equal(before, held)


@pytest.mark.parametrize("head", ["none", "int8", "same"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_rounded_as_asked_and_an_embedding_with_it(head, tied):
    model = pad_vocabulary(tiny_llama(tie_word_embeddings=tied))
    assert model.head.out_features > model.config.vocab_size
    weights = {name: one.weight.detach().clone() for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    fake_quantize(model, FakeRounding(bits=4), head=head)
    layers = fake_layers(model)
    assert ("head" in layers) == (head != "none")
    assert len(layers) == 2 * 7 + (head != "none")
    for name, own in layers.items():
        wanted = ("float", 8 if head == "int8" else 4) if name == "head" else ("int8", 4)
        assert (own.rounding.activations, own.rounding.bits) == wanted
    tokens = torch.tensor([[3, 1, 4]])
    if tied and head != "none":
        assert torch.equal(model.embedding(tokens), model.head.weight[tokens])
    else:
        assert type(model.embedding) is nn.Embedding
    expected = {name: own.quantized() for name, own in layers.items()}
    set_bits(model, 6, 0.5)  # what is stored has the own bits of each format
    stored = as_stored(model)
    assert stored.layers == {name: own.rounding.layer for name, own in layers.items()}
    for name, wanted in expected.items():
        rows = slice(model.config.vocab_size) if name == "head" else slice(None)  # none that pad the vocabulary
        assert torch.equal(stored.weight(name).values, wanted.values[rows])
        assert torch.equal(stored.weight(name).scales, wanted.scales[rows])
    assert type(model.embedding) is nn.Embedding
    assert not fake_layers(model)
    assert {name: torch.equal(model.get_submodule(name).weight, own) for name, own in weights.items()} == dict.fromkeys(
        weights, True
    )
    if tied:
        assert torch.equal(model.embedding(tokens), weights["head"][tokens])


@pytest.mark.parametrize("bits", [4, 3])
def test_weights_of_zeros_have_a_scale(bits):
    linear = nn.Linear(64, 2, bias=False)
    nn.init.zeros_(linear.weight)
    made = FakeQuantized.of(linear, FakeRounding(bits=bits))
    assert torch.equal(made.weight, torch.zeros(2, 64))
    made.weight.sum().backward()
    assert made.scales.grad.isfinite().all()
    assert torch.equal(made.quantized().dequantize(), torch.zeros(2, 64))


def test_weights_of_zeros_in_two_bits_are_tiny():
    """None of the four levels is zero."""
    linear = nn.Linear(64, 2, bias=False)
    nn.init.zeros_(linear.weight)
    made = FakeQuantized.of(linear, FakeRounding(bits=2))
    assert made.weight.abs().max() < 2e-6
    made.weight.sum().backward()
    assert made.scales.grad.isfinite().all()
    assert made.quantized().dequantize().abs().max() < 2e-6


@pytest.mark.parametrize("bits", [4, 2])
def test_what_is_stored_keeps_no_graph(bits):
    made = layer(bits=bits)
    assert made.weight.requires_grad
    stored = made.quantized()
    assert not stored.values.requires_grad
    assert not stored.scales.requires_grad
