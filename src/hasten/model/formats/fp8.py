"""The layout of FP8 checkpoints: weights in float8_e4m3fn, with scales by block, by row or by matrix.

Beside a linear module's bias stand, in place of its `weight` (N, K) in 16 bits:

    weight             float8_e4m3fn (N, K)
    weight_scale_inv   float32 or bfloat16 (ceil(N / 128), ceil(K / 128)), where config.json has a `weight_block_size`:
                       DeepSeek's and Qwen's; it is the scale, in spite of its name
    weight_scale       the same, (N, 1), (N), (1) or (): of rows, or of the matrix
    input_scale        left aside: activations are not rounded

W[n, k] = weight[n, k] · scale. The weights are held as they are, with the scales spread to every row that
they belong to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.model.checkpoint import DTYPES, StoredTensor, check_finite
from hasten.model.formats.config_fields import ConfigFields
from hasten.model.formats.file_format import OpenFolder, QuantizedFolder, QuantizedModule, fail, seen
from hasten.ops.linear.weights import QuantizedWeight, Scales, WeightFormat

ELEMENT = "float8_e4m3fn"
_SCALES = ("F32", "BF16", "F16")
_NAMES = ("weight_scale_inv", "weight_scale")
_ASIDE = (".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale")


@dataclass(frozen=True, slots=True)
class FP8Layout:
    """block: rows and columns that share a scale; None: rows or matrices do."""

    block: tuple[int, int] | None


class FP8Folder(QuantizedFolder):
    """FP8 weights."""

    def __init__(self, config: FP8Layout, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(stored, tensors, _ASIDE)
        self.config = config
        for name, tensor in stored.items():
            if tensor.dtype == "F8_E4M3" and name.endswith(".weight"):
                self._add_module(tensor)

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """The values as they stand in the file, and the scales in float32, spread to every row: (N, column blocks)."""
        values, name = self.values(module), self._scale_name(module.name)
        if ((values.view(torch.uint8) & 0x7F) == 0x7F).any():
            check_finite(module.values, values.float(), self.stored[module.values].file)
        scales = self.tensors[name].float()
        check_finite(name, scales, self.stored[name].file)
        n, k = module.shape
        blocks = torch.arange(n) // module.stored.scales[0].rows
        scales = scales.view(-1, module.stored.groups(k))[blocks]
        return QuantizedWeight(format=module.stored, values=values, scales=scales)

    def _scale_name(self, name: str) -> str:
        return next((f"{name}.{leaf}" for leaf in _NAMES if f"{name}.{leaf}" in self.stored), "")

    def _add_module(self, weight: StoredTensor) -> None:
        name = weight.name.removesuffix(".weight")
        scale = self.stored.get(self._scale_name(name))
        if scale is None or len(weight.shape) != 2:
            fail(weight, f"must be a matrix with {name}.weight_scale or weight_scale_inv beside it")
        n, k = weight.shape
        if self.config.block is None:
            rows, columns = (n if scale.shape in ((), (1,)) else 1), 0
            fits = scale.shape in ((), (1,), (n,), (n, 1))
            wanted = f"one number, or [{n}, 1]"
        else:
            rows, columns = self.config.block
            expected = (-(-n // rows), -(-k // columns))
            fits, wanted = scale.shape == expected, str(list(expected))
        if not fits or scale.dtype not in _SCALES:
            fail(scale, f"must be {wanted} in {', '.join(_SCALES)}; found {seen(scale)}")
        stored = WeightFormat(element=ELEMENT, scales=(Scales(DTYPES[scale.dtype], columns, rows),))
        self.add(weight, (n, k), stored)


def read_fp8(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """Blocks of any size, rows, or whole matrices; activations are kept whatever it says of them."""
    blocks = given.get("weight_block_size") is not None
    block = block_of(ConfigFields(where, given), "weight_block_size") if blocks else None
    return partial(FP8Folder, FP8Layout(block))


def block_of(fields: ConfigFields, name: str) -> tuple[int, int]:
    """The rows and columns of a block."""
    block = fields.values.get(name)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        fields.fail(name, "two numbers", block)
    return sizes[0], sizes[1]
