"""What a family declares, and the pieces most families share."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, LayerConfig, ModelConfig, RopeConfig

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where one of our tensors stands in a checkpoint: the whole tensor `name`, or a part of it.

    expert: which matrix of a stacked (E, …) tensor. transposed: stored (in, out), as GPT-2's Conv1D does.
    start, stop: which output rows. interleaved (n, i, D): the rows are (heads, n, D), and this is part i of n.
    """

    name: str
    start: int | None = None
    stop: int | None = None
    transposed: bool = False
    expert: int | None = None
    interleaved: tuple[int, int, int] | None = None


Places = Iterator[tuple[str, TensorSlice]]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    config translates a config.json. places yields (our parameter name, its piece of a published checkpoint).
    in_memory, where it differs, does the same for the state dict of a transformers model. base is the prefix of the
    names that a checkpoint of the bare model (without its head) lacks. defaults are the values of fields that a
    config.json may leave out: those of the family's config class in transformers.
    """

    model_type: str
    architecture: str  # the transformers class, written into an exported config.json
    config: Callable[[Fields], ModelConfig]
    places: Callable[[ModelConfig], Places]
    in_memory: Callable[[ModelConfig], Places] | None = None
    base: str = "model."
    defaults: Mapping[str, Any] = field(default_factory=dict)


ROPE_KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn", "longrope")}


def rope_fields(fields: Fields) -> Fields | None:
    """The object that describes the rotary table: `rope_scaling` (before transformers 5), or `rope_parameters`."""
    old = fields.section("rope_scaling")
    return old if old is not None and old.values else fields.section("rope_parameters")


def rope(
    fields: Fields,
    head_dim: int,
    parameters: Fields | None,
    *,
    theta: float,
    kinds: Mapping[str, str] = ROPE_KINDS,
) -> RopeConfig:
    """Read one rotary table from `parameters`; theta is used where neither they nor `rope_theta` beside them says it.

    kinds maps the names of the scalings that this family knows to ours.
    """
    inner = parameters if parameters is not None else Fields({}, fields.where)
    base = inner.number("rope_theta", default=fields.number("rope_theta", default=theta, low=1.0), low=1.0)
    partial = inner.number(
        "partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0, high=1.0), high=1.0
    )
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise CheckpointError(f"{fields.where}: the rotated part of a head must be even; found {dim} of {head_dim}")
    kind = inner.choice("rope_type", "type", options=kinds, default="default")
    if kind == "default":
        return RopeConfig(theta=base, dim=dim)
    positions = fields.integer("max_position_embeddings", high=1 << 30)
    # As in transformers the field beside the scaling counts more than the one in it.
    within = inner.integer("original_max_position_embeddings", default=positions, low=2, high=1 << 30)
    original = fields.integer("original_max_position_embeddings", default=within, low=2, high=1 << 30)
    ratio = {"default": positions / original} if kind in ("yarn", "longrope") else {}
    factor = inner.number("factor", low=1e-3, **ratio)
    own: dict[str, Any] = {}
    if kind == "llama3":
        low, high = inner.number("low_freq_factor", low=1e-6), inner.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise inner.fail("high_freq_factor", f"greater than low_freq_factor ({low:g})", high)
        own = {"low_frequency_factor": low, "high_frequency_factor": high}
    elif kind == "yarn":
        if base == 1.0:
            raise fields.fail("rope_theta", "greater than 1 for yarn scaling", base)
        own = {
            "beta_fast": inner.number("beta_fast", default=32.0) or 32.0,
            "beta_slow": inner.number("beta_slow", default=1.0) or 1.0,
            "truncate": inner.flag("truncate", True),
            "attention_factor": inner.number("attention_factor", default=_yarn_attention(inner, factor)),
        }
    elif kind == "longrope":
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        own = {
            "short_factor": inner.numbers("short_factor", dim // 2),
            "long_factor": inner.numbers("long_factor", dim // 2),
            "attention_factor": inner.number("attention_factor", default=scale),
        }
    return RopeConfig(scaling=kind, theta=base, dim=dim, factor=factor, original_positions=original, **own)


def _yarn_attention(inner: Fields, factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    first, second = inner.number("mscale", default=0.0), inner.number("mscale_all_dim", default=0.0)
    return of(first) / of(second) if first and second else of(1.0)


def common_fields(fields: Fields) -> dict[str, Any]:
    """What all families name alike."""
    vocab = fields.integer("vocab_size", high=1 << 24)
    return {
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
        "family": fields.values["model_type"],
        "initializer_range": fields.number("initializer_range", default=0.02, high=100.0),
        "source": dict(fields.values),
    }


def sizes(fields: Fields) -> dict[str, Any]:
    """The sizes that Llama and its descendants name alike."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads", high=1 << 12)
    kv_heads = fields.integer("num_key_value_heads", default=heads, high=1 << 12)
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    if "head_dim" not in fields and hidden % heads:
        raise CheckpointError(f"{fields.where}: hidden_size ({hidden}) must be a multiple of the {heads} heads")
    return common_fields(fields) | {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", high=1 << 22),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": fields.integer("head_dim", default=hidden // heads, high=1 << 12),
        "max_positions": fields.integer("max_position_embeddings", high=1 << 30),
    }


def layer_count(fields: Fields, *names: str) -> int:
    """The number of layers; a thousand is far above any published model."""
    return fields.integer(*(names or ("num_hidden_layers",)), high=1 << 10)


def layers_of_kinds(
    fields: Fields, kinds: list[str], *, window: int | None, scale: float | None = None, full_rope: int = 0
) -> tuple[LayerConfig, ...]:
    """Only "sliding_attention" has the window. kinds: the family's own, where `layer_types` says nothing.

    scale: of the scores, None: by the head's size. full_rope: the rotary table of the layers that see everything.
    """
    scale = scale or sizes(fields)["head_dim"] ** -0.5
    sliding, full = LayerConfig(window=window, scale=scale), LayerConfig(rope=full_rope, scale=scale)
    return tuple(sliding if kind == "sliding_attention" else full for kind in fields.layer_kinds(len(kinds)) or kinds)


def llama_config(
    fields: Fields,
    *,
    theta: float = 10_000.0,
    rope_kinds: Mapping[str, str] = ROPE_KINDS,
    window: int | None = None,
    **changes: Any,
) -> ModelConfig:
    """A Llama-like config: RMSNorm, rotary positions, gated MLP, no biases, unless changed by keyword."""
    common = sizes(fields)
    values: dict[str, Any] = {
        "layers": (LayerConfig(window=window, scale=common["head_dim"] ** -0.5),) * layer_count(fields),
        "norm_eps": fields.number("rms_norm_eps", default=1e-6, high=1.0),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
    }
    if "activation" not in changes:
        values["activation"] = fields.choice("hidden_act", options=ACTIVATION_NAMES, default="silu")
    if "ropes" not in changes:
        values["ropes"] = (rope(fields, common["head_dim"], rope_fields(fields), theta=theta, kinds=rope_kinds),)
    return ModelConfig(**(common | values | changes))


def expert_counts(fields: Fields, *names: str) -> dict[str, Any]:
    """How many experts a layer has (`names`, the field's spellings) and how many each token is sent to."""
    experts = fields.integer(*names, high=1 << 12)
    chosen = fields.integer("num_experts_per_tok", high=1 << 12)
    if chosen > experts:
        raise fields.fail("num_experts_per_tok", f"at most the {experts} experts of {names[0]}", chosen)
    return {"experts": experts, "experts_per_token": chosen}


def window_of(fields: Fields) -> int | None:
    """`sliding_window` where the model uses one; the query's own position counts."""
    return fields.integer("sliding_window", default=None, high=1 << 30)


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def llama_places(
    config: ModelConfig, *, norms: Mapping[str, str] = NORMS, moe: str = "mlp", experts: Mapping[str, str] = EXPERTS
) -> Places:
    """Names of Llama and its descendants. moe: of the MLP of layers with experts; experts: of gate, up and down."""
    yield "embedding.weight", TensorSlice("model.embed_tokens.weight")
    yield "norm.weight", TensorSlice("model.norm.weight")
    yield "head.weight", TensorSlice("lm_head.weight")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for our_norm, name in norms.items():
            yield f"{ours}.{our_norm}.weight", TensorSlice(f"{theirs}.{name}.weight")
        for our, name, bias in (
            ("q", "q_proj", config.qkv_bias),
            ("k", "k_proj", config.qkv_bias),
            ("v", "v_proj", config.qkv_bias),
            ("output", "o_proj", config.output_bias),
        ):
            yield f"{ours}.attention.{our}.weight", TensorSlice(f"{theirs}.self_attn.{name}.weight")
            if bias:
                yield f"{ours}.attention.{our}.bias", TensorSlice(f"{theirs}.self_attn.{name}.bias")
        if config.qk_norm:
            yield f"{ours}.attention.q_norm.weight", TensorSlice(f"{theirs}.self_attn.q_norm.weight")
            yield f"{ours}.attention.k_norm.weight", TensorSlice(f"{theirs}.self_attn.k_norm.weight")
        if layer.experts:
            ours, theirs = f"{ours}.mlp", f"{theirs}.{moe}"
            yield f"{ours}.router.weight", TensorSlice(f"{theirs}.gate.weight")
            for e in range(config.experts):
                for our, name in experts.items():
                    yield f"{ours}.experts.{e}.{our}.weight", TensorSlice(f"{theirs}.experts.{e}.{name}.weight")
            continue
        for our in ("gate", "up", "down"):
            yield f"{ours}.mlp.{our}.weight", TensorSlice(f"{theirs}.mlp.{our}_proj.weight")
            if config.mlp_bias:
                yield f"{ours}.mlp.{our}.bias", TensorSlice(f"{theirs}.mlp.{our}_proj.bias")


def stacked_experts(config: ModelConfig) -> Places:
    """How transformers 5 holds experts in memory: gate and up stacked in one (E, 2·I, C) tensor."""
    size = config.expert_size
    stacked = {
        "gate": TensorSlice("gate_up_proj", 0, size),
        "up": TensorSlice("gate_up_proj", size, 2 * size),
        "down": TensorSlice("down_proj"),
    }
    for ours, piece in llama_places(config):
        layer, inside, which = piece.name.partition(".experts.")
        if inside:
            part = stacked[ours.split(".")[-2]]
            piece = replace(part, name=f"{layer}.experts.{part.name}", expert=int(which.split(".")[0]))
        yield ours, piece
