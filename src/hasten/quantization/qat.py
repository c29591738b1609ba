"""Quantization-aware training: linear layers that multiply with their rounded weight.

The parameter stays exact; `weight` is its rounded form, and the gradient ignores the rounding (straight-through, arXiv
1308.3432). Learned scales get a gradient too (LSQ, arXiv 1902.08153). The integers are those of the export format, so
the trained loss is the exported model's loss.

2 bits with learned scales use the levels {-3, -1, 1, 3}·s/2, symmetric around zero. They are stored as int4, which
holds them exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.checkpoints.export import Quantized
from hasten.errors import ConfigError
from hasten.model.layer_format import LayerFormat, activation_group
from hasten.model.lora import LoRALinear, attached
from hasten.model.swap import take_over
from hasten.model.transformer import Transformer
from hasten.ops.linear.weights import INT8, QuantizedWeight, WeightFormat, int4_format
from hasten.quantization.rounding import round_weight, rounded_activations, stored_scale
from hasten.quantization.schemes import layers_to_quantize


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRounding:
    """Settings for rounding a layer's weight while it trains.

    bits: 2, 3, 4 or 8. group_size: values with one scale; 0: a row. learned: train the scales. activations: "int8"
    rounds the inputs if the kernel of this format does. stochastic: round up or down at random so that the mean is
    kept, in training.
    """

    bits: int
    group_size: int = 32
    learned: bool = True
    activations: Literal["int8", "float"] = "int8"
    stochastic: bool = False

    @property
    def format(self) -> WeightFormat:
        """The format in which the weight is stored."""
        if self.bits == 8:
            return INT8
        return int4_format(self.group_size, scale_dtype=torch.bfloat16, bits=4 if self.bits == 2 else self.bits)

    @property
    def layer(self) -> LayerFormat:
        """The format of the layer."""
        return LayerFormat(self.format, self.activations)


class FakeQuantized(nn.Linear):
    """A linear layer whose `weight` is the rounded one. `bits` and `mix` may change from step to step.

    mix: 0-dim, the share of the exact weight in the multiplied one. scales: (N · groups,), if learned. a (r, K), b
    (N, r): an adapter that is rounded together with its frozen weight, `added` times B·A.
    """

    rounding: FakeRounding
    activation_group: int  # inputs that are rounded with one scale; 0: not rounded
    bits: int
    mix: Tensor
    a: Tensor | None
    b: Tensor | None
    added: float
    scales: nn.Parameter | None  # as `_logarithms`, so that an optimizer step changes every scale by the same factor

    @classmethod
    def of(cls, linear: nn.Linear | LoRALinear, rounding: FakeRounding) -> "FakeQuantized":
        """Replace `linear`, with its parameters. Raises ConfigError if the width is not a multiple of the group."""
        plain, factors = (linear.base, attached(linear)[""]) if isinstance(linear, LoRALinear) else (linear, None)
        new = take_over(cls, plain)
        new.a, new.b, new.added = (None, None, 0.0) if factors is None else (factors.a, factors.b, factors.scale)
        new.rounding, new.bits = rounding, rounding.bits
        new.activation_group = activation_group(rounding.layer, new.in_features)
        width = new.group
        if new.in_features % width:
            raise ConfigError(f"a layer of {new.in_features} inputs cannot be cut into groups of {width}")
        new.register_buffer("mix", torch.zeros((), device=new.exact.device), persistent=False)
        new.scales = None
        if rounding.learned and rounding.bits < 8:
            exact = new.exact.detach().float()
            if rounding.bits == 2:  # best for four levels and normally distributed weights
                start = 1.25 * exact.unflatten(1, (-1, width)).abs().mean(-1)
            else:
                start = round_weight(exact, rounding.format).scales.float() * (1 - 2**-11)  # `stored_scale` rounds up
            new.scales = nn.Parameter(_logarithms(start.flatten()))  # one dimension: only matrices have weight decay
        return new

    @torch.no_grad()
    def begin_with(self, stored: QuantizedWeight) -> None:
        """Start from these integers and scales instead of rounding to nearest: the parameter becomes their product.

        (A parameter nearer to the exact one would be at the edge of its integer, and fall back in the first steps.)
        Raises ConfigError if they have another format, or belong to another weight.
        """
        own, found = self.rounding.format, stored.format
        found = replace(found, scales=own.scales) if found.group_size == own.group_size else found
        if self.scales is None or self.rounding.bits == 2 or found != own or stored.shape != tuple(self.exact.shape):
            order = ", columns in an order of their own" if found.permuted else ""
            raise ConfigError(
                f"it holds {list(stored.shape)} in {found}{order}; training rounds {list(self.exact.shape)} to {own}"
            )
        scale = stored.scales.float().to(self.exact.device)[..., None]
        levels = (stored.values.to(scale) - own.middle).unflatten(1, (-1, self.group))
        old, begun = self._parameters["weight"], (levels * scale).flatten(1)
        assert old is not None
        if (begun - old.float()).square().sum() > old.float().square().sum():
            raise ConfigError("its numbers belong to another weight, not to the one that is trained")
        # A new tensor: the old one may be a view of the checkpoint's file.
        self._parameters["weight"] = nn.Parameter(begun.to(old.dtype), requires_grad=old.requires_grad)
        self.scales.copy_(_logarithms(scale.flatten() * (1 - 2**-11)))

    @property
    def group(self) -> int:
        """Number of values with one scale."""
        return self.in_features if self.rounding.bits == 8 else self.rounding.group_size or self.in_features

    @property
    def exact(self) -> Tensor:
        """The parameter, with an adapter added."""
        found = self._parameters["weight"]
        assert found is not None
        return found if self.a is None or self.b is None else found + self.added * (self.b @ self.a)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded parameter (N, K), mixed with the exact one; while FSDP2 has divided it, this rank's shard."""
        if hasattr(self._parameters["weight"], "_local_tensor"):  # FSDP2 looks its own parameter up by this name
            return self._parameters["weight"]  # type: ignore[return-value]
        exact = self.exact
        groups = exact.float().unflatten(1, (-1, self.group))
        levels, scale = self._levels(groups)
        rounded = (levels * scale).flatten(1)
        if self.scales is None:
            rounded = exact + (rounded - exact).detach()
        return torch.lerp(rounded, exact.float(), self.mix).to(exact.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, K) -> (…, N)."""
        if self.activation_group:
            x = rounded_activations(x, self.activation_group)
        return F.linear(x, self.weight, self.bias)

    def _levels(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """The groups' rounded values in units of their scale, and the scale; with a gradient if scales are learned."""
        bits = self.bits
        most = 2 ** (bits - 1)
        low, high = (-127, 127) if bits == 8 else (-most, most - 1)
        if self.scales is None:
            with torch.no_grad():
                largest = groups.abs().amax(-1, keepdim=True)
                scale = stored_scale(largest / (127 if bits == 8 else most - 0.5), self.rounding.format.scale_dtype)
                return self._round(groups / scale, bits).clamp(low, high), scale
        # The gradient of a scale is made as large as those of its weights.
        share = 1 / math.sqrt(self.group * max(1, high))
        scales = _numbers(self.scales).view(self.out_features, -1, 1)
        scale = scales * share + (scales * (1 - share)).detach()
        unit = 2 if bits == 2 else 1  # two bits are stored in units of half a step
        held = stored_scale(scales.detach().abs() / unit, self.rounding.format.scale_dtype) * unit * scales.sign()
        scale = scale + (held - scale).detach()
        inside = (groups / scale).clamp(low, high + (1 if bits == 2 else 0))
        return inside + (self._round(inside, bits) - inside).detach(), scale

    def _round(self, x: Tensor, bits: int) -> Tensor:
        if bits == 2 and self.scales is not None:
            return x.floor().clamp(-2, 1) + 0.5
        if self.rounding.stochastic and self.training:
            return (x + torch.rand_like(x)).floor()
        return x.round()

    @torch.no_grad()
    def quantized(self) -> QuantizedWeight:
        """The weight as it is stored: `weight` without a share of the exact one."""
        groups = self.exact.float().unflatten(1, (-1, self.group))
        training, self.training = self.training, False
        try:
            levels, scale = self._levels(groups)
        finally:
            self.training = training
        format = self.rounding.format
        if self.rounding.bits == 2 and self.scales is not None:
            levels, scale = 2 * levels, scale / 2
        values = (levels.flatten(1) + format.middle).to(torch.int8 if format == INT8 else torch.uint8)
        return QuantizedWeight(format=format, values=values, scales=scale.squeeze(-1).to(format.scale_dtype))


