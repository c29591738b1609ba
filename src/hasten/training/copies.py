"""Joined weights of a block in the dtype of the products, as a step multiplies them.

Autocast casts every matrix in every step. `WeightCopies` instead keeps the matrices of all blocks in 16 bits; the
optimizer writes them after its update, and their gradients are 16-bit, as the products leave them. The numbers are
autocast's: the same rounding of the same weights. In FP8, products read other forms of the matrices (hasten.ops.fp8),
and only biases are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from hasten.model.mlp import MLP
from hasten.model.transformer import Block, Transformer
from hasten.ops.fp8 import Fp8Weight, Fp8Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Joined weights of a block.

    qkv: (H + 2·Hkv)·D rows. up: rows of the gate before those of up. splits: rows of q, k, v. The biases of output, up
    (in an ungated MLP) and down are the parameters, because the products do not add them. narrow: the matrices in FP8,
    if products read those.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    splits: Sequence[int]
    narrow: Mapping[str, Fp8Weight] = field(default_factory=dict)

    @classmethod
    def of(cls, block: nn.Module, dtype: torch.dtype) -> LayerWeights:
        """Join the parameters of a block, differentiably."""
        parts = parts_of(block)
        made = {name: _joined(members, dtype) for name, members in parts.items()}
        return cls(**made, **_rest(block))  # type: ignore[arg-type]


def parts_of(block: nn.Module) -> dict[str, list[Tensor]]:
    """The parameters that make up each joined matrix, and each bias that a product adds, by name."""
    assert isinstance(block, Block)
    attention, mlp = block.attention, cast(MLP, block.mlp)
    projections = [attention.q, attention.k, attention.v]
    ups = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    found = {"qkv": projections, "output": [attention.output], "up": ups, "down": [mlp.down]}
    parts: dict[str, list[Tensor]] = {
        name: [cast(Tensor, layer.weight) for layer in layers] for name, layers in found.items()
    }
    parts["qkv_bias"] = [layer.bias for layer in projections if layer.bias is not None]
    if mlp.gate is not None or mlp.activation_name != "gelu_tanh":
        parts["up_bias"] = [layer.bias for layer in ups if layer.bias is not None]
    return parts


def _rest(block: nn.Module) -> dict[str, object]:
    """The fields of `LayerWeights` that are not joined, by name."""
    assert isinstance(block, Block)
    attention, mlp = block.attention, cast(MLP, block.mlp)
    rest: dict[str, object] = {"output_bias": attention.output.bias, "down_bias": mlp.down.bias}
    if mlp.gate is None and mlp.activation_name == "gelu_tanh":
        rest["up_bias"] = mlp.up.bias
    rest["splits"] = [layer.out_features for layer in (attention.q, attention.k, attention.v)]
    return rest


def _joined(members: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    if not members:
        return None
    return (torch.cat(members) if len(members) > 1 else members[0]).to(dtype)


class WeightCopies(nn.Module):
    """16-bit copies of the blocks' matrices, which replace the parameters as leaves of the autograd graph.

    head: also copy the head's matrix for its products; its gradient is computed for the parameter, in float32. fp8:
    matrices that products read instead of copies; their leaves then only receive gradients. rows: the copy and the rows
    in it, by parameter.
    """

    layers: list[LayerWeights]

    def __init__(
        self, model: Transformer, dtype: torch.dtype, *, head: bool = False, fp8: Fp8Weights | None = None
    ) -> None:
        super().__init__()
        self.layers, self.dtype, self.fp8 = [], dtype, fp8
        self.rows: dict[Tensor, tuple[nn.Parameter, int, int]] = {}
        self._copies = nn.ParameterList()
        weight = model.head.weight
        self._head = (weight, weight.detach().to(dtype)) if head and weight.dtype != dtype else None
        for block in model.blocks:
            made: dict[str, Tensor | None] = {}
            for name, members in parts_of(block).items():
                made[name] = None
                if not members:
                    continue
                copy = nn.Parameter(self._leaf(members))
                self._copies.append(copy)
                made[name] = copy
                first = 0
                for member in members:
                    self.rows[member] = (copy, first, first + member.shape[0])
                    first += member.shape[0]
            self.layers.append(LayerWeights(**made, **_rest(block)))  # type: ignore[arg-type]

    def _leaf(self, members: list[Tensor]) -> Tensor:
        """A joined copy, or for FP8 an expanded tensor of its shape that holds one number."""
        if self._in_fp8(members[0]):
            rows = sum(len(member) for member in members)
            return members[0].new_empty_strided((rows, members[0].shape[1]), (0, 0), dtype=self.dtype)
        with torch.no_grad():
            joined = _joined(members, self.dtype)
        assert joined is not None
        return (joined.clone() if joined is members[0] else joined).detach()

    def _in_fp8(self, parameter: Tensor) -> bool:
        return self.fp8 is not None and parameter in self.fp8.slots

    def leaves(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Leaves of the graph: each copy once, and the parameters that have none."""
        return list(dict.fromkeys(self.rows[p][0] if p in self.rows else p for p in parameters))

    def of(self, parameter: Tensor) -> Tensor | None:
        """The copy of a parameter, rows of a joined one; None if it has none."""
        if self._head is not None and parameter is self._head[0]:
            return self._head[1]
        if parameter not in self.rows or self._in_fp8(parameter):
            return None
        copy, first, last = self.rows[parameter]
        return copy.detach()[first:last]

    def gradients(self, parameters: Sequence[Tensor], found: dict[Tensor, Tensor]) -> list[Tensor]:
        """The gradient of each parameter, as views of the leaves' gradients `found`."""
        gradients = []
        for parameter in parameters:
            if parameter in self.rows:
                copy, first, last = self.rows[parameter]
                gradients.append(found[copy][first:last])
            else:
                gradients.append(found[parameter])
        return gradients

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, copy) for each parameter that has a copy."""
        for parameter in self.rows:
            copy = self.of(parameter)
            if copy is not None:
                yield parameter, copy
        if self._head is not None:
            yield self._head
