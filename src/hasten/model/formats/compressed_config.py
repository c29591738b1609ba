"""Reading compressed-tensors' `quantization_config`: what is understood, and one clear error that names the field for
the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten.model.formats.config_fields import ConfigFields
from hasten.model.formats.record import GROUP_SIZES, Activations, LayerFormat
from hasten.ops.linear.weights import Scales, WeightFormat, int4_format

FORMATS = PACKED, W8A8, WEIGHT_ONLY, MIXED = "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """One of the ways in which a checkpoint's layers are quantized; the dtype of int4 scales is that of their tensors.

    targets are the names that the group lists; a layer is matched by its tensors first, by name where that leaves a
    choice (patterns are not run: they come from the checkpoint).
    """

    targets: tuple[str, ...]
    layer: LayerFormat


def read_groups(given: Any, values: Mapping[str, Any], where: Path) -> tuple[ConfigGroup, ...]:
    """The ways of quantizing that `given`, the quantization_config of a config.json's `values`, names.

    Understood are weights of 2, 3, 4 and 8 bits with scales by group or by row, with or without zero points.
    CheckpointError names the field that asks for anything else.
    """
    fields = ConfigFields(where, given)
    fields.only(format=(*FORMATS, None))
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        section = fields.values.get(name)
        if section and not (isinstance(section, dict) and section.get("format") in ("dense", "")):
            fields.fail(name, "absent: hasten does not do that", section)
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= 1000:
        fields.fail("config_groups", "an object with one group or more", groups)
    private = values.get("hasten")
    ours = private.get("activations") if isinstance(private, dict) else None
    return tuple(
        _group(ConfigFields(where, group, f"config_groups.{name!s:.40}."), ours) for name, group in groups.items()
    )


def _group(group: ConfigFields, own_activations: Any) -> ConfigGroup:
    group.only(format=(PACKED, W8A8, WEIGHT_ONLY, None), output_activations=(None,))
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        group.fail("targets", "a list of names", targets)
    weights = ConfigFields(group.where, group.values.get("weights"), f"{group.prefix}weights.")
    # actorder "weight" and "static" only order the calibration; "group" needs an index of the columns.
    weights.only(
        num_bits=(2, 3, 4, 8),
        type=("int", None),
        dynamic=(False, None),
        symmetric=(True, False, None),
        strategy=("group", "channel"),
        actorder=(None, False, "weight", "static"),
        block_structure=(None,),
    )
    bits, symmetric, size = weights.values.get("num_bits"), weights.values.get("symmetric") is not False, 0
    if weights.values.get("strategy") == "group":
        size = weights.values.get("group_size")
        if type(size) is not int or size < 1:
            weights.fail("group_size", "a number of input features", size)
        if bits == 4 and size not in GROUP_SIZES and size % GROUP_SIZES[-1]:
            weights.fail("group_size", "32, 64 or a multiple of 128", size)
    activations: Activations = "int8" if own_activations == "int8" else "float"
    if group.values.get("input_activations") is not None:
        inputs = ConfigFields(group.where, group.values.get("input_activations"), f"{group.prefix}input_activations.")
        inputs.only(num_bits=(8,), type=("int", None), symmetric=(True, None), strategy=("token",), dynamic=(True,))
        activations = "int8"
    format = int4_format(size, symmetric=symmetric, bits=bits)
    if bits == 8:
        format = WeightFormat(element="int8", scales=(Scales(torch.float32, size),), zero=format.zero)
    return ConfigGroup(tuple(targets), LayerFormat(format, activations))