def _logarithms(scales: Tensor) -> Tensor:
    """Logarithms of scales above e^-40 (below the smallest), divided by ten, with the sign of the scale."""
    return torch.where(scales < 0, -1, 1) * (scales.abs().clamp(min=1e-6).log() / 10 + 4)


def _numbers(logarithms: Tensor) -> Tensor:
    """The scales of `_logarithms`.

    A step of Adam is as large as the learning rate, whatever the gradient, and scales are small. So their logarithms
    are trained (arXiv 1903.08066), with ten times the rate: at 1e-4 a step changes a scale by 0.1%.
    """
    return logarithms.sign() * (10 * (logarithms.abs() - 4)).exp()


class FakeQuantizedEmbedding(nn.Embedding):
    """The embedding of a model whose tied head is rounded."""

    head: tuple[FakeQuantized]  # in a tuple: not a module of this one

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (…) -> (…, C)."""
        return F.embedding(tokens, self.head[0].weight)


def fake_quantize(
    model: Transformer, rounding: FakeRounding, *, head: Literal["none", "int8", "same"] = "none"
) -> None:
    """Replace all linear layers of the blocks by rounding ones, and the head as `head` says."""
    for name in layers_to_quantize(model):
        own = rounding
        if name == "embedding" or (name == "head" and head == "none"):
            continue
        if name == "head":  # its inputs are not rounded: the loss reads the weight
            own = replace(rounding, activations="float", bits=8 if head == "int8" else rounding.bits)
        name = name.removesuffix(".base")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear | LoRALinear), "a quantized model is refused before"
        tied = name == "head" and model.tied
        new = FakeQuantized.of(layer, own)
        model.set_submodule(name, new)
        if tied:
            model.embedding = take_over(FakeQuantizedEmbedding, model.embedding)
            model.embedding.head = (new,)


def fake_layers(model: nn.Module) -> dict[str, FakeQuantized]:
    """The rounding layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantized)}


