"""Writing a model as a Hugging Face folder that transformers, and hasten, load again."""

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from torch import Tensor

from hasten.checkpoints.advice import export_plain
from hasten.checkpoints.checkpoint import DTYPES
from hasten.checkpoints.formats.registry import writer
from hasten.checkpoints.formats.stream import write_file as save_file
from hasten.checkpoints.multi_token import stored_head
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.machine.files import locked, save_json
from hasten.model.binding import kernels
from hasten.model.experts import kept_dtype
from hasten.model.families import FAMILIES
from hasten.model.families.family import Family
from hasten.model.families.slices import TensorSlice, join
from hasten.model.layer_format import LayerFormat, as_stored, is_w8a8, of_integers, written_activations
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer, require_model
from hasten.ops.attention.pattern_text import pattern_values
from hasten.ops.linear import PackedEmbedding, PackedLinear, QuantizedWeight, empty_weight

SHARD_BYTES = 4_000_000_000  # large checkpoints are written in files of about this size
QUANTIZATION_FIELDS = ("quantization_config", "compression_config", "hasten")


@dataclass(frozen=True, slots=True)
class Quantized:
    """The layers that are written quantized, and where the numbers of each come from, by the names of our modules.

    changed: gives what is written in the place of one of the model's other tensors; None where that stays.
    """

    layers: Mapping[str, LayerFormat]
    weight: Callable[[str], QuantizedWeight]
    changed: Callable[[str], Tensor | None] = lambda ours: None


