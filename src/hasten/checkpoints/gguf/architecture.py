"""One architecture of GGUF files: how it differs from Llama, and what of a model llama.cpp does not load."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hasten.model.config import ModelConfig, RopeConfig
from hasten.model.mixer_config import DeltaConfig, MambaConfig

Values = dict[str, Any]
Own = Mapping[str, Any]  # an architecture's metadata, without its name before them
MOST_LAYERS = 1 << 10  # as many as `layer_count` takes
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of the functions that score experts
NORM_AFTER_ATTENTION = {"mlp_norm": "post_attention_norm"}  # what the MLP reads is normalised by what is called so


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `general.architecture`.

    family: the `model_type` in config.json. numbers: metadata that are numbers, and their fields in config.json. read:
    values of config.json from the architecture's metadata, the values found so far, and the names of the tensors.
    write: metadata of a config. parts: names of tensors, where they are not Llama's. reordered: llama.cpp rotates
    neighbouring elements of a head, and the family elements i and i + D/2, so the rows of q and k are stored in another
    order. tiled: the value heads of Gated DeltaNet are stored in turn for each key head, not after each other.
    alternating: parts of one tensor whose rows are grouped by key head. joined: gate and up of an expert are written
    as one matrix. latent: attention is latent, and what turns is
    no share of a head. layer_norm: the field of a LayerNorm's epsilon, where the norms are no RMSNorms. experts: layers
    may have experts. lists: metadata that may be a number for each layer. proportional: the factors of rotary
    frequencies say how many pairs of a global head are turned.

    What llama.cpp loads (`why_not_loaded`), square: only heads that have the hidden size together; equal_heads: only as
    many of keys as of queries; partial: rotary positions of a part of each head; head: only one that is the embedding
    ("tied"), or only one of its own; biases: of which products besides q, k and v; windowed: some layer has a window;
    positions: only with rotary positions.
    """

    family: str
    numbers: dict[str, str] = field(default_factory=dict)
    read: Callable[[Own, Values, Container[str]], Values] = lambda own, found, tensors: {}
    write: Callable[[ModelConfig], Values] = lambda config: {}
    parts: dict[str, str] = field(default_factory=dict)
    reordered: bool = False
    tiled: bool = False
    alternating: tuple[str, ...] = ()
    joined: bool = False
    latent: bool = False
    layer_norm: str | None = None
    lists: tuple[str, ...] = ()
    proportional: bool = False
    experts: bool = False
    square: bool = False
    equal_heads: bool = False
    partial: bool = False
    head: Literal["tied", "own"] | None = None
    biases: tuple[Literal["output", "mlp"], ...] = ()
    windowed: bool = False
    positions: bool = False

    def why_not_loaded(self, config: ModelConfig) -> str | None:
        """What of this model llama.cpp does not load, whatever the file says."""
        width, parts = config.heads * config.head_dim, {rope.dim for rope in config.ropes} - {config.head_dim}
        tied = "tied" if config.tie_embeddings else "own"
        mixer = config.mixer
        sizes = (mixer.key_dim, mixer.value_dim) if isinstance(mixer, DeltaConfig) else (0, 0)
        inner = mixer.values if isinstance(mixer, MambaConfig) else 0
        own = config.first_without_keys  # llama.cpp: the last one's keys for global layers, those before it for others
        lenders = {own - (1 if layer.window is None else 2): layer.keys_of for layer in config.layers[own:]}
        found = {
            f"heads of {width} elements in all, with a hidden size of {config.hidden_size}": (
                self.square and width != config.hidden_size
            ),
            f"{config.kv_heads} key heads for {config.heads} heads": (
                self.equal_heads and config.kv_heads != config.heads
            ),
            "rotary positions of a part of each head": not self.partial and bool(parts),
            "no rotary positions": self.positions and not config.ropes,
            "a head of its own": self.head == "tied" != tied,
            "a head that is the embedding": self.head == "own" != tied,
            "biases of the attention's output": config.output_bias and "output" not in self.biases,
            "a window in no layer": self.windowed and all(layer.window is None for layer in config.layers),
            "biases of the MLPs": config.mlp_bias and "mlp" not in self.biases,
            "layers that use the keys of other ones than the last two": any(a != b for a, b in lenders.items()),
            f"heads of {sizes[0]} elements of a key and {sizes[1]} of a value": sizes[0] != sizes[1],
            f"{inner} features of Mamba-2, with a hidden size of {config.hidden_size}": (
                isinstance(mixer, MambaConfig) and inner != 2 * config.hidden_size
            ),
            "no bias of Mamba-2's convolution": isinstance(mixer, MambaConfig) and not mixer.conv_biased,
            "groups of experts of which the best one counts": (
                config.expert_groups > 1 and config.expert_group_scores != 2
            ),
            "rotary positions that are stretched otherwise than by yarn with mscale as mscale_all_dim": (
                self.latent and any(not _loads_stretched(rope) for rope in config.ropes)
            ),
        }
        return next((why for why, there in found.items() if there), None)


