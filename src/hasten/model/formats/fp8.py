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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.model.checkpoint import DTYPES, StoredTensor, check_finite
from hasten.model.formats.config_fields import ConfigFields
from hasten.model.formats.file_format import (
    QuantizedFolder,
    QuantizedModule,
    fail,
    in_rows,
    require_modules,
    seen,
)
from hasten.model.formats.record import LayerFormat, group_places, held_format
from hasten.ops.linear import QuantizedWeight, WeightFormat
from hasten.ops.linear.weights import Scales

ELEMENT = "float8_e4m3fn"
_SCALES = ("F32", "BF16", "F16")
_NAMES = ("weight_scale_inv", "weight_scale")
_ASIDE = (".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale")


@dataclass(frozen=True, slots=True)
class FP8Quantization:
    """The `StoredQuantization`. block: rows and columns that share a scale; None: rows or matrices do."""

    where: Path
    block: tuple[int, int] | None

    @property
    def weight_formats(self) -> list[WeightFormat]:
        """One; without blocks, that of a scale by row."""
        rows, columns = self.block or (1, 0)
        return [WeightFormat(element=ELEMENT, scales=(Scales(torch.float32, columns, rows),))]

    def open(self, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> QuantizedFolder:
        """The folder, its modules checked by their headers."""
        return FP8Folder(self, stored, tensors)


class FP8Folder:
    """A `QuantizedFolder` of FP8 weights. Raises CheckpointError for tensors that do not fit each other."""

    def __init__(
        self, config: FP8Quantization, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]
    ) -> None:
        self.config, self.stored, self.tensors = config, stored, tensors
        self.logical = {name: tensor for name, tensor in stored.items() if not name.endswith(_ASIDE)}
        self.modules: dict[str, QuantizedModule] = {}
        for name, tensor in stored.items():
            if tensor.dtype == "F8_E4M3" and name.endswith(".weight"):
                self.modules[name] = self._module(tensor)
                self.logical[name] = StoredTensor(name, "BF16", self.modules[name].shape, tensor.file)
        require_modules(self.modules, "fp8", config.where)

    def read(self, module: QuantizedModule) -> QuantizedWeight:
        """The module's numbers: its values as they stand in the file."""
        assert module.layer is not None
        held, (n, k) = module.layer.weight, module.shape
        values = self.values(module)
        codes = values.view(torch.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            check_finite(f"{module.name}.weight", values.float(), self.stored[f"{module.name}.weight"].file)
        rows, scale = self._scale(module)
        place = group_places(module.stored, held, k)
        scales = scale[torch.arange(n) // rows][:, place].contiguous()
        return QuantizedWeight(format=held, values=values, scales=scales)

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """Never called: these are no integers."""
        raise AssertionError(module.name)

    def int4_words(self, module: QuantizedModule) -> None:
        """None: there are none."""

    def values(self, module: QuantizedModule) -> Tensor:
        """The mapped weight."""
        return self.tensors[f"{module.name}.weight"]

    def dequantize(self, module: QuantizedModule, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) in float32, rounded once to `dtype`."""
        k, values = module.shape[1], self.values(module)
        rows, scale = self._scale(module)
        scale = scale[:, torch.arange(k) // (module.stored.group_size or k)]  # (row blocks, K)

        def part(these: slice) -> Tensor:
            return values[these].float() * scale[torch.arange(these.start, these.stop) // rows]

        weight = in_rows(module.shape, dtype, part)
        check_finite(f"{module.name}.weight", weight, self.stored[f"{module.name}.weight"].file)
        return weight

    def _scale(self, module: QuantizedModule) -> tuple[int, Tensor]:
        """How many rows share a scale, and the scales, float32 (row blocks, column blocks)."""
        name = self._scale_name(module.name)
        scale = self.tensors[name].float()
        check_finite(name, scale, self.stored[name].file)
        return module.stored.scales[0].rows, scale.view(-1, module.stored.groups(module.shape[1]))

    def _scale_name(self, name: str) -> str:
        return next((f"{name}.{leaf}" for leaf in _NAMES if f"{name}.{leaf}" in self.stored), "")

    def _module(self, weight: StoredTensor) -> QuantizedModule:
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
        held = held_format(stored)
        layer = None if held is None else LayerFormat(held, "float")
        return QuantizedModule(name, (n, k), stored, layer, packed=False)


class FP8Format:
    """The `FileFormat` of fine-grained FP8, and of FP8 with one scale a row or matrix."""

    method = "fp8"

    def read_config(self, given: Any, values: Mapping[str, Any], where: Path) -> FP8Quantization:
        """Blocks of any size, rows, or whole matrices; activations are kept whatever it says of them."""
        blocks = given.get("weight_block_size") is not None
        return FP8Quantization(where, block_of(ConfigFields(where, given), "weight_block_size") if blocks else None)


def block_of(fields: ConfigFields, name: str) -> tuple[int, int]:
    """The rows and columns of a block."""
    block = fields.values.get(name)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        fields.fail(name, "two numbers", block)
    return sizes[0], sizes[1]
