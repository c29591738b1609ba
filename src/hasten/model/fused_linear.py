"""Joins linear layers of one input into one packed layer for the fused steps, and splits them again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hasten.machine.pages import empty_in_large_pages
from hasten.model.attention import Attention
from hasten.model.initialize import unfilled
from hasten.model.lora import LoRALinear
from hasten.model.mlp import MLP, Linear
from hasten.model.norms import LayerNorm, RMSNorm
from hasten.model.sharded import SumOfRanks
from hasten.model.transformer import Block, Transformer
from hasten.ops.linear import PackedLinear, QuantizedWeight, request_of
from hasten.ops.linear.layouts import Packed
from hasten.ops.linear.operator import LinearRequest, native_unsupported
from hasten.ops.native import native_ops
from hasten.ops.panels import PANEL

# In the order of the enum in ops/block/phases.h.
ACTIVATION_ORDER = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "xielu")
HALF_PANEL = 32  # rows of gate, then rows of up, in a panel of 64 (ops/block/phases.h)


def packed(linear: Linear) -> PackedLinear:
    """Pack a linear layer for the native kernel; ConfigError if the kernel cannot serve it."""
    if not isinstance(linear, PackedLinear):
        return PackedLinear.from_linear(linear, kernel="native")
    if linear.request.dtype == torch.float16:
        linear.to(torch.float32)  # of activations
    if linear.kernel != "native":
        linear.bind("native")
    return linear


def fusion_conflict(
    model: Transformer, unsupported: Callable[[LinearRequest], str | None] = native_unsupported
) -> str | None:
    """The layer of a model that the fused steps cannot compute, or None.

    unsupported: returns why their products cannot serve a packed layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            return f"they were given no adapter when they were made, and {name} has one"
        if isinstance(module, PackedLinear) and module.order is not None:
            return f"they take activations as they come, and {name} wants them in the order of its columns (desc_act)"
        if isinstance(module, PackedLinear) and (reason := unsupported(module.request)) is not None:
            return f"{name}: {reason}"
    return None


def mixed_formats(model: Transformer) -> str | None:
    """Layers with the same input that cannot be fused, with the reason, or None."""
    for number, block in enumerate(model.blocks):
        if not isinstance(block, Block):
            continue
        fused: dict[str, list[Linear]] = {}
        if type(block.attention) is Attention:
            fused["q, k and v"] = [block.attention.q, block.attention.k, block.attention.v]
        if isinstance(block.mlp, MLP) and block.mlp.gate is not None:
            fused["gate and up"] = [block.mlp.gate, block.mlp.up]
        for names, linears in fused.items():
            found = difference(*linears)
            if found is not None:
                return f"its {names} are one product, and those of block {number} differ: {found}"
    return None


def difference(*linears: Linear) -> str | None:
    """Why these layers cannot be fused (a property in which they differ), or None."""
    first, *others = [_kind(linear) for linear in linears]
    for other in others:
        for name, value in first.items():
            if other[name] != value:
                return f"{name} {value} and {other[name]}"
    return None


def _kind(linear: Linear) -> dict[str, object]:
    format = request_of(linear).format
    kind: dict[str, object] = {"format": format.element, "bias": linear.bias is not None}
    if format.scales and isinstance(linear, PackedLinear):
        kind |= {
            "group size": format.group_size,
            "scales": str(format.scale_dtype).removeprefix("torch."),
            "zero points": not format.symmetric,
            "activations": linear.activations,
        }
    return kind


