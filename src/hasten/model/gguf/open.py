"""A GGUF file as a checkpoint: its tensors under the names that Hugging Face gives them, in its order of rows."""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from hasten.model.checkpoint import StoredTensor, StoredTensors, check_finite
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES, read_config
from hasten.model.formats.file_format import QuantizedFolder, QuantizedModule
from hasten.model.gguf.config import config_values
from hasten.model.gguf.header import GGUFFile, GGUFTensor, read_gguf
from hasten.model.gguf.names import FREQUENCIES, Place, place_of
from hasten.model.gguf.tokenizer import read_tokenizer
from hasten.model.gguf.types import TYPES
from hasten.model.source import ModelSource
from hasten.ops.linear import QuantizedWeight


def open_gguf(path: Path) -> ModelSource:
    """The model of a GGUF file. CheckpointError for what is damaged, hostile, or of an unknown architecture."""
    file = read_gguf(path)
    values = config_values(file)
    tokenizer = read_tokenizer(file)
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
        generation={name: values[name] for name in ("bos_token_id", "eos_token_id") if name in values},
        tokenizer=tokenizer,
    )


class GGUFWeights(QuantizedFolder):
    """The plain tensors, and the quantized modules."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        super().__init__(StoredTensors())
        self.file, self.config = file, config
        self.places: dict[str, Place] = {}
        named = {FREQUENCIES}
        for ours, piece in FAMILIES[config.family].places(config):
            place = place_of(ours, config)
            if place.name in file.tensors:
                self.places[piece.name] = place
                named.add(place.name)
                self._add(piece.name)
        for name in file.tensors.keys() - named:  # for the warning that they stay unread
            self.places[name] = Place(name)
            self.logical[name] = StoredTensor(name, "F32", file.tensors[name].shape, file.path)

    def _add(self, name: str) -> None:
        tensor = self.file.tensors[self.places[name].name]
        seen, stored = StoredTensor(name, tensor.type.name, tensor.shape, self.file.path), tensor.type.format
        if stored is None or len(tensor.shape) != 2:
            self.logical[name] = seen
        else:
            # Activations are rounded, as llama.cpp does.
            self.add(seen, (tensor.shape[0], tensor.shape[1]), stored, activations="int8")

    def dtype(self) -> torch.dtype:
        """bfloat16 where most is quantized, else the dtype of most bytes of the matrices; norms are always float32."""
        counts: Counter[torch.dtype] = Counter()
        for place in self.places.values():
            tensor = self.file.tensors[place.name]
            if len(tensor.shape) > 1:
                counts[tensor.type.dtype or torch.bfloat16] += tensor.bytes
        return counts.most_common(1)[0][0] if counts else torch.float32

    def plain(self, name: str) -> Tensor:
        """A plain tensor: a view of the file, unless llama.cpp keeps it otherwise."""
        place = self.places[name]
        stored = self.file.tensors[place.name]
        assert stored.type.dtype is not None
        tensor = self._rows(name, self.file.raw(place.name).view(stored.type.dtype).view(stored.shape))
        return tensor - place.offset if place.offset else tensor

    def values(self, module: QuantizedModule) -> Tensor:
        """The blocks as they stand in the file, uint8 (N, bytes of a row)."""
        return self.file.raw(self._tensor(module).name)

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

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """The integers and their scales, which a layer holds as they stand in the file."""
        tensor = self._tensor(module)
        weight = tensor.type.weight(self._our_rows(module))
        for part in (weight.scales, weight.outer):
            if part is not None and part.is_floating_point():
                check_finite(tensor.name, part, self.file.path)
        return weight

    def _tensor(self, module: QuantizedModule) -> GGUFTensor:
        return self.file.tensors[self.places[module.values].name]

    def _our_rows(self, module: QuantizedModule) -> Tensor:
        return self._rows(f"{module.name}.weight", self.values(module))

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        order = self.places[name].order
        return rows if order is None else rows[order.argsort()]
