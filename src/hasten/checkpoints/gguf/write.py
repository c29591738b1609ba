"""Writing a model as a GGUF file that llama.cpp loads, one tensor at a time in memory; it takes the package gguf."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hasten.checkpoints.advice import export_gguf, export_plain, plain_folder
from hasten.checkpoints.checkpoint import check_finite
from hasten.checkpoints.formats.file_format import BLOCK_ELEMENTS
from hasten.checkpoints.gguf.architectures import ARCHITECTURES, OF_FAMILY, architecture_of
from hasten.checkpoints.gguf.config import LAYER_NORM, RMS_NORM, config_values
from hasten.checkpoints.gguf.encode import ENCODERS, encode
from hasten.checkpoints.gguf.header import GGUFFile, GGUFTensor, shortest
from hasten.checkpoints.gguf.names import FIELDS, FREQUENCIES, LISTED, LONG_ROPE, Place, place_of, places_by_head
from hasten.checkpoints.gguf.sampling import sampling_entries
from hasten.checkpoints.gguf.tokenizer import tokenizer_entries
from hasten.checkpoints.gguf.types import TYPES
from hasten.errors import CheckpointError, ConfigError, HastenWarning, ResourceError
from hasten.machine.files import replacing
from hasten.model.activations import XIELU
from hasten.model.binding import kernels
from hasten.model.config import ModelConfig, RopeConfig
from hasten.model.families import read_config
from hasten.model.families.family import parameter_names
from hasten.model.layer_format import LayerFormat
from hasten.model.rope import frequencies
from hasten.model.transformer import Transformer, require_model
from hasten.ops.linear import INT8, PackedEmbedding, PackedLinear, QuantizedWeight, WeightFormat

Kind = Literal["BF16", "F16", "Q8_0", "Q4_0"]
# `general.file_type`, which says what most of it is; of the k-quants the number of the usual mixture (M).
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15}
_FILE_TYPES |= {"Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "MXFP4": 38}
_OF_FORMAT = {TYPES[name].format: name for name in ENCODERS}
_ROUNDED = 5e-4  # by how much float16 may change the scale of a row in int8: half a unit in its last place
IN_FLOAT32 = ("router", "shared_gate", "mixer.conv")  # which llama.cpp never quantizes
_FREE = ("family", "initializer_range", "source")  # of a ModelConfig, what a GGUF file need not say


class Item(NamedTuple):
    """A tensor to be written: name, type and shape (outermost first) in the file, and what makes its bytes."""

    tensor: GGUFTensor
    make: Callable[[], np.ndarray]


def write_gguf(model: Transformer, path: str | Path, kind: Kind | None = None) -> str:
    """Write a GGUF file with the model's tokenizer, whole or not at all; returns the type that most of it has.

    kind: of the plain matrices; by default F16 of those in float16, and BF16 of others. Norms and biases are F32. In a
    Q4_0 file the head (or the embedding, if they are one matrix) is Q8_0, and rows that 32 does not divide are F16.
    Layers that are quantized already keep their numbers: those of a GGUF file in the blocks that they came from
    (`encode.ENCODERS` lists the types), int4 as Q4_0; int8 as Q8_0, where a scale for each row is rounded to float16,
    with a warning.

    Raises ConfigError for a model that a GGUF file cannot state, or whose quantized weights no type of GGUF holds;
    CheckpointError where the file cannot be written; ResourceError without the package gguf.
    """
    require_model(model, "write_gguf")
    target = Path(path)
    with kernels(model, block="readable"):
        items, entries = _contents(model, kind, target)
        from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

        sizes = {name: sum(prod(t.shape) for t, _ in items if t.type.name == name) for name in _FILE_TYPES}
        most = max(sizes, key=lambda name: sizes[name])
        entries |= {"general.file_type": _FILE_TYPES[most]}
        try:
            with replacing(target) as temporary:
                writer = GGUFWriter(temporary, entries["general.architecture"])
                for key, value in entries.items():
                    number = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
                    if key != "general.architecture":  # which the writer has put there
                        writer.add_key_value(key, value, number)
                for tensor, _ in items:
                    size = (*tensor.shape[:-1], tensor.row_bytes)
                    stored = GGMLQuantizationType[tensor.type.name]
                    writer.add_tensor_info(tensor.name, size, np.dtype(np.uint8), tensor.bytes, stored)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                for _, make in items:
                    writer.write_tensor_data(make())
                writer.close()
        except OSError as error:
            why = error.strerror or f"the disk may be full ({error})"  # numpy says how many items were written
            raise CheckpointError(f"{target} cannot be written: {why}") from None
    return most


def check_gguf(model: Transformer, layers: Mapping[str, LayerFormat], path: Path) -> None:
    """Raise, before any work, what `write_gguf` would for the plain model once its layers have these formats."""
    _contents(model, None, path)
    for name, layer in layers.items():
        module: Any = model.get_submodule(name)
        place = place_of(f"{name}.weight", model.config)
        size = module.weight.shape[1]
        _type_of(f"{name}.weight", place, layer.weight, size, packed=False, ordered=False, origin=model.origin)


def has_plain_matrices(model: Transformer) -> bool:
    """Whether `kind` has an effect: some matrix is not quantized. (Routers are F32 in any file.)"""
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Embedding)]
    return any(not name.endswith(IN_FLOAT32) for name, _ in layers)


def _contents(model: Transformer, kind: Kind | None, target: Path) -> tuple[list[Item], dict[str, Any]]:
    """The file's tensors, and its metadata but for `general.file_type`."""
    try:
        from gguf import GGUFWriter  # noqa: F401
    except ImportError:
        raise ResourceError("writing GGUF takes the package gguf: pip install 'hasten[gguf]'") from None
    if kind is not None and kind not in get_args(Kind):
        raise ConfigError(f"kind is {kind!r}; use one of {', '.join(get_args(Kind))}")
    if model.config.family not in OF_FAMILY:
        raise ConfigError(f"GGUF files of {', '.join(OF_FAMILY)} are written; found {model.config.family}")
    items = _items(model, kind)
    entries = config_entries(model.config, items, target) | {"general.quantization_version": 2} | _listed(model)
    entries |= sampling_entries(model.generation or {})
    return items, entries | tokenizer_entries(model.tokenizer, model.config.vocab_size)


