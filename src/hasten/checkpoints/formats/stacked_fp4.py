"""gpt-oss's own layout of MXFP4, quant_method "mxfp4": a layer's experts in stacks.

In place of a stack `NAME`, whose E matrices are (in, out) = (K, N):

    NAME_blocks   uint8 (E, N, K / 32, 16): two values in a byte, the earlier one in its low half
    NAME_scales   uint8 (E, N, K / 32): exponents plus 127 (e8m0)

W[n, k] = e2m1 · 2^(scale - 127) (OCP Microscaling Formats 1.0). Layers hold them as they are; activations are rounded
to int8 in the groups of the weights. Everything else is plain, as `modules_to_not_convert` says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hasten.checkpoints.checkpoint import StoredTensor, StoredTensors
from hasten.checkpoints.formats.file_format import (
    ConfigFields,
    OpenFolder,
    QuantizedFolder,
    QuantizedModule,
    fail,
    seen,
)
from hasten.model.layer_format import LayerFormat
from hasten.ops.linear.layouts import spread_words
from hasten.ops.linear.weights import MXFP4, QuantizedWeight

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16  # of the 32 values that share a scale


class StackedFP4Folder(QuantizedFolder):
    """Stacks of experts in MXFP4, by the names of the plain stacks (E, N, K)."""

    def __init__(self, stored: StoredTensors) -> None:
        super().__init__(stored, (_BLOCKS, _SCALES))
        for name, tensor in stored.items():
            if name.endswith(_BLOCKS):
                self._add_stack(name.removesuffix(_BLOCKS), tensor)

    def int4_words(self, module: QuantizedModule) -> QuantizedWeight:
        """The blocks of all experts as int32 words (E, N, K / 8): views of the file."""
        blocks, scales = self.values(module), self.tensor(module.name + _SCALES)
        if blocks.storage_offset() % 4:
            blocks = blocks.clone()  # words begin at multiples of 4 bytes
        words = blocks.view(torch.int32).flatten(2)
        return QuantizedWeight(format=MXFP4, values=words, scales=scales.view(MXFP4.scale_dtype))

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """The numbers of all experts, int8 (E, N, K)."""
        words, columns = self.int4_words(module), module.shape[-1]
        flat = spread_words(words.map(lambda tensor: tensor.flatten(0, 1)), columns)
        return flat.map(lambda tensor: tensor.unflatten(0, module.shape[:2]))

    def _add_stack(self, name: str, blocks: StoredTensor) -> None:
        if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK_BYTES:
            fail(blocks, f"must be U8 (experts, rows, groups, {_BLOCK_BYTES}); found {seen(blocks)}")
        experts, rows, groups, _ = blocks.shape
        self.needed(blocks, name + _SCALES, ("U8",), (experts, rows, groups))
        shape = experts, rows, groups * MXFP4.group_size
        self.modules[name] = QuantizedModule(name, shape, MXFP4, LayerFormat(MXFP4, "int8"), blocks.name)
        self.logical[name] = StoredTensor(name, "BF16", shape, blocks.file)


def read_mxfp4(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """The tensors themselves show which modules are quantized."""
    ConfigFields(where, given, method="mxfp4").only(quant_method=("mxfp4",))
    return StackedFP4Folder
