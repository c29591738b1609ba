"""The layouts of checkpoints whose weights are floats of 8 or 4 bits.

Tensors of a linear module, in place of its `weight` (N, K) in 16 bits:

FP8, with scales by block, by row or by matrix
    weight             float8_e4m3fn (N, K)
    weight_scale_inv   float32 or bfloat16 (ceil(N / 128), ceil(K / 128)), where config.json has a `weight_block_size`:
                       DeepSeek's and Qwen's; it is the scale, in spite of its name
    weight_scale       the same, (N, 1), (N), (1) or (): of rows, or of the matrix
    input_scale        left aside: activations are not rounded

W[n, k] = weight[n, k] · scale. The weights are held as they are, with the scales spread to every row that
they belong to.

MXFP4 and NVFP4, e2m1, two in a byte, the earlier one in its low half
  compressed-tensors        weight_packed uint8 (N, K / 2)
    mxfp4-pack-quantized    weight_scale  uint8 (N, K / 32): exponents plus 127 (e8m0)
    nvfp4-pack-quantized    weight_scale  float8_e4m3fn (N, K / 16); weight_global_scale float32, which divides it
  modelopt's NVFP4          weight uint8 (N, K / 2), weight_scale likewise; weight_scale_2 float32, which multiplies it

W[n, k] = e2m1 · (scale · outer scale), in float32 (OCP Microscaling Formats 1.0; NVIDIA's NVFP4). No kernel multiplies
them here: the weights are held in the model's own dtype, and activations are not rounded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoints.checkpoint import DTYPES, StoredTensor, StoredTensors, check_finite
from hasten.checkpoints.formats.file_format import (
    ConfigFields,
    OpenFolder,
    QuantizedFolder,
    QuantizedModule,
    fail,
    seen,
)
from hasten.ops.linear.weights import QuantizedWeight, Scales, WeightFormat

ELEMENT = "float8_e4m3fn"
_FP8_SCALES = ("F32", "BF16", "F16")
_FP8_NAMES = ("weight_scale_inv", "weight_scale")
_FP8_ASIDE = (".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale")
MXFP4 = WeightFormat(element="float4_e2m1", scales=(Scales(torch.float8_e8m0fnu, 32),))
NVFP4 = WeightFormat(element="float4_e2m1", scales=(Scales(torch.float8_e4m3fn, 16), Scales(torch.float32, 0, 0)))
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_ASIDE = (".input_global_scale", ".input_scale")


class FP8Folder(QuantizedFolder):
    """FP8 weights. block: rows and columns that share a scale; None: rows or matrices do."""

    def __init__(self, block: tuple[int, int] | None, stored: StoredTensors) -> None:
        super().__init__(stored, _FP8_ASIDE)
        self.block = block
        for name, tensor in stored.items():
            if tensor.dtype == "F8_E4M3" and name.endswith(".weight"):
                self._add_module(tensor)

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """The values as they are in the file, and the scales in float32, expanded to every row: (N, column blocks)."""
        values, name = self.values(module), self._scale_name(module.name)
        if ((values.view(torch.uint8) & 0x7F) == 0x7F).any():
            check_finite(module.values, values.float(), self.stored[module.values].file)
        scales = self.tensor(name).float()
        check_finite(name, scales, self.stored[name].file)
        n, k = module.shape
        blocks = torch.arange(n) // module.stored.scales[0].rows
        scales = scales.view(-1, module.stored.groups(k))[blocks]
        return QuantizedWeight(format=module.stored, values=values, scales=scales)

    def _scale_name(self, name: str) -> str:
        return next((f"{name}.{leaf}" for leaf in _FP8_NAMES if f"{name}.{leaf}" in self.stored), "")

    def _add_module(self, weight: StoredTensor) -> None:
        name = weight.name.removesuffix(".weight")
        scale = self.stored.get(self._scale_name(name))
        if scale is None or len(weight.shape) != 2:
            fail(weight, f"must be a matrix with {name}.weight_scale or weight_scale_inv beside it")
        n, k = weight.shape
        if self.block is None:
            rows, columns = (n if scale.shape in ((), (1,)) else 1), 0
            self.beside(scale.name, _FP8_SCALES, (), (1,), (n,), (n, 1))
        else:
            rows, columns = self.block
            self.beside(scale.name, _FP8_SCALES, (-(-n // rows), -(-k // columns)))
        stored = WeightFormat(element=ELEMENT, scales=(Scales(DTYPES[scale.dtype], columns, rows),))
        self.add(weight, (n, k), stored)


def read_fp8(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """Blocks of any size, rows, or whole matrices; activations are kept whatever it says of them."""
    blocks = given.get("weight_block_size") is not None
    block = block_of(ConfigFields(where, given), "weight_block_size") if blocks else None
    return partial(FP8Folder, block)


def block_of(fields: ConfigFields, name: str) -> tuple[int, int]:
    """The rows and columns of a block."""
    block = fields.values.get(name)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        fields.fail(name, "two numbers", block)
    return sizes[0], sizes[1]


@dataclass(frozen=True, slots=True)
class FP4Layout:
    """What follows a module's name for its values and its scales, the finest first."""

    format: WeightFormat
    values: str
    scales: tuple[str, ...]
    divides: bool = False  # the outer scale