def _loads_stretched(rope: RopeConfig) -> bool:
    """Whether llama.cpp turns the heads of latent attention by this table."""
    return rope.scaling == "default" or (rope.scaling == "yarn" and rope.factor > 1 and rope.attention_factor == 1.0)


def first_experts(config: ModelConfig) -> int:
    """The number of layers before the first with experts."""
    return [*(layer.experts for layer in config.layers), True].index(True)


ROUTED_NUMBERS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
}


def routed_write(config: ModelConfig) -> Values:
    """Metadata of experts behind dense layers, with an MLP beside them."""
    grouped = config.expert_groups > 1
    return {
        "leading_dense_block_count": first_experts(config),
        "expert_shared_count": config.shared_size // config.expert_size,
        "expert_weights_scale": config.expert_weight_scale,
        "expert_weights_norm": config.normalize_experts,
        "expert_gating_func": SIGMOID if config.expert_scores == "sigmoid" else SOFTMAX,
        "expert_group_count": config.expert_groups if grouped else None,
        "expert_group_used_count": config.expert_top_groups if grouped else None,
    }


def groups_read(own: Own) -> Values:
    """Groups of experts; one where a file says nothing of them, or 0."""
    return {"n_group": own.get("expert_group_count") or 1, "topk_group": own.get("expert_group_used_count") or 1}


def windows(config: ModelConfig) -> Values:
    """The window, and which layers have it."""
    windowed = [layer.window for layer in config.layers]
    most = max(filter(None, windowed), default=0)
    return {
        "attention.sliding_window": most,
        "attention.sliding_window_pattern": [window is not None for window in windowed],
    }


def kinds_of_layers(own: Own, found: Values, every: int) -> list[str]:
    """`layer_types` by the pattern of windows: a list of flags, or n where each n-th layer has full attention."""
    count = found.get("num_hidden_layers")
    count = min(count, MOST_LAYERS) if type(count) is int else 0
    pattern = own.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list | np.ndarray):
        windowed = [bool(one) for one in pattern]
    else:
        windowed = [pattern == 0 or (i + 1) % pattern != 0 for i in range(count)]
    return ["sliding_attention" if one else "full_attention" for one in windowed]


def kinds_by_heads(own: Own, state: str, attention: str) -> Values:
    """What the number of key heads of each layer says: a layer without any keeps a state."""
    each = own.get("attention.head_count_kv")
    each = each.tolist() if isinstance(each, np.ndarray) else each
    if not isinstance(each, list) or not each:
        return {}
    kinds = [attention if heads else state for heads in each]
    return {"layer_types": kinds, "num_key_value_heads": next(filter(None, each), 0)}


def layers_read(own: Own, found: Values) -> Values:
    """The number of layers without those that predict further tokens, which are counted as layers, and not read."""
    layers, more = found.get("num_hidden_layers"), own.get("nextn_predict_layers", 0)
    counted = type(layers) is int and type(more) is int and 0 <= more < layers
    return {"num_hidden_layers": layers - more} if counted else {}
