"""A model as it lies on the disk, whatever its layout: what `load` needs to know before it reads a weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoints.checkpoint import StoredTensor, read_headers
from hasten.checkpoints.formats.file_format import QuantizedFolder
from hasten.checkpoints.formats.registry import read_quantization
from hasten.machine.regular_files import read_json
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES, read_config
from hasten.model.families.wrapped import multi_token_tensors, text_modules, text_tensors
from hasten.text.tokenizer import Tokenizer

TOKENIZER = 15  # bytes of memory that it takes for each of its file (SmolLM2 15, Gemma 3 13: 420 MB)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint whose headers have been checked, its tensors by the names that Hugging Face gives them.

    stored: the tensors as their headers describe them. towers: how many others there are of each, which are left out;
    head_bytes: of those of a multi-token head.
    read: a plain tensor, by name. quantized: the others. dtype: the model's own; None: that of most bytes of its plain
    tensors.
    """

    path: Path
    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    read: Callable[[str], Tensor]
    towers: Mapping[str, int] = field(default_factory=dict)
    head_bytes: int = 0
    quantized: QuantizedFolder | None = None
    dtype: torch.dtype | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    read_tokenizer: Callable[[], Tokenizer | None] = lambda: None
    tokenizer_bytes: int = 0  # of memory that it will take

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Read when first asked for."""
        return self.read_tokenizer()


def open_folder(folder: Path) -> ModelSource:
    """A Hugging Face folder with safetensors. CheckpointError names the file that is missing or damaged."""
    where = folder / "config.json"
    values = read_json(where)
    config = read_config(values, str(where))
    quantization = values.get("quantization_config", values.get("compression_config"))
    open_quantized = None
    if quantization is not None:
        open_quantized = read_quantization(values, text_modules(values, quantization), where)
    stored = read_headers(folder)
    names, towers = text_tensors(values, stored)
    head_bytes = sum(stored[name].bytes for name in multi_token_tensors(stored).values())
    if list(names) != list(stored):  # a text model is read by its own names
        stored = stored.renamed(names)
    generation, tokenizer = folder / "generation_config.json", folder / "tokenizer.json"
    quantized = None if open_quantized is None else open_quantized(stored)
    if quantized is not None and config.latent is not None:
        split = f".{FAMILIES[config.family].names['kv_up']}.weight"  # multiplied head by head, with plain weights
        modules = quantized.modules
        modules.update({name: replace(one, layer=None) for name, one in modules.items() if name.endswith(split)})
    return ModelSource(
        path=folder,
        config=config,
        stored=stored,
        towers=towers,
        head_bytes=head_bytes,
        read=stored.read,
        quantized=quantized,
        generation=read_json(generation) if generation.exists() else {},
        read_tokenizer=partial(Tokenizer.from_folder, folder),
        tokenizer_bytes=int(TOKENIZER * tokenizer.stat().st_size) if tokenizer.is_file() else 0,
    )