def export_model(
    model: Transformer,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    quantized: Quantized | None = None,
    dequantize: bool = False,
    format: str = "compressed-tensors",
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write config.json, safetensors, tokenizer and generation_config.json.

    The padding of the vocabulary is taken off. Tied weights of which only one was changed are written apart, and the
    config says so. A multi-token head in the folder that the model was loaded from is written as it is there, unless it
    is quantized. dtype converts on the way. Weights past `shard_bytes` are split into files of at most that size
    (a single larger tensor has a file of its own); one tensor at a time is prepared in memory.

    Quantized layers are written in the layout `format` ("compressed-tensors" or "gptq": `hasten.checkpoints.formats`),
    whatever their kernels hold; a HastenWarning says where others will not be able to read them. `quantized` quantizes
    on the way: layers that are plain in `model` are written with the numbers it gives for them. dequantize: write the
    plain weights that quantized layers represent instead, which every program reads. read: gives the values of
    parameters, by name, of a model that is on the meta device.

    Everything is first written into the folder's own `.saving`, which one process holds, and then moved into place: a
    disk that fills up leaves the old files as they were. While files are moved the folder has no config.json, so that
    old and new together are never taken for a model, whatever ends the process. Saving over the folder that the model
    is mapped from is fine. Raises CheckpointError where it cannot be written, ConfigError where another process writes
    there, for a dtype that cannot be, and for weights that the layout does not hold exactly.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(f"dtype {dtype} cannot be written; use one of {', '.join(map(str, DTYPES.values()))}")
    quantized = quantized or (None if dequantize else held_layers(model))
    if model.config.attention_pattern is not None:
        text = f"hasten runs {folder} with its attention pattern; transformers does not know it and attends to all"
        warnings.warn(text, HastenWarning, stacklevel=3)
    made = not folder.exists()
    try:
        with _staging(folder) as staging:
            plan = _Plan(model, dtype, quantized, format, read)
            weights = _write_weights(plan, staging, shard_bytes)
            if model.tokenizer is not None:
                model.tokenizer.save(staging)
            if model.generation:
                save_json(staging / "generation_config.json", model.generation, sort_keys=True)
            save_json(staging / "config.json", plan.config(dtype or model.dtype), sort_keys=True)
            _move(staging, folder, weights)
    except Timeout:
        raise ConfigError(f"another process writes into {folder}; wait until it has ended, or choose another") from None
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{folder} cannot be written: {reason}; choose one with room and write access") from None
    finally:
        if made:  # and empty, where nothing was moved into it: rmdir takes no other
            with suppress(OSError):
                folder.rmdir()


def save(model: Transformer, folder: str | Path, *, dequantize: bool = False) -> None:
    """Write a Hugging Face folder that transformers loads; see `hasten.checkpoints.export.export_model`.

    dequantize: quantized layers are written as plain weights, in the model's dtype. A fused model is taken apart for
    the while, because files hold readable layers. Raises ConfigError for what is no model or no path.
    """
    require_model(model, "hasten.save")
    if not isinstance(folder, str | Path):
        raise ConfigError(f"a model is saved into a folder; found {type(folder).__name__}")
    if model.adapters is not None:
        raise ConfigError("this model has adapters beside its weights; hasten.merge writes their sum")
    if isinstance(model, ShardedTransformer):
        raise ConfigError("this rank holds a share of the model; save it from a process that has all of it")
    with kernels(model, block="readable"):
        export_model(model, Path(folder), dequantize=dequantize)


def check_layers(model: Transformer, layers: Mapping[str, LayerFormat], format: str) -> None:
    """ConfigError where the layout `format` does not hold the model's layers in these formats."""
    if format == "gptq" and ("embedding" in layers or (model.tied and "head" in layers)):
        instead = "leave the tied matrix as it is (--lm-head none)" if model.tied else "leave it out (--embedding none)"
        raise ConfigError(f"GPTQ's layout holds no quantized embedding: {instead}")
    try:
        writer(format).check(layers)
    except ConfigError as error:
        raise ConfigError(f"{error}; {export_plain(model.origin)} writes plain weights") from None
    fused: dict[str, list[str]] = {}
    for ours, piece in _family(model, layers).places(model.config):
        if piece.expert is not None and ours.removesuffix(".weight") in layers:
            raise ConfigError(
                f"a {model.config.family} folder has a layer's experts in one tensor ({piece.name}), their biases in "
                "another, which no layout holds quantized; quantize the model where it is used (--quantize int8), or "
                f"keep it plain: {export_plain(model.origin)}"
            )
        if ours.endswith(".weight"):
            fused.setdefault(piece.name, []).append(ours.removesuffix(".weight"))
    for name, parts in fused.items():
        if len({layers.get(part) for part in parts}) > 1 and not {"embedding", "head"} & set(parts):
            raise ConfigError(f"{', '.join(parts)} are one tensor in the file ({name}) and need one format")


def _family(model: Transformer, layers: Mapping[str, LayerFormat]) -> Family:
    """The family, as a folder is written in which these layers are quantized: experts are then modules of their own, as
    llm-compressor writes them, where plain ones are stacked.
    """
    family = FAMILIES[model.config.family]
    apart = family.stacks is not None and not model.config.mlp_bias and any(".experts." in name for name in layers)
    return replace(family, stacks=None) if apart else family


def exported_config(model: Transformer, dtype: torch.dtype, *, tied: bool) -> dict[str, Any]:
    """The config.json of a model: the one it came from, with what has changed since, and without quantization."""
    family = FAMILIES[model.config.family]
    values = dict(model.config.source) | {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": model.config.vocab_size,
        "tie_word_embeddings": tied,
        "dtype": str(dtype).removeprefix("torch."),
    }
    for gone in ("torch_dtype", "_name_or_path", "_attn_implementation_autoset", *QUANTIZATION_FIELDS):
        values.pop(gone, None)
    if model.config.attention_pattern is not None:
        values["hasten"] = {"attention_pattern": pattern_values(model.config.attention_pattern)}
    return values


def held_layers(model: Transformer) -> Quantized | None:
    """The layers that the model itself holds quantized; None, with a HastenWarning, where a folder holds not all."""
    if model.quantization is None:
        return None
    held: Any = model
    layers = {name: layer for name, layer in model.quantization.items() if of_integers(layer.weight)}
    if others := [name for name in model.quantization if name not in layers]:
        format = model.quantization[others[0]].weight
        text = f"{len(others)} layers like {others[0]} are quantized in a way that no folder holds ({format})"
        warnings.warn(f"{text}: all are written as plain weights", HastenWarning, stacklevel=4)
        return None
    return Quantized(layers, lambda name: as_stored(held.get_submodule(name).to_weight(), layers[name].weight))


class _Plan:
    """What will be written, by its name in the checkpoint: of which of our parameters each tensor or quantized module
    is made. `make` then makes one at a time.
    """

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype | None,
        quantized: Quantized | None,
        format: str,
        read: Callable[[str], Tensor] | None,
    ) -> None:
        self.model, self.dtype, self.quantized, self.read = model, dtype, quantized, read
        self.layers = {} if quantized is None else quantized.layers
        self.tied = model.tied
        self.embedding = self.layers.get(self._owner("embedding.weight"))
        check_layers(model, self.layers, format)
        # others read plain int8 only as W8A8, of no experts and no embedding
        plain = is_w8a8(self.layers.values()) and not model.config.experts and self.embedding is None
        self.format = writer(format, pack_int8=not plain)
        family = _family(model, self.layers)
        self.split = family != FAMILIES[model.config.family]
        self.constants = family.constants(model.config)
        self.multi_token = stored_head(model)  # which drafts for it: as it is in the model's own folder
        self.parts: dict[str, list[tuple[TensorSlice, str]]] = {}
        self.places = dict(family.places(model.config))
        for ours, piece in self.places.items():
            if not (ours == "head.weight" and self.tied):
                self.parts.setdefault(piece.name, []).append((piece, ours))

    def layer(self, name: str) -> LayerFormat | None:
        """How it is quantized."""
        ours = self.parts[name][0][1]
        layer = self.layers.get(self._owner(ours))
        return layer if layer is None or ours != "embedding.weight" else replace(layer, activations="none")

    def _owner(self, ours: str) -> str:
        """The layer that holds a weight; of a tied embedding, the head."""
        return "head" if self.tied and ours == "embedding.weight" else ours.removesuffix(".weight")

    def make(self, name: str, device: str = "cpu") -> dict[str, Tensor]:
        """Contiguous tensors by their names in the checkpoint, fused ones put together again.

        On the meta device only their dtypes and shapes, at no cost.
        """
        if name in self.constants:
            return {name: torch.tensor(self.constants[name], dtype=self.dtype or self.model.dtype, device=device)}
        if name in self.multi_token:
            stored = self.multi_token[name]
            kept = self.dtype or DTYPES[stored.dtype]
            if device == "meta":
                return {name: torch.empty(stored.shape, dtype=kept, device=device)}
            return {name: self.multi_token.read(name).to(kept).contiguous()}
        pieces, layer = [piece for piece, _ in self.parts[name]], self.layer(name)
        if layer is None:
            tensor = join(pieces, [self._tensor(ours, device) for _, ours in self.parts[name]])
            tensor = tensor.mT if pieces[0].transposed else tensor
            return {name: tensor.to(kept_dtype(self.parts[name][0][1], self.dtype)).contiguous()}
        weights = [self._weight(ours, layer, device) for _, ours in self.parts[name]]
        try:
            encoded = self.format.encode(QuantizedWeight.joined(weights, partial(join, pieces)))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        prefix = name.removesuffix("weight")
        return {prefix + key: tensor.to(device).contiguous() for key, tensor in encoded.items()}

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """config.json, with what is quantized; warns where another reader cannot follow."""
        values = exported_config(self.model, dtype, tied=self.tied)
        layers = {name.removesuffix(".weight"): layer for name in self.parts if (layer := self.layer(name))}
        if not layers:
            return values
        owners = {name.removesuffix(".weight"): parts[0][1] for name, parts in self.parts.items()}
        ignored = [name for name, ours in owners.items() if name not in layers and self._is_linear(ours)]
        ignored += [] if "head" in self.layers else ["lm_head"]
        ignored += [name.removesuffix(".weight") for name, stored in self.multi_token.items() if len(stored.shape) == 2]
        if self.format.method == "compressed-tensors":
            self._warn(layers)
        if self.tied and "head" in self.layers:  # readers look for both modules, of which the file holds one
            embedding, head = (self.places[f"{one}.weight"].name for one in ("embedding", "head"))
            layers[head.removesuffix(".weight")] = layers[embedding.removesuffix(".weight")]
        written = self.format.write_config(layers, ignored)
        # How products treat their activations, where the layout speaks of weights alone.
        said = {} if is_w8a8(layers.values()) else written_activations(self.layers.values())
        private = values.get("hasten", {}) | said
        return values | written | ({"hasten": private} if private else {})

    def _warn(self, layers: Mapping[str, LayerFormat]) -> None:
        """Say once what keeps transformers with compressed-tensors from reading what is written."""
        for name, layer in layers.items():
            piece, ours = self.parts[f"{name}.weight"][0]
            k, size = self._size(ours)[1], layer.weight.group_size
            reason = None
            if piece.transposed:
                reason = f"{name}.weight is no Linear there but a Conv1D, which compressed-tensors does not know"
            elif layer.weight.permuted:
                reason = f"{name}.weight has its columns in the order of activation, which it no longer reads"
            elif self.split:
                reason = "it has a layer's experts in one tensor, and reads none that are modules of their own"
            elif size and k % size:
                reason = f"{name}.weight has {k} input features, no multiple of the group size {size}"
            elif not layer.weight.symmetric and self.model.config.experts:
                reason = "it does not read the zero points of experts (use symmetric)"
            elif not layer.weight.symmetric and len(set(layers.values())) > 1:
                reason = "it reads zero points only where all layers are quantized alike (lm_head: same or none)"
            elif self.embedding is not None:
                reason = (
                    "it reads quantized embeddings only with dequantize=True and all layers quantized alike "
                    f"({'lm_head: none leaves the tied matrix as it is' if self.tied else 'embedding: none'}; "
                    f"{export_plain(self.model.origin)} writes plain weights)"
                )
            if reason is not None:
                text = f"hasten reads this quantized model; transformers does not: {reason}"
                warnings.warn(text, HastenWarning, stacklevel=4)
                return

    def _is_linear(self, ours: str) -> bool:
        """Whether it is the weight of a linear layer, not of the head."""
        owner, _, leaf = ours.rpartition(".")
        module = self.model.get_submodule(owner)
        return leaf == "weight" and owner != "head" and isinstance(module, torch.nn.Linear | PackedLinear)

    def _tensor(self, ours: str, device: str) -> Tensor:
        if self.quantized is not None and (changed := self.quantized.changed(ours)) is not None:
            return changed.to(device)
        owner, _, leaf = ours.rpartition(".")
        module = self.model.get_submodule(owner)
        module = module.table if isinstance(module, PackedEmbedding) else module
        if isinstance(module, PackedLinear) and leaf == "weight":
            tensor = module.dequantize(self.model.dtype)
        else:
            tensor = getattr(module, leaf).detach()  # a packed layer's bias is a buffer
        if tensor.is_meta and device != "meta" and self.read is not None:
            tensor = self.read(ours)
        tensor = tensor[: self.model.config.vocab_size] if owner in ("embedding", "head") else tensor
        return tensor.to(device)

    def _weight(self, ours: str, layer: LayerFormat, device: str) -> QuantizedWeight:
        assert self.quantized is not None
        if device == "meta":
            weight = empty_weight(self._size(ours), layer.weight, torch.device(device))
        else:
            weight = self.quantized.weight(self._owner(ours)).map(lambda tensor: tensor.to(device))
        in_vocabulary = ours in ("embedding.weight", "head.weight")
        return weight.rows(slice(self.model.config.vocab_size)) if in_vocabulary else weight

    def _size(self, ours: str) -> tuple[int, int]:
        if ours == "embedding.weight":
            return self.model.config.padded_vocab_size, self.model.config.hidden_size
        linear: Any = self.model.get_submodule(ours.removesuffix(".weight"))
        return linear.out_features, linear.in_features


