"""The base of the fused blocks of CPUs and GPUs: the parts of a readable block, and the way back to it."""

from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.experts import Experts
from hasten.model.fused_latent import LatentParts, inputs_of
from hasten.model.fused_linear import part_of, plain, replace_linears
from hasten.model.fused_mixer import MixerParts
from hasten.model.initialize import unfilled
from hasten.model.latent import LatentAttention
from hasten.model.mlp import MLP, Linear
from hasten.model.transformer import Block


def unknown_parts(config: ModelConfig, known: Collection[str] = ()) -> str | None:
    """A part of this model's blocks that fused steps have not, as a reason; `known`: fields of those that they have."""
    stays = any(layer.rope is None for layer in config.layers) and bool(config.ropes)
    parts = {
        "latent": "no latent attention" if config.latent is not None else None,
        "mixer": f"no layers with {config.state_mixer.name}" if config.keeps_states else None,
        "halves": "no layers of one half" if config.has_single_halves else None,
        "attention_gate": "no gates of attention" if config.attention_gate else None,
        "norm": "no layer norms stored minus one or without biases" if _unusual_layer_norm(config) else None,
        "pre_norms": "no blocks without norms before their halves" if not config.pre_norms else None,
        "parallel": "no blocks whose attention and MLP read the same stream" if config.parallel else None,
        "qk_norm": _QK_NORMS.get(config.qk_norm or ""),
        "residual_scale": "no scaled residual branches" if config.residual_scale != 1.0 else None,
        "rope": "no layers without rotary positions beside others" if stays else None,
        "query_beta": "no scaling of queries by their position" if any(r.query_beta for r in config.ropes) else None,
        "rope_pairs": "no rotary turn of neighbouring elements" if config.rope_pairs else None,
        "sinks": "no attention sinks" if config.attention_sinks else None,
        "activation": _ACTIVATIONS.get(config.activation),
        "shared_keys": "no layers that use the keys and values of others" if config.shares_keys else None,
        "mixed_heads": "no layers with heads of several sizes" if config.mixed_heads else None,
        "value_norm": "no norms of values" if config.value_norm else None,
        "token_features": "no per-layer embeddings" if config.token_features else None,
        "block_scales": "no numbers that scale the stream behind a block" if config.block_scales else None,
        "expert_norms": "no experts with norms of their own" if config.expert_norms else None,
        "expert_latent": "no experts that read a narrower stream" if config.expert_latent else None,
        "swiglu": "no limits or offsets in gated MLPs" if config.swiglu_limit or config.up_offset else None,
    }
    return next((words for name, words in parts.items() if words is not None and name not in known), None)


def _unusual_layer_norm(config: ModelConfig) -> bool:
    return config.norm == "layernorm" and (config.norm_offset != 0.0 or not config.norm_bias)


_ACTIVATIONS = {"relu2": "no squared ReLU", "quick_gelu": "no GELU by a logistic function", "xielu": "no xIELU"}
_QK_NORMS = {
    "projection": "no norms over all heads of queries and keys together",
    "rotated_head": "no norms of queries and keys after their rotary turn",
}


