"""The declaration of a family, and code that most families share."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, LayerConfig, ModelConfig, RopeConfig
from hasten.model.families.slices import RowSlice, Stacks, TensorSlice

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# What Llama and its descendants call our modules.
LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "router": "gate",
    "shared": "shared_experts",
}

Places = Iterator[tuple[str, TensorSlice]]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    config translates a config.json. names: the checkpoint's names for the parts of our parameters' names. rows: row
    slices of modules that the checkpoint stores in one matrix. transposed: the linear weights of blocks are stored
    (in, out). defaults are the values of fields that a config.json may leave out: those of the family's config class in
    transformers. stacks: the tensors of all experts of a layer, where the checkpoint stacks them.
    one_row: our vectors that it stores as matrices of one row. in_memory: the names of a transformers model in memory,
    where they are others; its experts are stacked. constants: tensors of one number each, the same in every model,
    which the files hold beside the weights. in_gguf: the layout of a GGUF file's tensors, where it joins others than
    the folder does. unused: beginnings of names of tensors that files hold and no model reads. multi_token: the names
    of a multi-token head's parts, where files may hold one that hasten computes (`hasten.model.multi_token`). A key of
    `names` may be two or three parts ("mlp.shared").
    """

    model_type: str
    architecture: str  # the transformers class, written into an exported config.json
    config: Callable[[Fields], ModelConfig]
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    rows: Callable[[ModelConfig], dict[str, RowSlice]] = lambda config: {}
    transposed: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    stacks: Stacks | None = None
    one_row: tuple[str, ...] = ()
    in_memory: Mapping[str, str] | None = None
    constants: Callable[[ModelConfig], dict[str, float]] = lambda config: {}
    in_gguf: "Family | None" = None
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    multi_token: Mapping[str, str] | None = None

    @property
    def base(self) -> str:
        """The name prefix that is missing in checkpoints of the bare model (without its head)."""
        return self.names["blocks"].partition(".")[0] + "."

    def places(self, config: ModelConfig) -> Places:
        """The names of our parameters, each with its piece of a published checkpoint."""
        rows = self.rows(config)
        for ours in parameter_names(config):
            parts = ours.split(".")
            name = self._name(parts)
            linear = parts[2:3] in (["attention"], ["mlp"]) and parts[-1] == "weight"
            if self.stacks is not None and "experts" in parts:
                yield ours, self._stacked(ours, config)
            elif parts[-1] in self.one_row:
                yield ours, TensorSlice(name, expert=0)
            else:
                own = None if "experts" in parts else rows.get(parts[-2])
                yield ours, TensorSlice(name, own, transposed=self.transposed and linear)

    def _stacked(self, ours: str, config: ModelConfig) -> TensorSlice:
        """The place of a parameter of an expert in the tensors `stacks`."""
        assert self.stacks is not None
        *layer, expert, module, leaf = ours.split(".")
        prefix = self._name(layer).removesuffix("experts")
        return self.stacks.place(prefix, module, leaf, expert=int(expert), size=config.expert_size)

    def _name(self, parts: list[str]) -> str:
        """The checkpoint's name of what we call by these parts."""
        found, place = [], 0
        while place < len(parts):
            longest = (".".join(parts[place : place + count]) for count in (3, 2))
            ours = next((name for name in longest if name in self.names), parts[place])
            found.append(self.names.get(ours, ours))
            place += ours.count(".") + 1
        return ".".join(found)


def layouts(family: Family, config: ModelConfig) -> list[Places]:
    """The places of a model's parameters, each with names of its own: in the family's files; with experts stacked as
    transformers 5 holds them; and with experts apart, where the files stack them (a GGUF file's are read so).
    """
    found = [family]
    if family.in_memory is not None or (config.experts and family.stacks is None):
        names = family.names if family.in_memory is None else family.in_memory
        stacks = Stacks(f"experts.{'gate_' * config.gated}up_proj", "experts.down_proj", gated=config.gated)
        found.append(replace(family, names=names, stacks=stacks))
    if family.stacks is not None:
        found.append(replace(family, stacks=None))
    if family.in_gguf is not None:
        found.append(family.in_gguf)
    return [one.places(config) for one in found]


