"""ModelConfig: every difference between the model families, as plain values.

A family (hasten.model.families) translates a Hugging Face config.json into a `ModelConfig`; the transformer reads
nothing else, so behaviour follows from these fields and never from a model's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import TYPE_CHECKING, Any, Literal

from hasten.errors import CheckpointError, ConfigError
from hasten.model.mixer_config import MixerConfig

if TYPE_CHECKING:
    from hasten.ops.attention.pattern_layout import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how its frequencies are stretched for long contexts.

    dim is the number of leading elements of a head that are rotated (less than head_dim: partial rotary). scaling
    "llama3" uses low/high_frequency_factor, "yarn" (arXiv 2309.00071) beta_fast/beta_slow, "longrope" (arXiv
    2402.13753) the per-frequency short/long factors; original_positions is the context of the pretraining. query_beta:
    queries are multiplied by 1 + query_beta · ln(1 + ⌊position / original_positions⌋). backwards: heads are rotated the
    other way, by negative angles. "proportional" turns only the first `turned` of the dim/2 pairs, with the frequencies
    that they would have if all turned.
    """

    theta: float
    dim: int
    scaling: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_beta: float = 0.0
    backwards: bool = False
    turned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The sizes of latent attention (MLA, arXiv 2405.04434), whose keys and values are products of a narrow latent.

    rank: features of the latent; query_rank: of that of the queries, None: they have none. A head's query and key have
    key_dim features that are not rotated and turned_dim that are, its value value_dim. What a cache keeps of a token is
    the latent and one rotated key for all heads: `head_dim` = rank + turned_dim numbers of one key/value head.
    """

    rank: int
    query_rank: int | None
    key_dim: int
    turned_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Features of a head's query, and of its key."""
        return self.key_dim + self.turned_dim

    @property
    def kept(self) -> int:
        """Numbers that a cache keeps of a token."""
        return self.rank + self.turned_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The settings of one layer: the attention window (None: everything), the rotary table, the MLP kind.

    A layer has two halves, unless mixes or mlp is False: what lets tokens see each other, then an MLP or experts.
    head_dim, kv_heads, inner (features of the MLP): None where they are those of the model. keys_of: the earlier layer
    whose keys and values this one uses, having none of its own; lends_keys: later layers use those of this one.
    values_of_keys: values are the product for keys, before norm and rotary turn.
    """

    window: int | None = None
    rope: int | None = 0  # index into ModelConfig.ropes; None: queries and keys are not rotated
    mixes: bool = True  # False: neither attention nor what is in its place
    mlp: bool = True  # False: neither an MLP nor experts
    experts: bool = False
    scale: float = 1.0  # multiplies the scores
    keeps_state: bool = False  # `ModelConfig.mixer` in the place of attention
    head_dim: int | None = None
    kv_heads: int | None = None
    inner: int | None = None
    keys_of: int | None = None
    lends_keys: bool = False
    values_of_keys: bool = False

    def __post_init__(self) -> None:
        if (self.experts and not self.mlp) or (self.keeps_state and not self.mixes):
            raise ConfigError(f"experts=True needs mlp=True, and keeps_state=True needs mixes=True; found {self}")

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self.mixes and not self.keeps_state

    @property
    def halves(self) -> int:
        """Number of halves that the layer has."""
        return self.mixes + self.mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are counts of elements; `source` is the config.json it came from."""

    family: str
    vocab_size: int  # ids a tokenizer may produce; weight rows past it are padding
    padded_vocab_size: int  # rows of the embedding and the head
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # Gemma and Nemotron store weight - 1
    norm_bias: bool = True  # of a layer norm
    norm_weights: bool = True  # nanochat's norms are x / rms(x) alone
    embedding_norm: bool = False  # the first block reads normalised embeddings
    pre_norms: bool = True  # OLMo 2 and 3 and EXAONE 4 do not normalise what attention and MLP read
    post_norms: bool = False  # Gemma 2 and 3 also normalise what attention and MLP return
    parallel: bool = False  # attention and MLP read the same normalised stream, and both are added to it at once
    # Queries and keys are normalised: each head before the rotary turn, each head after it, or all heads as one vector.
    qk_norm: Literal["head", "rotated_head", "projection"] | None = None
    value_norm: bool = False  # each head of the values is divided by its root mean square
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"] = "silu"
    gated: bool = True  # down(act(gate x) * up x) instead of down(act(up x))
    swiglu_limit: float | None = None  # gate x is at most this, and up x within ± this
    up_offset: float = 0.0  # down(act(gate x) * (up x + up_offset))
    attention_gate: bool = False  # each query head has a second half, whose sigmoid multiplies what attention returns
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    learned_positions: bool = False
    ropes: tuple[RopeConfig, ...] = ()
    rope_pairs: bool = False  # rotates elements 2i and 2i + 1 of a head together instead of i and i + dim/2
    attention_softcap: float | None = None
    attention_sinks: bool = False  # a learned logit of each head joins the softmax of its scores
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the stream
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    mixer: MixerConfig | None = None  # of the layers that keep a state
    latent: LatentConfig | None = None  # of attention, whose kv_heads and head_dim are then those of what is kept
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    expert_latent: int = 0  # features that experts read and return, between two products of all; 0: the stream's
    expert_scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    router_bias: bool = False  # the router's logits have one
    expert_choice_bias: bool = False  # a stored bias of each expert is added to its score to choose, not to weigh
    expert_groups: int = 1  # consecutive experts in as many equal groups; only the best groups' experts are chosen
    expert_top_groups: int = 1  # number of groups kept
    expert_group_scores: int = 2  # best scores in a group whose sum is that of the group
    normalize_experts: bool = True  # the chosen experts' scores are divided by their sum
    expert_sum_floor: float = 1e-20  # the least that they are divided by
    expert_weight_scale: float = 1.0  # multiplies the weights of the chosen experts
    shared_size: int = 0  # inner features of an MLP beside the experts, for every token; 0: none
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a product with the input
    expert_norms: bool = False  # experts, their router and the MLP beside them have norms of their own (Gemma 4)
    token_features: int = 0  # of a second embedding, whose rows have these for each block (Gemma 4); 0: none
    token_vocab_size: int = 0  # rows of that table
    block_scales: bool = False  # a stored number multiplies the stream behind each block
    initializer_range: float = 0.02  # standard deviation of random weights
    attention_pattern: "Pattern | None" = None  # which blocks every layer sees; hasten's own field of config.json
    dropout: float = 0.0  # in training only; set by the recipe, never by a checkpoint
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a state of each sequence, from which no token can be taken back."""
        return any(layer.keeps_state for layer in self.layers)

    @property
    def state_mixer(self) -> MixerConfig:
        """`mixer`, in a model whose layers keep states."""
        assert self.mixer is not None, "layers that keep states have their sizes in the config"
        return self.mixer

    @property
    def shares_keys(self) -> bool:
        """Whether layers use the keys and values of others."""
        return any(layer.keys_of is not None for layer in self.layers)

    @property
    def first_without_keys(self) -> int:
        """Number of the first layer from which on all use the keys and values of others; that of all if none does."""
        own = [place for place, layer in enumerate(self.layers) if layer.keys_of is None]
        return own[-1] + 1 if own else 0

    @property
    def mixed_heads(self) -> bool:
        """Whether layers have heads of several sizes, or different numbers of key/value heads."""
        return any((layer.head_dim, layer.kv_heads) != (None, None) for layer in self.layers)

    def head_dim_of(self, layer: LayerConfig) -> int:
        """The size of a head in this layer."""
        return self.head_dim if layer.head_dim is None else layer.head_dim

    def kv_heads_of(self, layer: LayerConfig) -> int:
        """The number of key/value heads in this layer."""
        return self.kv_heads if layer.kv_heads is None else layer.kv_heads

    def inner_of(self, layer: LayerConfig) -> int:
        """Inner features of this layer's MLP, where it has no experts; 0: it has none."""
        return 0 if not layer.mlp else self.intermediate_size if layer.inner is None else layer.inner

    @property
    def expert_width(self) -> int:
        """Features that an expert reads and returns."""
        return self.expert_latent or self.hidden_size

    @property
    def has_single_halves(self) -> bool:
        """Whether some layers have one half alone."""
        return any(layer.halves < 2 for layer in self.layers)

    def norms_of(self, layer: LayerConfig) -> int:
        """Number of norms of the stream in this layer's block."""
        return (1 if self.parallel else layer.halves) * self.pre_norms + layer.halves * self.post_norms

    @property
    def reach(self) -> int | None:
        """Most keys that a query of any layer sees, its own included; None: all of them."""
        if self.attention_pattern is not None:
            return self.attention_pattern.reach
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None

    @property
    def stretches_at(self) -> int | None:
        """The length past which longrope has other frequencies for all tokens of a sequence; None: no such length."""
        return min((rope.original_positions for rope in self.ropes if rope.scaling == "longrope"), default=None)

    def padded_to(self, multiple: int) -> "ModelConfig":
        """The same config with the vocabulary's rows rounded up to a multiple (nanoGPT: 50,257 -> 50,304)."""
        return replace(self, padded_vocab_size=-(-self.vocab_size // multiple) * multiple)


_MISSING: Any = object()


def _short(value: Any) -> str:
    """A short form of an untrusted value for an error message, whatever its size and depth."""
    shower = Repr()
    shower.maxlevel, shower.maxstring, shower.maxother, shower.maxlong = 2, 60, 60, 40
    return shower.repr(value)


class Fields:
    """Reads the values of a config.json, refusing wrong types and absurd sizes before anything is allocated.

    `defaults`: values of fields that the file leaves out, those of the family's config class in transformers. A field
    that is null counts as absent and takes the caller's own default.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str = "config.json", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.defaults = defaults or {}

    def __contains__(self, name: str) -> bool:
        return self.value(name) is not None

    def value(self, name: str) -> Any:
        """The raw value of a field, or its default, or None."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def fail(self, name: str, wanted: str, found: Any) -> CheckpointError:
        """The error for a field whose value cannot be used."""
        return CheckpointError(f"{self.where}: {name} must be {wanted}; found {_short(found)}")

    def _checked(
        self, names: tuple[str, ...], fits: Callable[[Any], bool], wanted: str, default: Any = _MISSING
    ) -> Any:
        """The first of these fields that is present, checked, else the default (None: the field may be missing)."""
        given = [name for name in names if name in self.values]
        name = next((name for name in given or names if name in self), names[0])
        value = self.value(name)
        if value is None and default is _MISSING:
            kind = self.values.get("model_type", "model")
            raise CheckpointError(f"{self.where} lacks {name!r}, which a {kind!s:.40} needs")
        value = default if value is None else value
        if value is not None and not fits(value):
            raise self.fail(name, wanted, value)
        return value

    def integer(self, *names: str, default: Any = _MISSING, low: int = 1, high: int = 1 << 20) -> Any:
        """An integer in [low, high]; the default limit of 2^20 is far above any published width."""
        wanted = f"an integer from {low} to {high}"
        return self._checked(names, lambda value: type(value) is int and low <= value <= high, wanted, default)

    def number(self, *names: str, default: Any = _MISSING, low: float = 0.0, high: float = 1e12) -> Any:
        """A finite number in [low, high]."""
        wanted = f"a number from {low:g} to {high:g}"
        value = self._checked(names, lambda x: type(x) in (int, float) and low <= x <= high, wanted, default)
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return self._checked((name,), lambda value: isinstance(value, bool), "true or false", default)

    def only(self, **known: Any) -> None:
        """Refuse a field that is there and says anything but this: the model would be another one."""
        for name, value in known.items():
            if name in self and self.value(name) != value:
                raise self.fail(name, f"{value!r} or absent", self.value(name))

    def choice(self, *names: str, options: Mapping[str, Any], default: Any = _MISSING) -> Any:
        """One of the keys of `options`; returns its value."""
        wanted = f"one of {', '.join(options)}"
        return options[self._checked(names, lambda x: isinstance(x, str) and x in options, wanted, default)]

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""

        def fits(value: Any) -> bool:
            right = isinstance(value, list) and len(value) == length
            return right and all(type(x) in (int, float) and 0 < x < 1e9 for x in value)

        return tuple(float(x) for x in self._checked((name,), fits, f"a list of {length} positive numbers"))

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None where it is absent."""
        value = self._checked((name,), lambda value: isinstance(value, dict), "an object", None)
        return None if value is None else Fields(value, f"{self.where}: {name}")

    def layer_kinds(
        self, layers: int, known: tuple[str, ...] = ("full_attention", "sliding_attention")
    ) -> list[str] | None:
        """`layer_types`: one of the known kinds for each layer, None where the field is absent."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == layers and all(kind in known for kind in value)

        return self._checked(("layer_types",), fits, f"a list of {layers} of {', '.join(known)}", None)
