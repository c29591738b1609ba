"""The forward pass of a training step as one function of plain operators, on a GPU: captured or compiled whole.

    stream, x = add_norm(stream, branch, bias, norm)    a branch added to the stream and the next norm, one kernel
    q, k, v   = x · joined weight                       one product
    branch    = attention(q, k, v) · output weight      its bias is added by the next add_norm
    branch    = gelu(x · up + bias) · down              bias and GELU in one kernel

It reads the model's parameters, or 16-bit copies of the matrices (`copies.py`) that the optimizer writes: then a step
casts no weights, and the gradients of matrices are 16-bit, as the products leave them. The model itself is unchanged,
for checkpoints and export; validation runs this function, on the same copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.attention import Attention
from hasten.model.mlp import MLP
from hasten.model.norms import LayerNorm, RMSNorm
from hasten.model.transformer import Block, Transformer
from hasten.ops import residual
from hasten.ops.fp8 import Fp8Weight
from hasten.ops.loss import KERNELS as LOSS_KERNELS
from hasten.ops.loss import LossRequest
from hasten.ops.loss.kernels import Head
from hasten.ops.picker import pick
from hasten.ops.residual import AddNormRequest, Norm, normalized
from hasten.training import by_hand as hand
from hasten.training.copies import LayerWeights, WeightCopies


def why_not_whole(model: Transformer) -> str | None:
    """Why a model's forward pass cannot run as `WholeModel`, or None."""
    if model.stack is not None or not all(type(block) is Block for block in model.blocks):
        return "its blocks are not the plain ones"
    if model.config.keeps_states:
        return f"it has layers with {model.config.state_mixer.name}"
    if model.config.has_single_halves:
        return "it has layers of one half"
    if any(not isinstance(norm, LayerNorm | RMSNorm) for norm in _norms(model)):
        return "it has norms of another kind"
    for block in _blocks(model):
        if not isinstance(block.attention_post_norm, nn.Identity) or not isinstance(block.mlp_post_norm, nn.Identity):
            return "it has norms after attention and MLP"
        if type(block.mlp) is not MLP:
            return "it has experts, which change the shapes of products from step to step"
        if type(block.attention) is not Attention or block.attention.block_size is not None:
            return "it has a sparse attention pattern"
        attention, mlp = block.attention, block.mlp
        layers = [attention.q, attention.k, attention.v, attention.output, mlp.up, mlp.down]
        if any(type(one) is not nn.Linear for one in [*layers, *([] if mlp.gate is None else [mlp.gate])]):
            return "it has layers that are not plain products (LoRA, rounding, quantized)"
        if attention.kernels.tokens.name == "flex":
            return "its attention kernel is compiled by itself"
    if model.config.norm == "layernorm" and (model.config.norm_offset or not model.config.norm_bias):
        return "its layer norms store their weights minus one, or have no biases"
    if model.config.residual_scale != 1.0 or model.config.logit_scale != 1.0:
        return "it scales its residual branches or its logits"
    if model.config.attention_sinks:
        return "its attention has sinks"
    if not model.config.norm_weights:
        return "its norms have no weights"
    if model.config.activation == "xielu":
        return "its activations learn"
    if type(model.head) is not nn.Linear or type(model.embedding) is not nn.Embedding:
        return "its head or embedding is not plain"
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return "some of its weights are frozen"
    return None


def _norms(model: Transformer) -> list[nn.Module]:
    return [model.norm, *(norm for block in _blocks(model) for norm in (block.attention_norm, block.mlp_norm))]


def _blocks(model: Transformer) -> list[Block]:
    return [cast(Block, block) for block in model.blocks]


