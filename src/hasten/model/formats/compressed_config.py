"""Reading compressed-tensors' `quantization_config`: what is understood, and one clear error that names the field for
the rest.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hasten.errors import HastenWarning
from hasten.model.formats.file_format import ConfigFields, OpenFolder
from hasten.model.formats.floats import FP4Folder, FP4Layout, FP8Folder, block_of, packed_fp4
from hasten.model.formats.record import Activations, LayerFormat, own_activations
from hasten.ops.linear.weights import Scales, WeightFormat, int4_format

FORMATS = PACKED, W8A8, WEIGHT_ONLY, MIXED = "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"
FLOATS = "float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", WEIGHT_ONLY, MIXED


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """One of the ways in which a checkpoint's layers are quantized; the dtype of int4 scales is that of their tensors.

    targets are the names that the group lists; a layer is matched by its tensors first, by name where that leaves a
    choice (patterns are not run: they come from the checkpoint).
    """

    targets: tuple[str, ...]
    layer: LayerFormat
    ordered: bool  # each module says which group a column belongs to


def read_groups(given: Any, values: Mapping[str, Any], where: Path) -> tuple[ConfigGroup, ...]:
    """The ways of quantizing that `given`, the quantization_config of a config.json's `values`, names.

    Understood are weights of 2, 3, 4 and 8 bits with scales by group or by row, with or without zero points.
    CheckpointError names the field that asks for anything else.
    """
    ours = own_activations(values)
    groups = _groups(ConfigFields(where, given), FORMATS)
    return tuple(_group(group, ours) for group in groups)


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
    """The config's groups; CheckpointError for what stands beside them and is not understood."""
    fields.only(format=(*formats, None))
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        section = fields.values.get(name)
        if section and not (isinstance(section, dict) and section.get("format") in ("dense", "")):
            fields.fail(name, "absent: hasten does not do that", section)
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= 1000:
        fields.fail("config_groups", "an object with one group or more", groups)
    return [ConfigFields(fields.where, group, f"config_groups.{name!s:.40}.") for name, group in groups.items()]


def _group(group: ConfigFields, activations: Activations) -> ConfigGroup:
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
    if group.values.get("input_activations") is not None:
        inputs = ConfigFields(group.where, group.values.get("input_activations"), f"{group.prefix}input_activations.")
        inputs.only(num_bits=(8,), type=("int", None), symmetric=(True, None), strategy=("token",), dynamic=(True,))
        activations = "int8"
    format = int4_format(size, symmetric=symmetric, bits=bits)
    if bits == 8:
        format = WeightFormat(element="int8", scales=(Scales(torch.float32, size),), zero=format.zero)
    ordered = bool(size) and weights.values.get("actorder") in ("group", "dynamic")
    return ConfigGroup(tuple(targets), LayerFormat(format, activations), ordered)
