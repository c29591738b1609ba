"""A GGUF file as a checkpoint: its tensors under the names that Hugging Face gives them, in its order of rows."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoints.checkpoint import StoredTensor, StoredTensors, check_finite
from hasten.checkpoints.formats.file_format import QuantizedFolder, QuantizedModule
from hasten.checkpoints.gguf.config import config_values
from hasten.checkpoints.gguf.grids import table
from hasten.checkpoints.gguf.header import GGUFFile, GGUFTensor, read_gguf
from hasten.checkpoints.gguf.names import FREQUENCIES, JOINED, LONG_ROPE, Place, place_of, places_by_head
from hasten.checkpoints.gguf.sampling import recommended_sampling
from hasten.checkpoints.gguf.tokenizer import stored_tokenizer
from hasten.checkpoints.gguf.types import TYPES
from hasten.checkpoints.source import ModelSource
from hasten.errors import CheckpointError
from hasten.model.activations import XIELU
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES, read_config
from hasten.model.families.slices import RowSlice
from hasten.ops.linear import QuantizedWeight
from hasten.ops.linear.blocks import NUMBERS, GgufBlocks

TOKEN_BYTES = 500  # of memory, for each token (SmolLM2 400, Gemma 480)


def open_gguf(path: Path) -> ModelSource:
    """The model of a GGUF file. CheckpointError for what is damaged, hostile, or of an unknown architecture."""
    file = read_gguf(path)
    values = config_values(file)
    tokenizer = stored_tokenizer(file)
    if tokenizer is not None:
        special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids) or None}
        values |= {name: value for name, value in special.items() if value is not None}
    weights = GGUFWeights(file, read_config(values, str(path)))
    return ModelSource(
        path=path,
        config=weights.config,
        stored=weights.logical,
        read=weights.plain,
        quantized=weights if weights.modules else None,
        dtype=weights.dtype(),
        generation={name: values[name] for name in ("bos_token_id", "eos_token_id") if name in values}
        | recommended_sampling(file),
        read_tokenizer=lambda: None if tokenizer is None else tokenizer.build(),
        tokenizer_bytes=0 if tokenizer is None else TOKEN_BYTES * len(tokenizer.kinds),
    )


def _scales_of(weight: str) -> tuple[str, str]:
    """Names of the float32 scales that may accompany an NVFP4 weight: its own and its activations' (not used here)."""
    name = weight.removesuffix(".weight")
    return f"{name}.scale", f"{name}.input_scale"