def _write_weights(plan: _Plan, folder: Path, shard_bytes: int) -> set[str]:
    """Write the weights and return the names of their files."""
    import huggingface_hub

    specs = {name: plan.make(name, "meta") for name in (*plan.parts, *plan.constants, *plan.multi_token)}
    split = huggingface_hub.split_state_dict_into_shards_factory(
        specs,
        get_storage_size=lambda tensors: sum(tensor.nbytes for tensor in tensors.values()),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    files = set(split.filename_to_tensors)
    weight_map: dict[str, str] = {}
    for file, shard in split.filename_to_tensors.items():
        own = {key: spec for name in shard for key, spec in specs[name].items()}
        save_file(own, folder / file, tensors=(made for name in shard for made in plan.make(name).items()))
        weight_map |= dict.fromkeys(own, file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": weight_map}
        save_json(folder / "model.safetensors.index.json", index, sort_keys=True)
        files.add("model.safetensors.index.json")
    return files


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """An empty folder inside this one, for one process; what one that was killed left in it is removed."""
    staging = folder / ".saving"
    with locked(staging / "lock", waiting=None):
        try:
            shutil.rmtree(staging / "new", ignore_errors=True)
            (staging / "new").mkdir()
            yield staging / "new"
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, folder: Path, weights: set[str]) -> None:
    """Rename every file into place, the config last; weights that the new ones replace go before."""
    files = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    for name in files:
        if (folder / name).is_dir():  # found before the first is moved: none is then
            raise IsADirectoryError(errno.EISDIR, f"{name} is a folder there")
    (folder / "config.json").unlink(missing_ok=True)
    for stale in [*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"]:
        if stale.name not in weights:
            stale.unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: (str(name) == "config.json", name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, folder / name)