def parameter_names(config: ModelConfig) -> Iterator[str]:
    """Yield the names of a Transformer's parameters without building it: the config may ask for a huge model."""
    layernorm = config.norm == "layernorm" and config.norm_bias
    inner = ["gate", "up", "down"] if config.gated else ["up", "down"]
    learned = ["activation.alpha_p", "activation.alpha_n"] if config.activation == "xielu" else []
    yield from _named("", ["embedding", "head"] + ["positions"] * config.learned_positions)
    if config.token_features:
        yield from _named("token_features.", ["embedding", "projection"])
        yield from _named("token_features.", ["norm"], bias=layernorm)
    outer = ["norm"] + ["embedding_norm"] * config.embedding_norm
    yield from _named("", outer if config.norm_weights else [], bias=layernorm)
    for i, layer in enumerate(config.layers):
        block = f"blocks.{i}."
        halves = ["attention"] * layer.mixes + ["mlp"] * layer.mlp
        before = halves[: 1 if config.parallel else 2] if config.pre_norms else []
        norms = [f"{half}_norm" for half in before] + [f"{half}_post_norm" for half in halves if config.post_norms]
        yield from _named(block, norms if config.norm_weights else [], bias=layernorm)
        if config.token_features:
            yield from _named(f"{block}token_gate.", ["reduce", "expand"])
            yield from _named(f"{block}token_gate.", ["norm"], bias=layernorm)
        if config.block_scales:
            yield f"{block}scale"
        if layer.keeps_state:
            yield from (f"{block}mixer.{name}" for name in config.state_mixer.parameters)
        elif layer.mixes and config.latent is not None:
            yield from _latent_names(f"{block}attention.", config)
        elif layer.mixes:
            own = 1 if layer.keys_of is not None else 2 if layer.values_of_keys else 3
            heads = ["q_norm", "k_norm"][: min(own, 2)] if config.qk_norm and config.norm_weights else []
            yield from _named(f"{block}attention.", heads, bias=layernorm)
            yield from _named(f"{block}attention.", ["q", "k", "v"][:own], bias=config.qkv_bias)
            yield from _named(f"{block}attention.", ["output"], bias=config.output_bias)
            if config.attention_sinks:
                yield f"{block}attention.sinks"
        if layer.experts:
            yield from _named(f"{block}mlp.", ["router"], bias=config.router_bias)
            for e in range(config.experts):
                yield from _named(f"{block}mlp.experts.{e}.", inner, bias=config.mlp_bias)
            yield from _named(f"{block}mlp.", ["narrow", "widen"] * bool(config.expert_latent))
            if config.expert_choice_bias:
                yield f"{block}mlp.choice_bias"
            if config.shared_size:
                yield from _named(f"{block}mlp.shared.", inner, bias=config.mlp_bias)
            yield from _named(f"{block}mlp.", ["shared_gate"] * config.shared_gate)
            if config.expert_norms:
                yield from _named(f"{block}mlp.", list(_EXPERT_NORMS), bias=layernorm)
                yield from (f"{block}mlp.{name}" for name in ("router_scale", "expert_scale"))
        elif layer.mlp:
            yield from _named(f"{block}mlp.", inner, bias=config.mlp_bias)
            yield from (f"{block}mlp.{name}" for name in learned)


def _latent_names(prefix: str, config: ModelConfig) -> Iterator[str]:
    """The names of the parameters of latent attention."""
    narrow = config.latent is not None and config.latent.query_rank is not None
    yield from _named(prefix, ["kv_down", "q_down"] if narrow else ["kv_down"], bias=config.qkv_bias)
    yield from _named(prefix, ["kv_norm", "kv_up", *(["q_norm", "q_up"] if narrow else ["q"])])
    yield from _named(prefix, ["output"], bias=config.output_bias)


_EXPERT_NORMS = ("shared_post_norm", "expert_norm", "expert_post_norm")


def _named(prefix: str, modules: list[str], *, bias: bool = False) -> list[str]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [f"{prefix}{module}.{kind}" for module in modules for kind in kinds]


