"""How one layer of a model is quantized: in a checkpoint, in its kernel, and in a saved file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hasten.ops.linear.weights import (
    INT8,
    K_QUANTS,
    MXFP4,
    QuantizedWeight,
    WeightFormat,
    fp8_format,
    minimum_format,
)

GROUP_SIZES = (32, 64, 128)  # that kernels multiply

Activations = Literal["int8", "float", "none"]


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """How one linear layer is stored, and how it is multiplied: activations "int8" rounds each input row to int8 before
    the product, "float" does not; "none": an embedding, whose rows are looked up.
    """

    weight: WeightFormat
    activations: Activations = "int8"


def is_w8a8(layers: Iterable[LayerFormat]) -> bool:
    """Whether all layers are int8 by row with activations rounded by token, which is published as W8A8."""
    return all(layer == LayerFormat(INT8, "int8") for layer in layers)


def held_format(stored: WeightFormat) -> WeightFormat | None:
    """The format in which a kernel holds a stored format exactly, or None.

    Groups wider than the kernel's widest are split into several with the same scale, and so are blocks of several rows.
    Integers of 3 and 2 bits are held as int4.
    """
    size = stored.group_size
    if stored.element == "int8" and not size and stored.symmetric:
        return INT8
    if stored in (*K_QUANTS, MXFP4, minimum_format("int4"), minimum_format("int5")):
        return stored
    if len(stored.scales) != 1 or stored.zero == "minimum" or (size not in GROUP_SIZES and size % GROUP_SIZES[-1]):
        return None
    if stored.element == "float8_e4m3fn":
        return fp8_format(min(size, GROUP_SIZES[-1]))
    if stored.element in ("int3", "int2"):
        stored = replace(stored, element="int4")
    if stored.element not in ("int4", "int8") and not (stored.element in ("int5", "iq4") and stored.symmetric):
        return None
    columns = min(size or GROUP_SIZES[-1], GROUP_SIZES[-1])
    return replace(stored, scales=(replace(stored.scales[0], columns=columns),))


def activation_group(layer: LayerFormat, in_features: int) -> int:
    """Number of inputs that share a scale if the layer's product rounds them to int8; 0 if it does not."""
    held = held_format(layer.weight)
    return 0 if held is None or layer.activations != "int8" else held.group_size or in_features


def of_integers(weight: WeightFormat) -> bool:
    """Whether the format can be written: integers with one level of scales."""
    integers = weight.element in ("int8", "int4", "int3", "int2")
    return integers and len(weight.scales) == 1 and weight.zero != "minimum"


def group_places(stored: WeightFormat, held: WeightFormat, in_features: int) -> Tensor:
    """The stored group that contains each group of the held format, int64 (G,)."""
    sizes = [format.group_size or in_features for format in (held, stored)]
    return torch.arange(held.groups(in_features)) * sizes[0] // sizes[1]


def regrouped(whole: QuantizedWeight, held: WeightFormat) -> QuantizedWeight:
    """Convert a weight to the format that its layer holds: the same integers, scales and zeros for its groups.

    Integers of fewer bits keep their distance from zero.
    """
    place = group_places(whole.format, held, whole.shape[1])
    zeros, columns, more = whole.zeros, whole.columns, held.middle - whole.format.middle
    return replace(
        whole,
        format=held,
        values=whole.values + more if more and held.symmetric else whole.values,
        scales=whole.scales[:, place].to(held.scale_dtype),
        zeros=None if zeros is None else zeros[:, place],
        columns=None if columns is None else columns.argsort(stable=True).argsort() // held.group_size,
    )


def as_stored(held: QuantizedWeight, stored: WeightFormat) -> QuantizedWeight:
    """The inverse of `regrouped`: the weight that a layer holds in the format that it was quantized to."""
    if replace(held.format, permuted=stored.permuted) == stored:
        return held
    k, less = held.shape[1], held.format.middle - stored.middle
    # The first of the held groups in each stored one; all of these have the same scale.
    place = torch.arange(stored.groups(k)) * (stored.group_size or k) // (held.format.group_size or k)
    return replace(
        held,
        format=stored,
        values=held.values - less if less and stored.symmetric else held.values,
        scales=held.scales[:, place].to(stored.scale_dtype),
        zeros=None if held.zeros is None else held.zeros[:, place],
    )


def own_activations(values: Mapping[str, Any], group_size: int) -> Activations:
    """Read the activations for weights of a group size from the values of a config.json, under our own key."""
    private = values.get("hasten")
    said = private.get("activations") if isinstance(private, dict) else None
    if isinstance(said, dict):
        said = said.get(_strategy(group_size))
    return "int8" if said == "int8" else "float"


def written_activations(layers: Iterable[LayerFormat]) -> dict[str, Any]:
    """The values that `own_activations` reads: one word for all layers, or one for groups and one for rows."""
    found: dict[str, Activations] = {}
    for layer in layers:
        if layer.activations != "none":
            # If two are by row (quantization-aware training with an int8 head), the blocks' format comes first.
            found.setdefault(_strategy(layer.weight.group_size), layer.activations)
    if not found:
        return {}
    return {"activations": found if len(set(found.values())) > 1 else next(iter(found.values()))}


def _strategy(group_size: int) -> str:
    """The name of this grouping in compressed-tensors."""
    return "group" if group_size else "channel"