def config_entries(config: ModelConfig, items: list[Item], target: Path) -> dict[str, Any]:
    """The metadata of a config. ConfigError where they, read back, are another one: llama.cpp would compute that."""
    name, rope = architecture_of(config), config.ropes[-1] if config.ropes else None
    own: dict[str, Any] = {key: getattr(config, field) for key, (_, field) in FIELDS.items() if field}
    own = {key: value for key, value in own.items() if value or not key.startswith("expert")}
    own |= {"block_count": len(config.layers), "vocab_size": config.vocab_size}
    own |= {"attention.value_length": config.head_dim} | _rope_entries(rope)
    if ARCHITECTURES[name].layer_norm is not None:
        own[LAYER_NORM] = own.pop(RMS_NORM)
    own |= ARCHITECTURES[name].write(config)
    entries = {f"{name}.{key}": value for key, value in own.items() if value is not None}
    entries["general.architecture"] = name
    tensors = {tensor.name: tensor for tensor, _ in items}
    factors = torch.cat([torch.empty(0), *_factors(rope).values()])
    read = read_config(config_values(GGUFFile(target, entries, tensors, (factors.view(torch.uint8),))))
    if rope is not None and rope.scaling == "longrope":  # whose numbers a file has in float32
        single: dict[str, Any] = {"attention_factor": shortest(rope.attention_factor)}
        single |= {name: tuple(map(shortest, getattr(rope, name))) for name in ("short_factor", "long_factor")}
        config = replace(config, ropes=(*config.ropes[:-1], replace(rope, **single)))
    changed = [f.name for f in fields(read) if f.name not in _FREE and getattr(read, f.name) != getattr(config, f.name)]
    if changed:
        raise ConfigError(
            f"a GGUF file cannot state {', '.join(changed)} of this {config.family}: llama.cpp would compute another "
            "model; write a folder instead (hasten export)"
        )
    if (why := ARCHITECTURES[name].why_not_loaded(config)) is not None:
        raise ConfigError(f"llama.cpp loads no {name} with {why}; write a folder instead (hasten export)")
    return entries


def _rope_entries(rope: RopeConfig | None) -> dict[str, Any]:
    """The metadata of a rotary table."""
    if rope is None:
        return {}
    own: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    if rope.scaling in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling in ("yarn", "longrope"):
        own |= {"rope.scaling.original_context_length": rope.original_positions}
    if rope.scaling == "yarn":
        own |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    if rope.scaling == "longrope":
        own |= {"rope.scaling.attn_factor": shortest(rope.attention_factor)}
    return own