def gate_up_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of gate and up in one matrix."""
    size = config.intermediate_size
    return {"gate": RowSlice(0, size), "up": RowSlice(size, 2 * size)}


def qkv_rows(config: ModelConfig, groups: int = 1) -> dict[str, RowSlice]:
    """Row slices of q, k and v in one matrix, concatenated in each of its groups."""
    q, kv = (heads // groups * config.head_dim for heads in (config.heads, config.kv_heads))
    return {"q": RowSlice(0, q, groups), "k": RowSlice(q, q + kv, groups), "v": RowSlice(q + kv, q + 2 * kv, groups)}


ROPE_KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn", "longrope")}


def rope_fields(fields: Fields) -> Fields | None:
    """The object that describes the rotary table: `rope_scaling` (before transformers 5), or `rope_parameters`."""
    old = fields.section("rope_scaling")
    return old if old is not None and old.values else fields.section("rope_parameters")


def rope(
    fields: Fields, head_dim: int, parameters: Fields | None, *, theta: float, kinds: Mapping[str, str] = ROPE_KINDS
) -> RopeConfig:
    """Read one rotary table from `parameters`; `theta` is the default if neither they nor `rope_theta` give one.

    kinds maps the family's names of scalings to ours.
    """
    inner = parameters if parameters is not None else Fields({}, fields.where)
    base = inner.number("rope_theta", default=fields.number("rope_theta", default=theta, low=1.0), low=1.0)
    partial = inner.number(
        "partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0, high=1.0), high=1.0
    )
    kind = inner.choice("rope_type", "type", options=kinds, default="default")
    dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise CheckpointError(f"{fields.where}: the rotated part of a head must be even; found {dim} of {head_dim}")
    if kind == "proportional":
        factor, turned = inner.number("factor", default=1.0, low=1e-3), int(partial * head_dim // 2)
        return RopeConfig(scaling=kind, theta=base, dim=dim, factor=factor, turned=turned)
    if kind == "default":
        return RopeConfig(theta=base, dim=dim)
    positions = fields.integer("max_position_embeddings", high=1 << 30)
    # The field beside the scaling overrides the one in it, as in transformers.
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


def ropes_of_kinds(fields: Fields, head_dim: int, *, theta: float, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The rotary tables of local and of global layers; theta, local_theta: their defaults.

    Transformers 5 nests both in `rope_parameters`; before, `rope_theta` and `rope_scaling` were for global layers
    only. The older fields are the defaults of the newer ones.
    """
    given = fields.section("rope_parameters")
    tables = {kind: given.section(kind) if given else None for kind in ("sliding_attention", "full_attention")}
    local, whole = tables["sliding_attention"], tables["full_attention"]
    scaling = fields.section("rope_scaling")
    if scaling is not None:
        whole = Fields({**(whole.values if whole else {}), **scaling.values}, scaling.where)
    plain = Fields({"max_position_embeddings": fields.integer("max_position_embeddings", high=1 << 30)}, fields.where)
    return (rope(plain, head_dim, local, theta=local_theta), rope(fields, head_dim, whole, theta=theta))


def _yarn_attention(inner: Fields, factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    first, second = inner.number("mscale", default=0.0), inner.number("mscale_all_dim", default=0.0)
    return of(first) / of(second) if first and second else of(1.0)


def common_fields(fields: Fields) -> dict[str, Any]:
    """Config fields that have the same name in all families."""
    vocab = fields.integer("vocab_size", high=1 << 24)
    return {
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
        "family": fields.values["model_type"],
        "initializer_range": fields.number("initializer_range", default=0.02, high=100.0),
        "source": dict(fields.values),
    }


def sizes(fields: Fields) -> dict[str, Any]:
    """Sizes that have the same name in Llama and its descendants."""
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
    """Layer configs by kind; only "sliding_attention" layers have the window. kinds: the default for `layer_types`.

    scale: score scale, None: by the head size. full_rope: the rotary table of layers with full attention.
    """
    scale = scale or sizes(fields)["head_dim"] ** -0.5
    sliding, full = LayerConfig(window=window, scale=scale), LayerConfig(rope=full_rope, scale=scale)
    return tuple(sliding if kind == "sliding_attention" else full for kind in fields.layer_kinds(len(kinds)) or kinds)


def hybrid_layers(
    fields: Fields, default: list[str] | None, full: LayerConfig, *, state: tuple[str, ...]
) -> tuple[LayerConfig, ...]:
    """Layers that keep a state, which `layer_types` calls one of `state`, beside `full`, those with attention.

    default: kinds of the layers where the field is absent; None: it may not be. One has to have attention.
    """
    count, attending = layer_count(fields), ("full_attention", "attention")
    kinds = fields.layer_kinds(count, known=(*state, *attending)) or default
    if kinds is None:
        raise CheckpointError(f"{fields.where} lacks 'layer_types', which a {fields.values['model_type']} needs")
    if not set(kinds) & set(attending):
        raise CheckpointError(f"{fields.where}: none of the {count} layers is full_attention; one has to be")
    return tuple(LayerConfig(rope=None, keeps_state=True) if kind in state else full for kind in kinds)


def llama_config(
    fields: Fields,
    *,
    theta: float = 10_000.0,
    rope_kinds: Mapping[str, str] = ROPE_KINDS,
    window: int | None = None,
    has_experts: Callable[[int], bool] = lambda layer: False,
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
    values = common | values | changes
    values["layers"] = tuple(replace(layer, experts=has_experts(i)) for i, layer in enumerate(values["layers"]))
    return ModelConfig(**values)


def expert_counts(
    fields: Fields, *names: str, chosen_names: tuple[str, ...] = ("num_experts_per_tok",)
) -> dict[str, Any]:
    """Number of experts of a layer and of experts for each token; names, chosen_names: spellings of the two fields."""
    experts = fields.integer(*names, high=1 << 12)
    chosen = fields.integer(*chosen_names, high=1 << 12)
    if chosen > experts:
        raise fields.fail(chosen_names[0], f"at most the {experts} experts of {names[0]}", chosen)
    return {"experts": experts, "experts_per_token": chosen}


def window_of(fields: Fields) -> int | None:
    """`sliding_window` if the model uses one; the query's own position counts."""
    return fields.integer("sliding_window", default=None, high=1 << 30)
