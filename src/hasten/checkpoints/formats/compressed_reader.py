"""Reading compressed-tensors: its `quantization_config`, of which one clear error names what is not understood, and the
modules in a checkpoint folder, their tensors checked by their headers against each other and the config.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from hasten.checkpoints.formats.floats import FP4Folder, FP4Layout, FP8Folder, block_of, packed_fp4
from hasten.checkpoints.formats.packing import signed, unpack_columns, unpack_rows
from hasten.errors import HastenWarning
from hasten.model.layer_format import LayerFormat, group_places, own_activations
from hasten.ops.linear.weights import QuantizedWeight, Scales, WeightFormat, int4_format

FORMATS = PACKED, W8A8, WEIGHT_ONLY, MIXED = "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"
FLOATS = "float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", WEIGHT_ONLY, MIXED
_SCALES = ("F16", "BF16", "F32")
_SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """One of the ways in which a checkpoint's layers are quantized; the dtype of int4 scales is that of their tensors.

    targets are the names that the group lists; a layer is matched by its tensors first, by name where that leaves a
    choice (patterns are not run: they come from the checkpoint).
    """

    targets: tuple[str, ...]
    layer: LayerFormat
    ordered: bool  # each module says which group a column belongs to


def read_compressed(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """The ways of quantizing that `given`, the quantization_config of a config.json's `values`, names.

    Understood are weights of 2, 3, 4 and 8 bits with scales by group or by row, with or without zero points, and floats
    in the layouts of floats.py. CheckpointError names the field that asks for anything else.
    """
    if (floats := read_floats(given, where)) is not None:
        return floats
    groups = _groups(ConfigFields(where, given), FORMATS)
    return partial(CompressedFolder, tuple(_group(group, values) for group in groups))


def read_floats(given: Any, where: Path) -> OpenFolder | None:
    """What `given` says of weights that are floats, all of one kind; None where it speaks of integers.

    A warning says that activations are not rounded, where it asks for that.
    """
    sections = given.get("config_groups")
    groups = [one for one in sections.values() if isinstance(one, dict)] if isinstance(sections, dict) else []
    weights = [one for group in groups if isinstance(one := group.get("weights"), dict)]
    if all(one.get("type") != "float" for one in weights):
        return None
    found: dict[FP4Layout | tuple[int, int] | None, ConfigFields] = {}
    for group in _groups(ConfigFields(where, given), FLOATS):
        if group.values.get("input_activations") is not None:
            text = f"{where} asks for rounded activations; hasten keeps theirs in 16 bits"
            warnings.warn(text, HastenWarning, stacklevel=5)
        found[_float_weights(ConfigFields(where, group.values.get("weights"), f"{group.prefix}weights."))] = group
    if len(found) > 1:
        [*found.values()][1].fail("weights", "the same in all groups, of floats", "another")
    layout = next(iter(found))
    return partial(FP4Folder, layout) if isinstance(layout, FP4Layout) else partial(FP8Folder, layout)


def _float_weights(weights: ConfigFields) -> FP4Layout | tuple[int, int] | None:
    """How FP4 is laid out, or the blocks of FP8 as `FP8Folder` takes them."""
    weights.only(num_bits=(4, 8), type=("float",), dynamic=(False, None), symmetric=(True, None))
    if weights.values["num_bits"] == 4:
        weights.only(group_size=(16, 32), strategy=("group", "tensor_group"))
        return packed_fp4(weights.values["group_size"])
    weights.only(strategy=("tensor", "channel", "block"))
    return block_of(weights, "block_structure") if weights.values["strategy"] == "block" else None


def _groups(fields: ConfigFields, formats: tuple[str, ...]) -> list[ConfigFields]:
    """The config's groups; raises CheckpointError for other fields that hasten does not understand."""
    fields.only(format=(*formats, None))
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        section = fields.values.get(name)
        if section and not (isinstance(section, dict) and section.get("format") in ("dense", "")):
            fields.fail(name, "absent: hasten does not do that", section)
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= 1000:
        fields.fail("config_groups", "an object with one group or more", groups)
    return [ConfigFields(fields.where, group, f"config_groups.{name!s:.40}.") for name, group in groups.items()]