def interleave_gate_up(gate: Linear, up: Linear) -> PackedLinear:
    """Join gate and up in one layer whose panels hold 32 rows of each, so that a panel has both factors of a product.

    They must have no `difference`.
    """
    parts = [packed(gate), packed(up)]
    halves = -(-parts[0].out_features // HALF_PANEL)

    def interleave(tensors: list[Tensor]) -> Tensor:
        # The 64 rows are the dimension before a line's bytes (data), or the last one (scales).
        row = 2 if tensors[0].dim() == 4 else tensors[0].dim() - 1
        size = [2 * len(tensors[0]), *tensors[0].shape[1:]]
        mixed = empty_in_large_pages(size, dtype=tensors[0].dtype)
        for place, part in zip(mixed.split(HALF_PANEL, dim=row), tensors, strict=True):
            # Both halves of each panel, which become halves of two.
            place.unflatten(0, (-1, 2)).copy_(part.unflatten(row, (2, HALF_PANEL)).movedim(row, 1))
        return mixed[:halves]

    def pack(_: object) -> Packed:
        buffers = {name: [getattr(part, name) for part in parts] for name in Packed._fields}
        return Packed(**{name: interleave(own) for name, own in buffers.items() if own[0] is not None})

    biases = [pad(part.bias, (0, -part.out_features % PANEL)) for part in parts if part.bias is not None]
    bias = interleave([bias.view(-1, PANEL) for bias in biases]).flatten() if biases else None
    first = parts[0]
    options: dict[str, Any] = {"bias": bias, "activations": first.activations, "kernel": "native"}
    return PackedLinear(first.in_features, halves * PANEL, first.format, pack=pack, **options)


def joined(linears: list[Linear], order: Tensor | None = None) -> Linear:
    """Join layers without `difference` into one that has all their rows, optionally in another order."""
    if len(linears) == 1 and order is None:
        return linears[0]
    first = linears[0]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = QuantizedWeight.joined([_numbers(linear) for linear in linears])
    bias = torch.cat(biases) if biases else None
    if order is not None:
        order = order.to(weight.values.device)
        weight, bias = weight.map(lambda own: own[order]), None if bias is None else bias[order]
    return _linear(weight, bias, like=first)


def _numbers(linear: Linear) -> QuantizedWeight:
    return linear.numbers() if isinstance(linear, PackedLinear) else QuantizedWeight.plain(linear.weight.detach())


def gate_up_rows(size: int) -> tuple[Tensor, Tensor]:
    """The positions of gate's and of up's rows, `size` each, after `interleave_gate_up`."""
    rows = torch.arange(size)
    gate = rows // HALF_PANEL * PANEL + rows % HALF_PANEL
    return gate, gate + HALF_PANEL


def plain(linear: Linear) -> Linear:
    """Convert a packed layer of plain floats back to nn.Linear; return any other layer unchanged."""
    if isinstance(linear, PackedLinear) and not linear.format.scales:
        return part_of(linear, torch.arange(linear.out_features))
    return linear


def replace_linears(module: nn.Module, new: Callable[..., Linear]) -> None:
    """Replace every linear layer of a module by `new(linear)`."""
    for name, child in list(module.named_modules()):
        if isinstance(child, Linear):
            module.set_submodule(name, new(child))


def part_of(linear: Linear, rows: Tensor) -> Linear:
    """Split off some output rows as a layer of their own."""
    bias = None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, PackedLinear):
        return _linear(linear.numbers(rows), None if bias is None else bias[rows], like=linear)
    rows = rows.to(linear.weight.device)
    weight = QuantizedWeight.plain(linear.weight.detach()[rows])
    return _linear(weight, None if bias is None else bias[rows], like=linear)


def _linear(weight: QuantizedWeight, bias: Tensor | None, *, like: Linear) -> Linear:
    """Make a layer of a weight, with the activation format of another layer (nn.Linear for a plain weight)."""
    if weight.format.scales:
        assert isinstance(like, PackedLinear)
        return PackedLinear.from_weight(weight, bias, activations=like.activations, dtype=like.request.dtype)
    with unfilled():
        new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    new.weight = nn.Parameter(weight.values)
    if bias is not None:
        new.bias = nn.Parameter(bias)
    return new


def norm_arguments(norm: nn.Module) -> tuple[Tensor | None, Tensor | None, float, float, bool]:
    """weight, bias, eps, offset, centred."""
    if isinstance(norm, SumOfRanks):
        return norm_arguments(norm.norm)
    if isinstance(norm, RMSNorm):
        return _wide(norm.weight), None, norm.eps, norm.offset, False
    if isinstance(norm, LayerNorm):
        return _wide(norm.weight), _wide(norm.bias), norm.eps, norm.offset, True
    return None, None, 0.0, 0.0, False  # nn.Identity: no norm here


def _wide(weight: Tensor | None) -> Tensor | None:
    """A norm's factor in a dtype that native code takes (float16 only in weights)."""
    narrow = weight is not None and weight.dtype == torch.float16 and weight.device.type == "cpu"
    return weight.float() if narrow else weight  # type: ignore[union-attr]


def norm_fields(norm: nn.Module) -> dict[str, Any]:
    """`norm_arguments` by the names that native operators give them."""
    weight, bias, eps, offset, centred = norm_arguments(norm)
    return {"norm_weight": weight, "norm_bias": bias, "eps": eps, "offset": offset, "centred": centred}


def weight_fields(linear: PackedLinear) -> dict[str, Any]:
    """A packed weight by the names that native operators give its parts."""
    size = {"group_size": linear.format.group_size, "planes": linear.planes}
    return linear.packed._asdict() | {"bias": linear.bias} | size


def weight_plan(linear: PackedLinear, lora_a: Tensor | None = None, lora_b: Tensor | None = None) -> Tensor:
    """A packed weight as the native steps take it, with the factors of its adapters."""
    size = {"out_features": linear.out_features, "in_features": linear.in_features}
    plan: Tensor = native_ops().plan_weight.default(**size, **weight_fields(linear), lora_a=lora_a, lora_b=lora_b)
    return plan