class FusedSteps(nn.Module):
    """One decoder layer in fused steps, made from a readable `Block`; a subclass joins the products and runs them.

    The base class holds the products output and (in a dense layer) down; a subclass those of q, k, v and of gate, up.
    """

    output: Linear
    down: Linear
    place = "the CPU in the dtype of its weights"  # where it runs, in words
    joins_experts = False  # whether the steps run the experts too, which are else called as a module

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.mixer = None if block.mixer is None else MixerParts(block.mixer)  # in the place of attention
        self.latent: LatentParts | None = None
        if block.mixer is None:
            self._take_attention(block.attention)
        self.attention_norm, self.attention_post_norm = block.attention_norm, block.attention_post_norm
        self.residual_scale, self.parallel = block.residual_scale, block.parallel
        self.mlp_norm, self.mlp_post_norm = block.mlp_norm, block.mlp_post_norm
        self.experts: nn.Module | None = block.mlp if isinstance(block.mlp, Experts) else None
        if isinstance(block.mlp, MLP):
            self.inner_size, self.gated = block.mlp.up.out_features, block.mlp.gate is not None
            self.activation_name = block.mlp.activation_name
            self.learned_activation = block.mlp.activation if isinstance(block.mlp.activation, nn.Module) else None
        self.token_norm = None if block.token_gate is None else block.token_gate.norm
        self.scale = block.scale  # of the stream behind the block
        self.register_load_state_dict_post_hook(_bind_again)

    def _take_attention(self, attention: Attention) -> None:
        self.rope_pairs, self.sinks, self.lends_keys = attention.rope_pairs, attention.sinks, attention.lends_keys
        if isinstance(attention, LatentAttention):
            self.latent = LatentParts(attention)
            self.spec, self.projections = self.latent.spec(attention.spec), inputs_of(attention.sizes)
            self.attention_gate = self.normalises_values = False
            self.q_norm = self.k_norm = self.qk_norm = None
            return
        self.spec, self.attention_gate = attention.spec, attention.has_gates
        self.projections = tuple(name for name in ("q", "k", "v") if getattr(attention, name) is not None)
        self.normalises_values = attention.value_eps is not None
        self.q_norm, self.k_norm, self.qk_norm = attention.q_norm, attention.k_norm, attention.qk_norm

    def bind(self) -> None:
        """Prepare the arguments of the calls once; looking them up in modules costs more than the calls."""
        raise NotImplementedError

    def runs_on(self, place: Tensor) -> bool:
        """Whether the steps can run on a tensor's device, in its dtype."""
        raise NotImplementedError

    @property
    def _like(self) -> Tensor:
        """A tensor of the block's device and dtype."""
        norms = (self.attention_norm, self.attention_post_norm)
        return next(tensor for norm in norms for tensor in (*norm.parameters(), *norm.buffers()))

    def __getstate__(self) -> dict[str, Any]:
        """State without prepared arguments, which hold addresses; a copy prepares its own."""
        return {k: v for k, v in self.__dict__.items() if k != "_bound"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.bind()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        place = fn(torch.empty(0, dtype=self._like.dtype, device=self._like.device))
        if not self.runs_on(place):
            dtype = str(place.dtype).removeprefix("torch.")
            raise ConfigError(
                f"a model fused like this one runs on {self.place} only; call hasten.unfuse(model) first, then make it "
                f"{dtype} on {place.device}"
            )
        super()._apply(fn, recurse)
        self.bind()  # `fn` may have given the tensors other memory
        return self

    def readable(self, config: ModelConfig, layer: LayerConfig) -> Block:
        """The readable block, rebuilt from this one."""
        with unfilled():
            block = Block(config, layer)
        block.eval()
        for fused, parts in self.rows().items():
            linear = getattr(self, fused)
            for name, rows in parts.items():
                block.set_submodule(name, plain(linear) if len(parts) == 1 else part_of(linear, rows))
        block.attention_norm, block.attention_post_norm = self.attention_norm, self.attention_post_norm
        block.mlp_norm, block.mlp_post_norm = self.mlp_norm, self.mlp_post_norm
        block.scale = self.scale
        if block.token_gate is not None and self.token_norm is not None:
            block.token_gate.norm = self.token_norm
        if self.experts is not None:
            replace_linears(self.experts, plain)
            block.mlp = self.experts
        elif isinstance(block.mlp, MLP) and self.learned_activation is not None:
            block.mlp.activation = self.learned_activation
        if block.mixer is not None and self.mixer is not None:
            self.mixer.give_to(block.mixer)
            return block
        block.attention.sinks = self.sinks
        if self.latent is not None:
            assert isinstance(block.attention, LatentAttention)
            self.latent.give_to(block.attention)
        else:
            block.attention.q_norm, block.attention.k_norm = self.q_norm, self.k_norm
        block.attention.bind()  # again, now that the weights are no longer on the meta device
        return block

    def rows(self) -> dict[str, dict[str, Tensor]]:
        """Output rows of each fused layer by the readable layer they belong to: {fused name: {readable name: rows}}."""
        raise NotImplementedError


def _bind_again(block: FusedSteps, _: object) -> None:
    block.bind()