class WholeModel(nn.Module):
    """A model's forward pass and loss as one function, called instead of the model while it trains.

    dtype: of the products. norm, gelu: names of kernels ("triton", "reference"); None: the first that fits. compiles:
    training steps run as one compiled graph; evaluation, which would be another graph, is not compiled.
    """

    copies: WeightCopies | None
    fp8_head: Fp8Weight | None = None

    def __init__(
        self,
        model: Transformer,
        *,
        dtype: torch.dtype,
        compiles: bool = False,
        norm: str | None = None,
        gelu: str | None = None,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.copies = model, dtype, None
        self._compiled: Callable[..., Tensor] | None = torch.compile(self.run, fullgraph=True) if compiles else None
        width = model.config.hidden_size
        self._add_norm = residual.bind(AddNormRequest(device=model.device, width=width), kernel=norm)
        self._bias_gelu = _gelu(model, gelu)
        # Picked here, because a compiler cannot trace the picker.
        asked = LossRequest(device=model.device, dtype=dtype, softcap=model.config.logit_softcap)
        self._loss = pick(LOSS_KERNELS, asked, forced=model.loss_kernel)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: Any,
        *,
        targets: Tensor,
        block_scales: Sequence[float] | None = None,
        share: Tensor | None = None,
    ) -> Tensor:
        """The loss, as `Transformer.forward` returns it for `targets`. block_scales must be None.

        share: factor on the loss (0-dim); call backward with gradient 1.
        """
        assert block_scales is None
        learns = self.model.training and torch.is_grad_enabled()
        given = tokens, positions, context, targets
        if share is not None and self.writes_gradients:
            return self.run(*given, share)
        loss = self._compiled(*given) if learns and self._compiled is not None else self.run(*given)
        return loss if share is None else loss * share

    @property
    def writes_gradients(self) -> bool:
        """Whether a loss with `share` has hand-written gradients (`by_hand.py`)."""
        return self._compiled is None and self._loss.name.startswith("chunked")

    def run(
        self, tokens: Tensor, positions: Tensor, context: Any, targets: Tensor, share: Tensor | None = None
    ) -> Tensor:
        """Run the pass; with `share` its gradients are hand-written."""
        model = self.model
        ropes = [table(positions) for table in model.ropes]
        blocks = _blocks(model)
        own = zip(blocks, model.config.layers, context.layers, strict=True)
        tied = hand.Tied() if share is not None and self._embeds_by_hand() else None
        stream, x = self.begin(tokens, positions, norm_of(blocks[0].attention_norm), tied)
        norms = [*(block.attention_norm for block in blocks[1:]), model.norm]
        for (block, layer, view), weights, norm in zip(own, self.layers(), norms, strict=True):
            rope = None if layer.rope is None else ropes[layer.rope]
            q, k, v = self.project(x, weights, by_hand=share is not None)
            mixed = block.attention.mix(q, k, v, rope, view)
            branch = self.attention_output(mixed, weights)
            stream, x = self.add(stream, branch, weights.output_bias, block.mlp_norm)
            branch = self.mlp(cast(MLP, block.mlp), x, weights)
            stream, x = self.add(stream, branch, weights.down_bias, norm)
        return self.loss(x, targets) if share is None else self.shared_loss(x, targets, share, tied)

    def _embeds_by_hand(self) -> bool:
        model = self.model
        dropped = model.dropout.p and model.dropout.training
        return not dropped and model.config.embedding_scale == 1.0 and model.embedding.weight.dtype == torch.float32

    def begin(self, tokens: Tensor, positions: Tensor, norm: Norm, tied: hand.Tied | None) -> tuple[Tensor, Any]:
        """The first block's residual stream and its norm; with `tied` the gradients are hand-written."""
        model = self.model
        if tied is None:
            stream = model.embed(tokens, positions)
            return stream, normalized(stream, norm).to(self.dtype)
        learned = None if model.positions is None else model.positions.weight
        return hand.embed(tokens, positions, model.embedding.weight, learned, norm, self.dtype, tied)

    def shared_loss(self, x: Tensor, targets: Tensor, share: Tensor, tied: hand.Tied | None) -> Tensor:
        """`share` times the loss, with hand-written gradients."""
        head, config = self.model.head, self.model.config
        made = Head(self.narrow_head(), config.vocab_size, head.bias, config.logit_softcap, fp8=self.fp8_head)
        tied = tied if head.weight is self.model.embedding.weight else None
        flat = x.flatten(0, -2), head.weight, targets.flatten()
        with torch.autocast(x.device.type, enabled=False):
            return hand.loss(*flat, made, self._loss.name, share, tied)

    def make_copies(self) -> WeightCopies:
        """Create the weight copies for a step."""
        return WeightCopies(self.model, self.dtype, head=self.writes_gradients)

    def narrow_head(self) -> Tensor:
        """The head's matrix in the dtype of the products."""
        weight = self.model.head.weight
        copy = None if self.copies is None else self.copies.of(weight)
        return weight.detach().to(self.dtype) if copy is None else copy

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the token losses (nats) of normalized states."""
        head, config = self.model.head, self.model.config
        weight = head.weight if self._loss.name.startswith("chunked") else head.weight.to(self.dtype)
        with torch.autocast(x.device.type, enabled=False):
            made = Head(weight, config.vocab_size, head.bias, config.logit_softcap, fp8=self.fp8_head)
            loss: Tensor = self._loss.run(x.flatten(0, -2), targets.flatten(), made)
        return loss

    # The parts of a block. `fp8_model.py` overrides them for FP8, where x and a branch are not plain tensors.

    def project(self, x: Any, weights: LayerWeights, *, by_hand: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Project normalized states to q, k, v (B, T, …); by_hand: with a hand-written gradient."""
        given = x, weights.qkv, weights.qkv_bias
        if by_hand:
            return hand.projection(*given, weights.splits)
        q, k, v = F.linear(*given).split(weights.splits, dim=-1)
        return q, k, v

    def attention_output(self, mixed: Tensor, weights: LayerWeights) -> Any:
        """Attention's branch, without its bias."""
        return F.linear(mixed, weights.output)

    def add(self, stream: Tensor, branch: Any, bias: Tensor | None, norm: nn.Module) -> tuple[Tensor, Any]:
        """Add a branch to the stream; returns the stream and its norm in the dtype of the products."""
        dropout = self.model.dropout
        if dropout.p and dropout.training:
            branch, bias = dropout(branch if bias is None else branch + bias), None
        return self._add_norm(stream, branch, bias, norm_of(norm), self.dtype)

    def mlp(self, mlp: MLP, x: Any, weights: LayerWeights) -> Any:
        """The MLP's branch, without its last bias."""
        return F.linear(self.activated(mlp, F.linear(x, weights.up), weights), weights.down)

    def activated(self, mlp: MLP, up: Tensor, weights: LayerWeights) -> Tensor:
        """Activation of an MLP: the input of its last product, from the result `up` of the first one without bias."""
        if mlp.gate is None and mlp.activation_name == "gelu_tanh":
            return self._bias_gelu(up, weights.up_bias)
        biased = up if weights.up_bias is None else up + weights.up_bias
        if mlp.gate is None:
            return mlp.activation(biased)
        gate, own = biased.chunk(2, dim=-1)
        return mlp.gated(gate, own)

    def layers(self) -> list[LayerWeights]:
        """The joined weights of all blocks."""
        return [self.weights(index) for index in range(len(self.model.blocks))]

    def weights(self, index: int) -> LayerWeights:
        """The joined weights of a block: its copies, or joined here from the parameters, differentiably."""
        if self.copies is not None:
            return self.copies.layers[index]
        return LayerWeights.of(self.model.blocks[index], self.dtype)


def norm_of(norm: nn.Module) -> Norm:
    """Weights and settings of a norm module, as the operators take them."""
    if isinstance(norm, RMSNorm):
        return Norm(norm.weight, None, norm.eps, norm.offset, centred=False)
    assert isinstance(norm, LayerNorm)
    return Norm(norm.weight, norm.bias, norm.eps)


def _gelu(model: Transformer, kernel: str | None) -> Callable[[Tensor, Tensor | None], Tensor]:
    from hasten.ops.activation.operator import reference_bias_gelu
    from hasten.ops.triton_support import refusal

    if kernel == "reference" or (kernel is None and refusal(model.device) is not None):
        return reference_bias_gelu
    from hasten.ops.activation.triton_gelu import bias_gelu

    return bias_gelu