def as_stored(model: Transformer) -> Quantized:
    """The layers as `export_model` writes them. The model gets plain layers with the exact weights back."""
    layers: Mapping[str, FakeQuantized] = fake_layers(model)
    for name, layer in layers.items():
        layer.bits = layer.rounding.bits
        plain = take_over(nn.Linear, layer)
        model.set_submodule(name, plain)
        # New dictionaries: the rounding layer is still read by `weight` below.
        plain._parameters = {"weight": nn.Parameter(layer.exact.detach()), "bias": layer.bias}
        plain._buffers = {}
    if isinstance(model.embedding, FakeQuantizedEmbedding):
        model.embedding = take_over(nn.Embedding, model.embedding)
    formats = {name: layer.rounding.layer for name, layer in layers.items()}
    rows = slice(model.config.vocab_size)  # without those that pad the vocabulary

    def weight(name: str) -> QuantizedWeight:
        found = layers[name].quantized()
        return found.rows(rows) if name == "head" else found

    return Quantized(formats, weight)


def bits_at(step: int, *, start: int, target: int, period: int, mixing: int) -> tuple[int, float]:
    """MoQ's schedule: bits in a step (from 0), and the share of the exact weight.

    One bit less at steps `period`, 2·period, 4·period, … down to the target; after each the exact weight's share falls
    from 1 to 0 within `mixing` steps.
    """
    bits, last, next_drop = start, None, period
    while bits > target and step >= next_drop:
        bits, last, next_drop = bits - 1, next_drop, 2 * next_drop
    if last is None or not mixing:
        return bits, 0.0
    return bits, max(0.0, 1 - (step - last) / mixing)


def set_bits(model: nn.Module, bits: int, mix: float) -> None:
    """Set the bits and the mix of the blocks' layers; a head that is stored in more bits does not change."""
    layers = fake_layers(model).values()
    fewest = min(layer.rounding.bits for layer in layers)
    for layer in layers:
        if layer.rounding.bits == fewest:
            layer.bits = bits
            layer.mix.fill_(mix)