class GGUFWeights(QuantizedFolder):
    """The plain tensors, and the quantized modules."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        super().__init__(StoredTensors())
        self.file, self.config = file, config
        self.places: dict[str, Place] = {}
        self.numbers: dict[str, float] = {}  # those that are metadata
        self.by_head: dict[str, list[Place]] = {}  # of tensors that are two in the file
        self.joined = any(name.endswith(f".{JOINED}.weight") for name in file.tensors)
        self._check_experts()
        named = {FREQUENCIES, *LONG_ROPE}
        family, parts = FAMILIES[config.family], dict[str, list[Tensor]]()
        self._check_activations()
        for ours, piece in replace(family.in_gguf or family, stacks=None).places(config):
            place, parts_by_head = place_of(ours, config, joined=self.joined), places_by_head(ours, config)
            named |= {part.name for part in parts_by_head}
            if place.layer is not None:
                self._add_number(piece.name, place)
            elif parts_by_head and place.name not in file.tensors:
                self._add_by_head(piece.name, parts_by_head)
            elif place.name in file.tensors:
                if piece.rows is not None and piece.rows.groups == 1:
                    place = _in_whole(place, piece.rows, parts.setdefault(piece.name, []))
                self.places[piece.name] = place
                named |= {place.name, *_scales_of(place.name)}
                self._add(piece.name, plain=bool(parts_by_head))
        for name in file.tensors.keys() - named:  # for the warning that they stay unread
            self.places[name] = Place(name)
            self.logical[name] = StoredTensor(name, "F32", file.tensors[name].shape, file.path)

    def _check_experts(self) -> None:
        """Raise CheckpointError, unless all experts' matrices are one tensor, as their biases are."""
        layers = [i for i, layer in enumerate(self.config.layers) if layer.experts]
        kinds = [("weight", 3, "matrices"), ("bias", 2, "biases")][: 1 + self.config.mlp_bias]
        for i, part, (leaf, sizes, words) in product(layers, ("gate", "up", "down"), kinds):
            name = place_of(f"blocks.{i}.mlp.experts.0.{part}.{leaf}", self.config, joined=self.joined).name
            tensor = self.file.tensors.get(name)
            if tensor is None or len(tensor.shape) != sizes or tensor.shape[0] != self.config.experts:
                found = "none" if tensor is None else list(tensor.shape)
                blk, advice = f"blk.{i}.ffn_", "convert the model again with today's llama.cpp"
                if f"{blk}gate.0.weight" in self.file.tensors:
                    advice += " (before April 2024 each expert was a tensor)"
                else:
                    others = ", ".join(sorted(one for one in self.file.tensors if one.startswith(blk)))
                    advice = f"download the file again; of this layer's MLPs it has {others or 'nothing':.300}"
                raise CheckpointError(
                    f"{self.file.path}: {name} must be the {words} of {self.config.experts} experts; found {found}: "
                    f"{advice}"
                )

    def _add_number(self, name: str, place: Place) -> None:
        """Add a number of one layer, which is metadata."""
        assert place.layer is not None
        self.places[name], self.numbers[name] = place, float(self._listed(place.name)[place.layer])
        self.logical[name] = StoredTensor(name, "F32", (1,), self.file.path)

    def _listed(self, name: str) -> np.ndarray:
        """Metadata that are a number of each layer."""
        listed, wanted = self.file.metadata.get(name), f"a list of {len(self.config.layers)} numbers"
        numbers = np.asarray(listed) if isinstance(listed, list | np.ndarray) else np.zeros(0)
        if numbers.dtype.kind not in "fi" or numbers.shape != (len(self.config.layers),):
            raise CheckpointError(f"{self.file.path}: {name} must be {wanted}; found {listed!r:.60}")
        return numbers

    def _check_activations(self) -> None:
        """Raise CheckpointError where xIELU has other numbers than any published model has."""
        for name, wanted in {"xielu.beta": XIELU.BETA, "xielu.eps": XIELU.EPS}.items():
            if self.config.activation == "xielu" and not np.allclose(self._listed(name), wanted, rtol=0.01, atol=0):
                raise CheckpointError(
                    f"{self.file.path}: {name} must be {wanted:g} in all layers, as in every published model: run the "
                    "original folder of this one with transformers"
                )

    def _add_by_head(self, name: str, parts: list[Place]) -> None:
        """Add a matrix whose rows of each head are in two tensors. CheckpointError for such of other shapes."""
        sizes = self.config.latent
        assert sizes is not None
        for place in parts:
            tensor, wanted = self.file.tensors.get(place.name), place.by_head and place.by_head.shape(sizes.rank)
            if tensor is None or tensor.shape != wanted:
                found = "none" if tensor is None else list(tensor.shape)
                raise CheckpointError(
                    f"{self.file.path}: {place.name} must have the shape {list(wanted or ())}, a matrix of each head "
                    f"of latent attention; found {found}: download the file again"
                )
            if tensor.type.name.startswith(("IQ1", "IQ2", "IQ3")):
                table(tensor.type.name)
            self.places[place.name] = place  # under the file's name, which is none of ours
        self.by_head[name] = parts
        rows = self.config.heads * (sizes.key_dim + sizes.value_dim)
        kinds = {self.file.tensors[place.name].type for place in parts}
        kind = kinds.pop().name if len(kinds) == 1 and all(one.dtype is not None for one in kinds) else "F32"
        self.logical[name] = StoredTensor(name, kind, (rows, sizes.rank), self.file.path)

    def _add(self, name: str, *, plain: bool = False) -> None:
        """plain: it is held so, whatever the file has."""
        place = self.places[name]
        tensor = self.file.tensors[place.name]
        shape = self._shape(place)
        seen, stored = StoredTensor(name, tensor.type.name, shape, self.file.path), tensor.type.format
        if tensor.type.name.startswith(("IQ1", "IQ2", "IQ3")):
            table(tensor.type.name)  # refused before anything is read
        if stored is not None and (plain or not place.whole_blocks(tensor.type.elements)):
            self.logical[name] = StoredTensor(name, "F32", shape, self.file.path)
        elif stored is None or len(shape) != 2:
            self.logical[name] = seen
        else:
            # Activations are rounded, as llama.cpp does.
            self.add(seen, (shape[0], shape[1]), stored, activations="int8", type=tensor.type.name)

    def _shape(self, place: Place) -> tuple[int, ...]:
        """The shape of one tensor of ours."""
        shape = self.file.tensors[place.name].shape
        if place.expert is not None:
            return shape[1:] if place.half is None else (shape[1] // 2, *shape[2:])
        if place.depthwise and len(shape) == 2:
            return (shape[0], 1, shape[1])
        if place.width and len(shape) == 2:
            return (shape[0] * shape[1],)
        return (1, *shape) if place.one_row and len(shape) == 1 else shape

    def dtype(self) -> torch.dtype:
        """bfloat16 where most is quantized, else the dtype of most bytes of the matrices; norms are always float32."""
        counts: Counter[torch.dtype] = Counter()
        for place in self.places.values():
            tensor = self.file.tensors.get(place.name)
            if tensor is not None and len(tensor.shape) > 1:
                counts[tensor.type.dtype or torch.bfloat16] += tensor.bytes
        return counts.most_common(1)[0][0] if counts else torch.float32

    def plain(self, name: str) -> Tensor:
        """A plain tensor: a view of the file, unless llama.cpp keeps it otherwise."""
        if name in self.by_head:
            return torch.cat([self._plain(place) for place in self.by_head[name]], dim=1).flatten(0, 1)
        place = self.places[name]
        return torch.tensor([self.numbers[name]]) if place.layer is not None else self._plain(place)

    def _plain(self, place: Place) -> Tensor:
        stored = self.file.tensors[place.name]
        if stored.type.dtype is None:  # multiplied head by head, or its columns are in an order that blocks cannot take
            numbers = self._dequantized(stored, self._raw(place)).dequantize()
            return place.of_file(numbers.view(self._shape(place)))
        return place.of_file(self._raw(place).view(stored.type.dtype).view(self._shape(place)))

    def values(self, module: QuantizedModule) -> Tensor:
        """The blocks as in the file, uint8 (N, bytes of a row)."""
        return self._raw(self.places[module.values])

    def _raw(self, place: Place) -> Tensor:
        """The bytes of a place: of an expert, its rows alone."""
        rows = self.file.raw(place.name)
        rows = rows if place.expert is None else rows.chunk(self.config.experts)[place.expert]
        return rows if place.half is None else rows.chunk(2)[place.half]

    def int4_words(self, module: QuantizedModule) -> QuantizedWeight | None:
        """The nibbles of Q4_0, which has the values 0 to 15 of a block in its low ones, in the order of the words."""
        if module.stored != TYPES["Q4_0"].format:
            return None
        scales, values = self._our_rows(module).unflatten(1, (-1, 18)).split((2, 16), 2)  # (N, G, 2), (N, G, 16)
        halves = [half[..., ::2] | half[..., 1::2] << 4 for half in (values & 15, values >> 4)]  # (N, G, 8) each
        found = scales.flatten(1).view(torch.float16)
        check_finite(self._tensor(module).name, found, self.file.path)
        words = torch.cat(halves, 2).flatten(1).view(torch.int32)
        return QuantizedWeight(format=module.stored, values=words, scales=found)

    def blocks(self, module: QuantizedModule) -> GgufBlocks | None:
        """The bytes of the file, if they are of a type that `pack_blocks` takes."""
        if module.type not in NUMBERS:
            return None
        return GgufBlocks(
            type=module.type,
            format=module.stored,
            in_features=module.shape[1],
            rows=self._our_rows(module),
            read=partial(self._numbers, module),
            check=partial(self._check, module),
        )

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """The integers and their scales, which a layer holds as they are in the file."""
        return self._numbers(module, self._our_rows(module))

    def _numbers(self, module: QuantizedModule, rows: Tensor) -> QuantizedWeight:
        weight = self._dequantized(self._tensor(module), rows)
        self._check(module, weight.scales, weight.zeros, weight.outer)
        return weight

    def _dequantized(self, tensor: GGUFTensor, rows: Tensor) -> QuantizedWeight:
        """The integers of some rows of a tensor, and their scales."""
        weight = tensor.type.weight(rows)
        scale = self.file.tensors.get(_scales_of(tensor.name)[0])
        if tensor.type.name == "NVFP4" and scale is not None:
            weight = replace(weight, scales=weight.scales * self.file.raw(scale.name).view(torch.float32).item())
        return weight

    def _check(self, module: QuantizedModule, *scales: Tensor | None) -> None:
        """Refuse scales and minima that are not finite; integers and exponents of 8 bits always are."""
        for part in scales:
            if part is not None and part.is_floating_point() and part.itemsize > 1:
                check_finite(self._tensor(module).name, part, self.file.path)

    def _tensor(self, module: QuantizedModule) -> GGUFTensor:
        return self.file.tensors[self.places[module.values].name]

    def _our_rows(self, module: QuantizedModule) -> Tensor:
        place, rows = self.places[f"{module.name}.weight"], self.values(module)
        rows = rows if place.order is None else rows.index_select(0, place.order.argsort())
        return place.in_blocks(rows, elements=self._tensor(module).type.elements, back=True)


def _in_whole(place: Place, rows: RowSlice, before: list[Tensor]) -> Place:
    """The place of a tensor that holds several of ours after each other, up to this one. before: rows of the others."""
    own = torch.arange(rows.stop - rows.start) if place.order is None else place.order
    before.append(rows.start + own)
    whole = torch.cat(before)
    return place._replace(order=None if torch.equal(whole, torch.arange(len(whole))) else whole)
