"""Adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors.

A module's factors are base_model.model.NAME.lora_A.weight (r, K) and .lora_B.weight (N, r), NAME being the module's in
transformers. What a config asks for that would change the result and is not supported (DoRA, modules_to_save, …) is
refused by name. https://huggingface.co/docs/peft/package_reference/lora
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hasten.checkpoints.checkpoint import DTYPES, check_finite, read_header
from hasten.checkpoints.formats.stream import write_file
from hasten.errors import CheckpointError, ConfigError
from hasten.machine.files import replacing, save_json
from hasten.machine.regular_files import read_json
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES
from hasten.model.families.slices import TensorSlice, join
from hasten.model.lora import LARGEST_RANK, Adapter, Factors, adaptable, layer_size
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# Fields of a config that must be off, because each changes what an adapter computes, or what it holds.
REFUSED = (
    *("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "lora_bias"),
    *("use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"),
    *("monteclora_config", "ensure_weight_tying"),
)
# Initialisations after which the base is as it was: others (pissa, olora, loftq, corda, …) change its weights.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def load_adapter(source: str | Path, model: Transformer) -> dict[str, Factors]:
    """The adapter in a folder, for the layers of `model`, its factors in float32 on the model's device; of a model that
    several ranks hold this one's share of them.

    Raises CheckpointError for files that are missing, damaged or of another model, ConfigError for what is not
    supported, each with the name of the thing; all is checked before it is read.
    """
    folder = Path(source).expanduser()
    config = adapter_config(folder)
    stored = read_header(folder / WEIGHTS)
    whole = model.whole if isinstance(model, ShardedTransformer) else model.config
    places = adaptable(whole)
    wanted = {f"{PREFIX}{name}.lora_{one}.weight": name for name in places for one in "AB"}
    if strange := [name for name in stored if name not in wanted]:
        raise CheckpointError(
            f"{folder / WEIGHTS}: {strange[0]!r:.150} is no LoRA factor of a linear layer in this model "
            f"({whole.family}, {len(whole.layers)} layers); the adapter is of another, or of other layers"
        )
    adapter: dict[str, Factors] = {}
    for name in dict.fromkeys(wanted[key] for key in stored):
        rank, alpha = _number(config, "rank", "r", name), _number(config, "alpha", "lora_alpha", name)
        sizes = [layer_size(whole, ours) for ours, _ in places[name]]
        factors: list[Tensor] = []
        for one, shape in (("A", (int(rank), sizes[0][0])), ("B", (sum(n for _, n in sizes), int(rank)))):
            found = stored.get(key := f"{PREFIX}{name}.lora_{one}.weight")
            if found is None or found.shape != shape or found.dtype not in DTYPES:
                what = "absent" if found is None else f"{found.dtype} of shape {list(found.shape)}"
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {key} is {what}; with rank {rank:g} this model asks for floats of shape "
                    f"{list(shape)}: the adapter belongs to another model, or is damaged"
                )
            check_finite(key, stored.read(key), found.file)
            factors.append(stored.read(key).float().to(model.device))
        for ours, piece in places[name]:
            b = TensorSlice(piece.name, piece.rows).of(factors[1]).contiguous()
            a, cut = factors[0], model.share.cut(f"{ours}.weight") if isinstance(model, ShardedTransformer) else None
            if cut is not None:  # the rows of B are the layer's outputs, the columns of A its inputs
                a, b = (cut.of(a), b) if cut.dim else (a, cut.of(b))
            adapter[ours] = Factors(a, b, alpha, bool(config.get("use_rslora")))
    if not adapter:
        raise CheckpointError(f"{folder / WEIGHTS} holds no tensors")
    return adapter


def save_adapter(
    folder: Path, adapter: Adapter, config: ModelConfig, *, base: str | None = None, dropout: float = 0.0
) -> None:
    """Write an adapter as peft does, so that peft, and hasten, read it; its factors keep their dtype.

    base: the model's name, which peft shows and loads by itself. Raises CheckpointError where it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    modules: dict[str, Factors] = {}
    places = adaptable(config)
    for name, parts in places.items():
        if own := [adapter[ours] for ours, _ in parts if ours in adapter]:
            assert len(own) == len(parts), "layers that are one in a checkpoint have one adapter"
            modules[name] = own[0]
            pair = own[0].a, join([piece for _, piece in parts], [one.b for one in own])
            for one, factor in zip("AB", pair, strict=True):
                tensors[f"{PREFIX}{name}.lora_{one}.weight"] = factor.detach().cpu().contiguous()
    ranks = {name: own.a.shape[0] for name, own in modules.items()}
    alphas = {name: int(own.alpha) if own.alpha == int(own.alpha) else own.alpha for name, own in modules.items()}
    (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in modules)
    all_of_them = all(name in modules for name in places if name.rpartition(".")[2] in leaves)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": next(iter(modules.values())).rslora,
        "target_modules": list(leaves if all_of_them else modules),
        "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {name: own for name, own in alphas.items() if own != alpha},
        "fan_in_fan_out": FAMILIES[config.family].transposed,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as temporary:
            write_file(tensors, temporary, tensors=tensors.items())
        save_json(folder / CONFIG, values, sort_keys=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from None


def adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a folder, checked but for its patterns. Raises as `load_adapter` does."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder with an adapter ({CONFIG}); that of a run is in runs/NAME/adapter"
        )
    if not (path := folder / CONFIG).exists():
        raise CheckpointError(f"{folder} holds no adapter ({CONFIG}); that of a run is in runs/NAME/adapter")
    config = read_json(path)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder} holds adapter_model.bin, a pickle, which can run code; save it as {WEIGHTS}")
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {config.get('peft_type')!r:.60}; hasten reads LORA adapters")
    if on := [name for name in REFUSED if config.get(name)]:
        raise ConfigError(f"{path}: {on[0]} is {config[on[0]]!r:.60}, which hasten does not support")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias is {config['bias']!r:.60}; only adapters without biases are supported")
    if (start := config.get("init_lora_weights", True)) not in INITIALISATIONS:
        raise ConfigError(
            f"{path}: init_lora_weights is {start!r:.60}, which changes the base model's weights; save the adapter for "
            "the original ones (peft: path_initial_model_for_weight_conversion)"
        )
    return config


def _number(config: Mapping[str, Any], kind: str, field: str, module: str) -> float:
    """A module's rank or alpha: that of the first pattern that it ends with, else of all."""
    value, where = config.get(field, 8), field
    patterns = config.get(f"{kind}_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{CONFIG}: {kind}_pattern is {patterns!r:.60}; it must be an object")
    for pattern, own in patterns.items():
        literal = pattern.replace("\\.", ".")
        if not re.fullmatch(r"\^?[\w.-]+", literal):  # peft takes any regular expression, for hours if it is a bad one
            raise ConfigError(f"{CONFIG}: {kind}_pattern has {pattern!r:.80}; hasten knows names, and ends of names")
        if module == literal.removeprefix("^") or (literal[0] != "^" and module.endswith(f".{literal}")):
            value, where = own, f"{kind}_pattern[{pattern!r:.80}]"
            break
    finite = type(value) in (int, float) and abs(value) <= sys.float_info.max  # isfinite fails for a huge int
    fits = finite and (kind == "alpha" or 1 <= value <= LARGEST_RANK)
    if not fits or (kind == "rank" and value != int(value)):
        most = f"a whole number from 1 to {LARGEST_RANK}" if kind == "rank" else "a number"
        raise ConfigError(f"{CONFIG}: {where} is {value!r:.60}; it must be {most}")
    return float(value)
