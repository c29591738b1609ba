"""The quantized tensors of a checkpoint folder: checked by their headers, then handed out as packed layers.

`open_quantized` shows the rest of the loader a folder in which every quantized module has a plain `weight` of its true
shape; the loader locates and checks it as ever, and comes here to fill it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from hasten.errors import CheckpointError
from hasten.model.checkpoint import StoredTensor, check_finite
from hasten.model.formats.arguments import GROUP_SIZES, WeightArguments
from hasten.model.formats.packing import unpack_bytes, unpack_columns, unpack_rows
from hasten.model.formats.record import LayerFormat
from hasten.ops.linear import QuantizedWeight

_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_BLOCK_ELEMENTS = 1 << 20
_SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModule:
    """One quantized linear module of a folder: its published name, its true shape (N, K), how it is stored.

    layer: how a packed layer holds it, or None where no kernel can: int8 with scales by group, or with zero points.
    stored_group: input features that share a scale in the file (a multiple of layer.group_size), or 0: the whole row.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    layer: LayerFormat | None
    stored_group: int
    symmetric: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """modules by the name of the weight that each stands for; logical: the folder's tensors as the loader sees them."""

    modules: Mapping[str, QuantizedModule]
    logical: Mapping[str, StoredTensor]

    def read(self, module: QuantizedModule, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The module's numbers. The values of int8 are views of the file; those of int4 are unpacked, a byte each."""
        assert module.layer is not None
        scales, zeros = self.scales(module, tensors)
        return QuantizedWeight(
            bits=module.bits,
            group_size=module.layer.group_size,
            values=self._values(module, tensors),
            scales=scales,
            zeros=zeros,
        )

    def scales(self, module: QuantizedModule, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros as QuantizedWeight holds them."""
        assert module.layer is not None
        k = module.shape[1]
        scales, zeros = self._stored_scales(module, tensors)
        if module.bits == 8:
            return scales.float(), None
        if module.stored_group != module.layer.group_size:  # wider groups: each part of one has the same scale
            group = torch.arange(-(-k // module.layer.group_size)) * module.layer.group_size
            place = group // (module.stored_group or k)
            scales, zeros = scales[:, place], None if zeros is None else zeros[:, place]
        return scales, zeros

    def dequantize(self, module: QuantizedModule, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight (N, K) that the module's integers stand for, each rounded once, to `dtype`."""
        if module.layer is not None:
            return self.read(module, tensors).dequantize(dtype)
        n, k = module.shape
        scales, zeros = self._stored_scales(module, tensors)
        group = torch.arange(k) // (module.stored_group or k)
        values, weight = self._values(module, tensors), torch.empty(n, k, dtype=dtype)
        step = max(1, _BLOCK_ELEMENTS // k)  # a few rows at a time, so that the float32 between them stays small
        for start in range(0, n, step):
            rows = slice(start, start + step)
            wide = values[rows].float()
            if zeros is not None:
                wide -= zeros[rows].float()[:, group]
            weight[rows] = wide.mul_(scales[rows].float()[:, group])
        return weight

    def _values(self, module: QuantizedModule, tensors: Mapping[str, Tensor]) -> Tensor:
        if not module.packed:
            return tensors[f"{module.name}.weight"]
        unpack = unpack_bytes if module.bits == 8 else unpack_columns
        return unpack(tensors[f"{module.name}.weight_packed"], module.shape[1])

    def _stored_scales(self, module: QuantizedModule, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Scales (N, G) as they stand in the file, and zeros of the same shape: uint8 for int4, int8 for int8."""
        n = module.shape[0]
        name = f"{module.name}.weight_scale"
        scales = tensors[name].view(n, -1)
        check_finite(name, scales, str(self.logical[f"{module.name}.weight"].file))
        if module.symmetric:
            return scales, None
        zeros = tensors[f"{module.name}.weight_zero_point"]
        if not module.packed:
            return scales, zeros.view(n, -1)
        if module.bits == 4:
            return scales, unpack_rows(zeros, n)
        return scales, unpack_bytes(zeros.t().clone(memory_format=torch.contiguous_format), n).t()


def open_quantized(
    stored: Mapping[str, StoredTensor],
    arguments: tuple[WeightArguments, ...] | None,
    tensors: Mapping[str, Tensor],
) -> QuantizedFolder | None:
    """Find the quantized modules of a folder and check their tensors against each other and the config's groups.

    Reads headers, and of each int4 module its `weight_shape` (two numbers). None where config.json names no
    quantization (`arguments`). Raises CheckpointError for a tensor that is missing, has the wrong shape or dtype, fits
    none of the groups, or is packed in a folder that does not say how.
    """
    if arguments is None:
        for name, tensor in stored.items():
            if name.endswith(".weight_packed"):
                _fail(
                    tensor, "is quantized, and config.json has no quantization_config that says how; download it again"
                )
        return None
    logical = {name: tensor for name, tensor in stored.items() if not name.endswith(_SUFFIXES)}
    modules = {}
    for name, tensor in stored.items():
        prefix, dot, leaf = name.rpartition(".")
        if not dot:  # of no module
            continue
        if leaf == "weight_g_idx":
            _fail(tensor, "reorders the columns by activation (actorder), which hasten does not read")
        if leaf in ("weight_scale", "weight_zero_point") and not {f"{prefix}.weight", f"{prefix}.weight_packed"} & set(
            stored
        ):
            _fail(tensor, f"stands without {prefix}.weight or {prefix}.weight_packed; download the folder again")
        if leaf == "weight_packed" or (leaf == "weight" and f"{prefix}.weight_scale" in stored):
            module = _module(prefix, leaf == "weight_packed", stored, arguments, tensors)
            modules[f"{prefix}.weight"] = module
            logical[f"{prefix}.weight"] = StoredTensor(f"{prefix}.weight", "BF16", module.shape, tensor.file)
    return QuantizedFolder(modules, logical)


def _module(
    name: str,
    packed: bool,
    stored: Mapping[str, StoredTensor],
    arguments: tuple[WeightArguments, ...],
    tensors: Mapping[str, Tensor],
) -> QuantizedModule:
    weight = stored[f"{name}.weight_packed" if packed else f"{name}.weight"]
    scale = stored.get(f"{name}.weight_scale")
    if scale is None:
        _fail(weight, f"lacks {name}.weight_scale beside it; download the folder again")
    if weight.dtype != ("I32" if packed else "I8") or len(weight.shape) != 2:
        _fail(weight, f"must be a matrix of {'I32' if packed else 'I8'}; found {_seen(weight)}")
    if scale.dtype not in _SCALES or len(scale.shape) not in (1, 2):
        _fail(scale, f"must be one of {', '.join(_SCALES)} by row and group; found {_seen(scale)}")
    n = weight.shape[0]
    k, bits = (_true_columns(name, weight, stored, tensors, arguments)) if packed else (weight.shape[1], 8)
    zero = stored.get(f"{name}.weight_zero_point")
    fits = [
        a
        for a in arguments
        if a.bits == bits
        and a.symmetric == (zero is None)
        and scale.shape in ((n, _groups(k, a.group_size)), *([(n,)] if not a.group_size else []))
    ]
    if not fits:
        asked = "; ".join(
            f"{a.bits} bits, {'groups of ' + str(a.group_size) if a.group_size else 'one scale a row'}, "
            f"{'symmetric' if a.symmetric else 'with zero points'}"
            for a in arguments[:3]
        )
        _fail(
            scale,
            f"is {_seen(scale)}, beside a weight {n}×{k} of {bits} bits {'without' if zero is None else 'with'} "
            f"zero points: that fits none of config.json's groups ({asked})",
        )
    if zero is not None:
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        fitting = ("I32", (-(-n * bits // 32), groups)) if packed else ("I8", (n, groups))
        if (zero.dtype, zero.shape) != fitting and not (fitting[0] == "I8" == zero.dtype and zero.shape == scale.shape):
            _fail(zero, f"must be {fitting[0]} {list(fitting[1])}{' (packed by row)' * packed}; found {_seen(zero)}")
    if bits == 4 and scale.dtype == "F32":
        _fail(scale, "must be F16 or BF16 for int4; found F32")
    chosen = next((a for a in fits if name in a.targets), fits[0])
    layer = None
    if bits == 4:
        layer = LayerFormat(
            bits=4,
            group_size=chosen.group_size if chosen.group_size in GROUP_SIZES else GROUP_SIZES[-1],
            symmetric=zero is None,
            scale_dtype=_SCALES[scale.dtype],
            activations=chosen.activations,
        )
    elif chosen.group_size == 0 and chosen.symmetric:
        layer = LayerFormat(bits=8, activations=chosen.activations)
    return QuantizedModule(
        name=name,
        shape=(n, k),
        bits=bits,
        layer=layer,
        stored_group=chosen.group_size,
        symmetric=chosen.symmetric,
        packed=packed,
    )


def _true_columns(
    name: str,
    weight: StoredTensor,
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, Tensor],
    arguments: tuple[WeightArguments, ...],
) -> tuple[int, int]:
    """K and the bits of a packed weight, whose own shape only tells the number of int32s."""
    shape = stored.get(f"{name}.weight_shape")
    if shape is None:
        _fail(weight, f"lacks {name}.weight_shape beside it; download the folder again")
    if shape.dtype not in ("I64", "I32") or shape.shape != (2,):
        _fail(shape, f"must be two I64 numbers; found {_seen(shape)}")
    rows, columns = (int(x) for x in tensors[shape.name])
    n, words = weight.shape
    found = [b for b in sorted({a.bits for a in arguments}) if -(-columns * b // 32) == words]
    if rows != n or columns < 1 or not found:
        _fail(weight, f"is {_seen(weight)}, which does not hold the {rows}×{columns} values of {shape.name}")
    return columns, found[0]


def _groups(k: int, size: int) -> int:
    return -(-k // size) if size else 1


def _seen(tensor: StoredTensor) -> str:
    return f"{tensor.dtype!s:.20} {list(tensor.shape)}"


def _fail(tensor: StoredTensor, what: str) -> NoReturn:
    raise CheckpointError(f"{Path(tensor.file)}: {tensor.name!s:.100} {what}")