class FP4Folder(QuantizedFolder):
    """MXFP4 or NVFP4, which no layer holds and no `QuantizedWeight`."""

    def __init__(self, config: FP4Layout, stored: StoredTensors) -> None:
        super().__init__(stored, (*_FP4_ASIDE, *(f".{leaf}" for leaf in config.scales)))
        self.config = config
        for name, tensor in stored.items():
            prefix, _, leaf = name.rpartition(".")
            if leaf == config.values and tensor.dtype == "U8":
                del self.logical[name]
                self._add_module(prefix, tensor)

    def plain_rows(self, module: QuantizedModule) -> Callable[[slice], Tensor]:
        """A function that returns some rows of the weight in float32."""
        inner, *outer = (f"{module.name}.{leaf}" for leaf in self.config.scales)
        scale = self.tensor(inner).view(self.config.format.scale_dtype).float()
        for name in outer:
            scale = scale / self.tensor(name) if self.config.divides else scale * self.tensor(name)
        check_finite(inner, scale, self.stored[inner].file)
        pairs = self.values(module)
        values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])

        def part(rows: slice) -> Tensor:
            codes = torch.stack((pairs[rows] & 15, pairs[rows] >> 4), dim=2).int()
            return (values[codes].view(len(codes), scale.shape[1], -1) * scale[rows].unsqueeze(2)).flatten(1)

        return part

    def _add_module(self, name: str, weight: StoredTensor) -> None:
        size, found = self.config.format.group_size, self.stored.get(f"{name}.{self.config.scales[0]}")
        if found is None or len(found.shape) != 2:
            fail(weight, f"must have {name}.{self.config.scales[0]} beside it, a matrix")
        n, groups = found.shape
        dtypes = ("F8_E4M3",) if size == 16 else ("U8", "F8_E8M0")
        if weight.shape != (n, groups * size // 2) or found.dtype not in dtypes:
            wanted = f"{' or '.join(dtypes)}, one for {size} values"
            fail(found, f"must be {wanted}; found {seen(found)} beside {seen(weight)}")
        for leaf in self.config.scales[1:]:
            self.needed(weight, f"{name}.{leaf}", ("F32",), (), (1,))
        self.add(weight, (n, groups * size), self.config.format)


def packed_fp4(group_size: int) -> FP4Layout:
    """compressed-tensors' "mxfp4-pack-quantized" (groups of 32) and "nvfp4-pack-quantized" (of 16)."""
    if group_size == 32:
        return FP4Layout(MXFP4, "weight_packed", ("weight_scale",))
    return FP4Layout(NVFP4, "weight_packed", ("weight_scale", "weight_global_scale"), divides=True)


def read_modelopt(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """NVIDIA's ModelOpt: NVFP4, and FP8 with a scale for each matrix.

    The cache is kept in the model's dtype, whatever the config says of it.
    """
    ConfigFields(where, given, method="modelopt").only(quant_algo=("NVFP4", "FP8"))
    if given["quant_algo"] == "FP8":
        return partial(FP8Folder, None)
    return partial(FP4Folder, FP4Layout(NVFP4, "weight", ("weight_scale", "weight_scale_2")))
