"""Finding compressed-tensors' modules in a checkpoint folder: their tensors checked by their headers against each other
and the config, and read.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hasten.model.checkpoint import DTYPES, StoredTensor, check_finite
from hasten.model.formats.compressed_config import ConfigGroup
from hasten.model.formats.file_format import QuantizedFolder, QuantizedModule, fail, seen
from hasten.model.formats.packing import signed, unpack_columns, unpack_rows
from hasten.model.formats.record import group_places
from hasten.ops.linear import QuantizedWeight, Scales

_SCALES = ("F16", "BF16", "F32")
_SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


class CompressedFolder(QuantizedFolder):
    """compressed-tensors: every module's tensors fit each other and one of the config's groups.

    Made from headers, and the `weight_shape` (two numbers) of each packed module.
    """

    def __init__(
        self, groups: tuple[ConfigGroup, ...], stored: Mapping[str, StoredTensor], read: Callable[[str], Tensor]
    ) -> None:
        super().__init__(stored, read, _SUFFIXES)
        self.groups = groups
        for name, tensor in stored.items():
            prefix, dot, leaf = name.rpartition(".")
            if not dot:  # of no module
                continue
            weights = f"{prefix}.weight", f"{prefix}.weight_packed"
            if leaf in ("weight_scale", "weight_zero_point") and not any(weight in stored for weight in weights):
                fail(tensor, f"stands without {prefix}.weight or {prefix}.weight_packed; download the folder again")
            if leaf == "weight_packed" or (leaf == "weight" and f"{prefix}.weight_scale" in stored):
                self._add_module(prefix, leaf == "weight_packed")

    def int4_words(self, module: QuantizedModule) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """The words of int4 that stands packed, its scales and zeros."""
        if module.stored.bits != 4 or module.stored.permuted:
            return None
        assert module.layer is not None
        scales, zeros = self._scales(module)
        place = group_places(module.stored, module.layer.weight, module.shape[1])
        return self.values(module), scales[:, place], None if zeros is None else zeros[:, place]

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """Of int8 that is not packed the values are views of the file."""
        scales, zeros = self._scales(module)
        columns = self.tensor(f"{module.name}.weight_g_idx").long() if module.stored.permuted else None
        values, format = self.values(module), module.stored
        if values.dtype == torch.int32:
            values = signed(unpack_columns(values, module.shape[1], format.bits), format.bits)
        return QuantizedWeight(format=format, values=values, scales=scales, zeros=zeros, columns=columns)

    def _scales(self, module: QuantizedModule) -> tuple[Tensor, Tensor | None]:
        """Scales (N, G) as they stand in the file, and zeros of the same shape: int8 for int8, else uint8."""
        n = module.shape[0]
        name = f"{module.name}.weight_scale"
        scales = self.tensor(name).view(n, -1)
        check_finite(name, scales, self.stored[name].file)
        if module.stored.symmetric:
            return scales, None
        zeros = self.tensor(f"{module.name}.weight_zero_point")
        if zeros.dtype == torch.int32:
            return scales, signed(unpack_rows(zeros, n, module.stored.bits), module.stored.bits)
        return scales, zeros.view(n, -1)

    def _add_module(self, name: str, packed: bool) -> None:
        dtype = "I32" if packed else "I8"
        weight = self.matrix(f"{name}.weight_packed" if packed else f"{name}.weight", dtype)
        scale = self.stored.get(f"{name}.weight_scale")
        if scale is None:
            fail(weight, f"lacks {name}.weight_scale beside it; download the folder again")
        if scale.dtype not in _SCALES or len(scale.shape) not in (1, 2):
            fail(scale, f"must be one of {', '.join(_SCALES)} by row and group; found {seen(scale)}")
        n = weight.shape[0]
        k, bits = self._true_columns(name, weight) if packed else (weight.shape[1], 8)
        zero = f"{name}.weight_zero_point"
        symmetric = zero not in self.stored
        fits = [
            group
            for group in self.groups
            if (wanted := group.layer.weight).bits == bits
            and wanted.symmetric == symmetric
            and scale.shape in ((n, wanted.groups(k)), *([(n,)] if not wanted.group_size else []))
        ]
        if not fits:
            asked = "; ".join(str(group.layer.weight) for group in self.groups[:3])
            fail(
                scale,
                f"is {seen(scale)}, beside a weight {n}×{k} of {bits} bits {'without' if symmetric else 'with'} "
                f"zero points: that fits none of config.json's groups ({asked})",
            )
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        self.beside(zero, (dtype,), *([(-(-n * bits // 32), groups)] if packed else [(n, groups), scale.shape]))
        if bits < 8 and scale.dtype == "F32":
            fail(scale, f"must be F16 or BF16 for int{bits}; found F32")
        # Of several groups that fit, those that name the module say more than those for all, and these than others'.
        named = [group for group in fits if name in group.targets]
        general = [group for group in fits if any(one == "Linear" or one.startswith("re:") for one in group.targets)]
        likely = named or general or fits
        chosen = likely[0].layer
        stored = replace(chosen.weight, scales=(Scales(DTYPES[scale.dtype], chosen.weight.group_size),))
        promised = all(group.ordered for group in likely)
        index = self.index(weight, f"{name}.weight_g_idx", k, promised=promised)
        self.add(weight, (n, k), stored, activations=chosen.activations, index=index)

    def _true_columns(self, name: str, weight: StoredTensor) -> tuple[int, int]:
        """K and the bits of a packed weight, whose own shape only tells the number of int32s."""
        shape = self.needed(weight, f"{name}.weight_shape", ("I64", "I32"), (2,))
        rows, columns = (int(x) for x in self.tensor(shape.name))
        n, words = weight.shape
        widths = sorted({group.layer.weight.bits for group in self.groups})
        found = [bits for bits in widths if -(-columns * bits // 32) == words]
        if rows != n or columns < 1 or not found:
            fail(weight, f"is {seen(weight)}, which does not hold the {rows}×{columns} values of {shape.name}")
        return columns, found[0]