def _factors(rope: RopeConfig | None) -> dict[str, Tensor]:
    """By what each rotary frequency is divided, float32 (dim / 2,), by the names of such tensors."""
    if rope is None:
        return {}
    if rope.scaling == "llama3":
        return {FREQUENCIES: frequencies(RopeConfig(theta=rope.theta, dim=rope.dim)) / frequencies(rope)}
    if rope.scaling == "longrope":
        return dict(zip(LONG_ROPE, map(torch.tensor, (rope.short_factor, rope.long_factor)), strict=True))
    if rope.scaling == "proportional":
        return {FREQUENCIES: torch.tensor([rope.factor] * rope.turned + [1e30] * (rope.dim // 2 - rope.turned))}
    return {}


def _items(model: Transformer, kind: Kind | None) -> list[Item]:
    """The tensors to write. ConfigError for integers that no type holds.

    A tied head is one matrix with the embedding; experts are one stack, and Phi-3's q, k and v one matrix.
    """
    config, tied = model.config, model.tied
    factors, begin = [], 0
    for name, tensor in _factors(config.ropes[-1] if config.ropes else None).items():
        factors.append(Item(GGUFTensor(name, TYPES["F32"], tuple(tensor.shape), begin), tensor.numpy))
        begin += tensor.nbytes
    parts: dict[str, list[Item]] = {}
    stacks: dict[str, int] = {}  # matrices of an expert in a stack's
    groups: dict[str, int] = {}
    rounded, lost = [], []
    shape: tuple[int, ...]
    for ours, place in _places(config, tied=tied):
        owner, _, leaf = ours.rpartition(".")
        module: Any = model.get_submodule(owner)
        module = module.table if isinstance(module, PackedEmbedding) else module
        rows: Any = slice(config.vocab_size if owner in ("embedding", "head") else None)
        if isinstance(module, PackedLinear) and leaf == "weight":
            shape, size = (module.out_features, module.in_features), module.in_features
            given: dict[str, Any] = {"packed": True, "ordered": module.order is not None, "origin": model.origin}
            type_name = _type_of(ours, place, module.format, size, **given)
            rounded += [ours] * (module.format == INT8)
            rows = rows if place.order is None else place.order
            make = partial(_blocks, module, rows, place, type_name, ours=ours, origin=model.origin)
        else:
            tensor = getattr(module, leaf).detach()
            plain = tensor.dim() == 1 or owner.endswith(IN_FLOAT32)
            own = kind or ("F16" if tensor.dtype == torch.float16 else "BF16")
            shape, type_name = tuple(tensor.shape), "F32" if plain else own
            shape = shape if place.by_head is None else place.by_head.shape(shape[1])
            if kind == "Q4_0" and owner == ("embedding" if tied else "head"):
                type_name = "Q8_0"
            if shape[-1] % TYPES[type_name].elements:
                type_name = "F16"
            stored = model.stored_types.get("head" if tied and owner == "embedding" else owner)
            if stored is not None and leaf == "weight":
                lost.append(f"{ours} ({stored}, now {type_name})")
            make = partial(_encoded, tensor, rows, place, type_name)
        shape = (config.vocab_size, *shape[1:]) if owner in ("embedding", "head") else shape
        shape = shape[1:] if place.one_row and len(shape) > 1 else shape
        shape = (shape[0], shape[2]) if place.depthwise else shape
        shape = (shape[0] // place.width, place.width) if place.width else shape
        stacks |= {place.name: 1 if place.half is None else 2} if place.expert is not None else {}
        groups[place.name] = place.groups
        parts.setdefault(place.name, []).append(Item(GGUFTensor(place.name, TYPES[type_name], shape), make))
    if rounded:
        warnings.warn(
            f"{len(rounded)} int8 layers become Q8_0, such as {rounded[0]}: their integers stay, and the scale of each "
            "row is rounded to float16, by at most 0.05%",
            HastenWarning,
            stacklevel=4,
        )
    if lost:
        warnings.warn(
            f"{len(lost)} matrices have types that hasten reads but does not write, and are written plain, such as "
            f"{lost[0]}",
            HastenWarning,
            stacklevel=4,
        )
    return factors + [_joined(own, stack=stacks.get(name, 0), groups=groups[name]) for name, own in parts.items()]


def _places(config: ModelConfig, *, tied: bool) -> Iterator[tuple[str, Place]]:
    """Yield every parameter that is a tensor in a file, or a part of one, and its place; some are in two."""
    for ours in parameter_names(config):
        for place in places_by_head(ours, config) or [place_of(ours, config)]:
            if place.layer is None and not (tied and ours == "head.weight"):
                yield ours, place


def _listed(model: Transformer) -> dict[str, list[float]]:
    """Metadata with a number of each layer: those that a layer learns, and those that llama.cpp wants beside them."""
    if model.config.activation != "xielu":
        return {}
    layers = range(len(model.config.layers))
    found = {"xielu.beta": [XIELU.BETA for _ in layers], "xielu.eps": [XIELU.EPS for _ in layers]}
    for ours, name in LISTED.items():
        found[name] = [model.get_parameter(f"blocks.{i}.{ours}").item() for i in layers]
    return found


def _joined(parts: list[Item], *, stack: int, groups: int = 1) -> Item:
    """One tensor of several, their rows after each other, or in turn in each of several groups of rows.

    stack: how many follow each other in each matrix of a first dimension; 0: there is no such dimension.
    """
    if len(parts) == 1 and not stack:
        return parts[0]
    first = parts[0].tensor
    if len({part.tensor.type for part in parts}) > 1:
        raise ConfigError(f"{first.name} is one tensor in a GGUF file, and here its parts are quantized differently")
    stacked = (len(parts) // max(1, stack), stack * first.shape[0], *first.shape[1:])
    shape = stacked if stack else (sum(p.tensor.shape[0] for p in parts), *first.shape[1:])
    if groups == 1:
        return Item(replace(first, shape=shape), lambda: np.concatenate([part.make() for part in parts]))

    def in_turn() -> np.ndarray:
        rows = [part.make() for part in parts]
        return np.concatenate([own.reshape(groups, -1, own.shape[-1]) for own in rows], 1).reshape(
            -1, rows[0].shape[-1]
        )

    return Item(replace(first, shape=shape), in_turn)


def _type_of(
    ours: str, place: Place, stored: WeightFormat, in_features: int, *, packed: bool, ordered: bool, origin: str | None
) -> str:
    """The type whose blocks hold a quantized layer's numbers. packed: it is quantized already."""
    plain = f"write its plain weights ({export_plain(origin)}), then those as a file"
    if ordered:
        raise ConfigError(f"{ours}: its columns are in the order of activation, which GGUF cannot state: {plain}")
    if in_features % 32:
        type_name = "Q8_0" if stored.element == "int8" else "Q4_0"
        export = export_gguf(origin, type_name)
        if packed:
            export = f"{export_plain(origin)}, then {export_gguf(origin and plain_folder(origin), type_name)}"
        raise ConfigError(
            f"{ours} has rows of {in_features} weights, which the blocks of {type_name}, of 32, do not divide: take "
            f"{export}, which writes such rows in float16"
        )
    name = _OF_FORMAT.get(stored)
    if name is None or in_features % TYPES[name].elements:
        uneven = stored.group_size % 32 or not stored.symmetric or len(stored.scales) > 1
        name = None if uneven else {"int4": "Q4_0", "int8": "Q8_0"}.get(stored.element)
    if name is not None and not place.whole_blocks(TYPES[name].elements):
        raise ConfigError(f"{ours}: llama.cpp has its columns in another order, which {name} does not hold: {plain}")
    if name is not None:
        return name
    raise ConfigError(
        f"{ours} is quantized in {stored}, which hasten writes as no type of GGUF: write its plain weights "
        f"({export_plain(origin)}), then those as a file, or quantize them with --scheme int4 --group-size 32 "
        "--symmetric"
    )


def _blocks(
    module: PackedLinear, rows: Any, place: Place, type_name: str, *, ours: str, origin: str | None
) -> np.ndarray:
    """The blocks of a quantized layer, uint8 (N, bytes of a row)."""
    weight = module.to_weight().rows(rows)
    if weight.format != TYPES[type_name].format:  # wider groups, or scales of another dtype
        weight = _in_groups_of_32(weight, ours, origin)
    return place.in_blocks(encode(type_name, weight), elements=TYPES[type_name].elements).numpy()


def _in_groups_of_32(weight: QuantizedWeight, ours: str, origin: str | None) -> QuantizedWeight:
    """The same integers, with a float16 scale for each 32. ConfigError for scales that float16 does not hold."""
    k = weight.shape[1]
    scales = weight.scales.repeat_interleave((weight.format.group_size or k) // 32, 1)[:, : k // 32]
    half = scales.half()
    off = (half.float() - scales.float()).abs()
    if (off > (scales.abs() * _ROUNDED if weight.format == INT8 else 0)).any():
        raise ConfigError(
            f"{ours} has scales that float16 does not hold, as in GGUF: write its plain weights "
            f"({export_plain(origin)}), then those as a file, or quantize the original with --format gguf"
        )
    return replace(weight, scales=half)


def _encoded(tensor: Tensor, rows: slice, place: Place, type_name: str) -> np.ndarray:
    """A plain tensor as a type holds it, quantized as llama.cpp does: uint8 (…, bytes of a row)."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    dtype = TYPES[type_name].dtype
    if dtype is not None:
        plain = place.in_file(tensor[rows]).to(dtype)
        check_finite(f"a weight in {type_name}", plain, Path("the model"))
        return plain.contiguous().view(torch.uint8).numpy()
    check_finite(f"a weight for {type_name}", tensor, Path("the model"))
    parts = place.in_file(tensor[rows]).split(max(1, BLOCK_ELEMENTS // tensor.shape[-1]))
    return np.concatenate([quantize(part.float().numpy(), GGMLQuantizationType[type_name]) for part in parts])
