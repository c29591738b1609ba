"""The forward pass of the whole model in FP8 (`WholeModel`). Its products:

blocks    forward, gradients of inputs and of weights in FP8    (hasten.ops.fp8)
head      logits and the gradient of its input in FP8, the gradient of its weight in 16 bits    (hasten.ops.loss)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hasten.model.mlp import MLP
from hasten.ops import fp8
from hasten.ops.residual import Norm
from hasten.training import by_hand as hand
from hasten.training.copies import LayerWeights, WeightCopies, parts_of
from hasten.training.whole import WholeModel, norm_of

MATRICES = ("qkv", "output", "up", "down")


class Fp8Model(WholeModel):
    """`WholeModel` with products in FP8: states between blocks are `fp8.States`, branches `fp8.Branch`."""

    def _in_fp8(self) -> fp8.Fp8Weights:
        """All matrices in FP8, the head's included, from the current parameters."""
        parts = [parts_of(block) for block in self.model.blocks]
        made = fp8.Fp8Weights([*(own[name] for own in parts for name in MATRICES), [self.model.head.weight]])
        made.measure()
        return made

    def make_copies(self) -> WeightCopies:
        return WeightCopies(self.model, self.dtype, fp8=self._in_fp8())

    def layers(self) -> list[LayerWeights]:
        kept = None if self.copies is None else self.copies.fp8
        weights = self._in_fp8() if kept is None else kept
        weights.refresh()
        *made, self.fp8_head = weights.made
        forms = iter(made)
        return [replace(layer, narrow={name: next(forms) for name in MATRICES}) for layer in super().layers()]

    def narrow_head(self) -> Tensor:
        return self.model.head.weight.detach()  # the loss reads `fp8_head`

    def begin(self, tokens: Tensor, positions: Tensor, norm: Norm, tied: hand.Tied | None) -> tuple[Tensor, fp8.States]:
        stream, x = super().begin(tokens, positions, norm, tied)
        return stream, fp8.States.of(x)

    def project(self, x: fp8.States, weights: LayerWeights, *, by_hand: bool) -> tuple[Tensor, Tensor, Tensor]:
        return fp8.project(x, weights.qkv, weights.narrow["qkv"], weights.qkv_bias, weights.splits)

    def attention_output(self, mixed: Tensor, weights: LayerWeights) -> fp8.Branch:
        return fp8.linear(fp8.States.of(mixed), weights.output, weights.narrow["output"])

    def add(self, stream: Tensor, branch: fp8.Branch, bias: Tensor | None, norm: nn.Module) -> tuple[Tensor, Any]:
        dropout = self.model.dropout
        if dropout.p and dropout.training:
            value = branch.value if bias is None else branch.value + bias
            branch, bias = fp8.Branch(dropout(value), None), None
        last = norm is self.model.norm  # also read in 16 bits, for the gradient of the head's weight
        return fp8.add_norm(stream, branch, bias, norm_of(norm), self.dtype, narrow=not last)

    def mlp(self, mlp: MLP, x: fp8.States, weights: LayerWeights) -> fp8.Branch:
        up, down = weights.narrow["up"], weights.narrow["down"]
        if mlp.gate is None and mlp.activation_name == "gelu_tanh" and weights.up_bias is not None:
            return fp8.mlp(x, weights.up, up, weights.up_bias, weights.down, down)
        h = self.activated(mlp, fp8.linear(x, weights.up, up).value, weights)
        return fp8.linear(fp8.States.of(h), weights.down, down)