def _group(group: ConfigFields, values: Mapping[str, Any]) -> ConfigGroup:
    group.only(format=(PACKED, W8A8, WEIGHT_ONLY, None), output_activations=(None,))
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        group.fail("targets", "a list of names", targets)
    weights = ConfigFields(group.where, group.values.get("weights"), f"{group.prefix}weights.")
    # actorder "weight" and "static" only order the calibration; the others come with an index of the columns.
    weights.only(
        num_bits=(2, 3, 4, 8),
        type=("int", None),
        dynamic=(False, None),
        symmetric=(True, False, None),
        strategy=("group", "channel"),
        actorder=(None, False, "weight", "static", "group", "dynamic"),
        block_structure=(None,),
    )
    bits, symmetric, size = weights.values.get("num_bits"), weights.values.get("symmetric") is not False, 0
    if weights.values.get("strategy") == "group":
        size = weights.values.get("group_size")
        if type(size) is not int or size < 1:
            weights.fail("group_size", "a number of input features", size)
    activations = own_activations(values, size)
    if group.values.get("input_activations") is not None:
        inputs = ConfigFields(group.where, group.values.get("input_activations"), f"{group.prefix}input_activations.")
        inputs.only(num_bits=(8,), type=("int", None), symmetric=(True, None), strategy=("token",), dynamic=(True,))
        activations = "int8"
    format = int4_format(size, symmetric=symmetric, bits=bits)
    if bits == 8:
        format = WeightFormat(element="int8", scales=(Scales(torch.float32, size),), zero=format.zero)
    ordered = bool(size) and weights.values.get("actorder") in ("group", "dynamic")
    return ConfigGroup(tuple(targets), LayerFormat(format, activations), ordered)


class CompressedFolder(QuantizedFolder):
    """compressed-tensors: every module's tensors fit each other and one of the config's groups.

    Made from headers, and the `weight_shape` (two numbers) of each packed module.
    """

    def __init__(self, groups: tuple[ConfigGroup, ...], stored: StoredTensors) -> None:
        super().__init__(stored, _SUFFIXES)
        self.groups = groups
        for name, tensor in stored.items():
            prefix, dot, leaf = name.rpartition(".")
            if not dot:  # of no module
                continue
            weights = f"{prefix}.weight", f"{prefix}.weight_packed"
            if leaf in ("weight_scale", "weight_zero_point") and not any(weight in stored for weight in weights):
                fail(tensor, f"is there without {prefix}.weight or {prefix}.weight_packed; download the folder again")
            if leaf == "weight_packed" or (leaf == "weight" and f"{prefix}.weight_scale" in stored):
                self._add_module(prefix, leaf == "weight_packed")

    def int4_words(self, module: QuantizedModule) -> QuantizedWeight | None:
        """The packed int32 words of an int4 module as they are in the file; None for other modules."""
        if module.stored.bits != 4 or module.stored.permuted:
            return None
        assert module.layer is not None
        held, (scales, zeros) = module.layer.weight, self._scales(module)
        place = group_places(module.stored, held, module.shape[1])
        zeros = None if zeros is None else zeros[:, place]
        return QuantizedWeight(format=held, values=self.values(module), scales=scales[:, place], zeros=zeros)

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """Read a module's weight; values of int8 that is not packed are views of the file."""
        scales, zeros = self._scales(module)
        columns = self.tensor(f"{module.name}.weight_g_idx").long() if module.stored.permuted else None
        values, format = self.values(module), module.stored
        if values.dtype == torch.int32:
            values = signed(unpack_columns(values, module.shape[1], format.bits), format.bits)
        return QuantizedWeight(format=format, values=values, scales=scales, zeros=zeros, columns=columns)

    def _scales(self, module: QuantizedModule) -> tuple[Tensor, Tensor | None]:
        """Scales (N, G) as they are in the file, and zeros of the same shape: int8 for int8, else uint8."""
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
        # Groups that name the module override those for all Linear layers, which override the remaining ones.
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
