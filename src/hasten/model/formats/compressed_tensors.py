"""The layout of the compressed-tensors package (github.com/vllm-project/compressed-tensors): names, shapes, config.

Beside a linear module's bias stand, in place of its `weight` (N, K):

  int4, "pack-quantized"                                  int8, "int-quantized" or "naive-quantized"
    weight_packed      int32 (N, ceil(K / 8))               weight        int8 (N, K)
    weight_scale       float16 or bfloat16 (N, G)           weight_scale  float32 (N, 1)
    weight_zero_point  int32 (ceil(N / 8), G), asymmetric
    weight_shape       int64 (2): N, K

Where a model has experts, its int8 layers are packed too (weight_packed, four to an int32, and weight_shape): of plain
int8 transformers reads no experts.

config.json says so under `quantization_config`. Where all layers are int8 and round their activations too, it says what
is published as W8A8 ("int-quantized", dynamic by token); everything else is weight-only there. That our products round
the activations of those layers all the same (by group for int4, for which there is no name) stands beside it, under our
own key `hasten`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.model.formats.packing import pack_bytes, pack_columns, pack_rows
from hasten.model.formats.record import LayerFormat
from hasten.model.formats.stream import TensorSpec
from hasten.ops.linear import QuantizedWeight

METHOD = "compressed-tensors"
PACKED, W8A8, WEIGHT_ONLY, MIXED = "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"


def tensor_specs(layer: LayerFormat, n: int, k: int, *, packed8: bool = False) -> dict[str, TensorSpec]:
    """The tensors that stand for a weight (N, K), by what follows the module's name. packed8: int8 is packed too."""
    if layer.bits == 8 and packed8:
        return {
            "weight_packed": TensorSpec(torch.int32, (n, -(-k // 4))),
            "weight_scale": TensorSpec(torch.float32, (n, 1)),
            "weight_shape": TensorSpec(torch.int64, (2,)),
        }
    if layer.bits == 8:
        return {"weight": TensorSpec(torch.int8, (n, k)), "weight_scale": TensorSpec(torch.float32, (n, 1))}
    groups = -(-k // layer.group_size)
    specs = {
        "weight_packed": TensorSpec(torch.int32, (n, -(-k // 8))),
        "weight_scale": TensorSpec(layer.scale_dtype, (n, groups)),
        "weight_shape": TensorSpec(torch.int64, (2,)),
    }
    if not layer.symmetric:
        specs["weight_zero_point"] = TensorSpec(torch.int32, (-(-n // 8), groups))
    return specs


def encode(weight: QuantizedWeight, *, packed8: bool = False) -> dict[str, Tensor]:
    """The tensors of `tensor_specs` with the numbers of a weight."""
    if weight.bits == 8 and not packed8:
        return {"weight": weight.values, "weight_scale": weight.scales}
    tensors = {
        "weight_packed": pack_columns(weight.values) if weight.bits == 4 else pack_bytes(weight.values),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack_rows(weight.zeros)
    return tensors


def quantization_config(
    layers: Mapping[str, LayerFormat], ignored: Sequence[str], *, packed8: bool = False
) -> dict[str, Any]:
    """config.json's `quantization_config`. layers: published module names; ignored: linear ones left as they are."""
    kinds: dict[LayerFormat, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault(layer, []).append(name)
    rounded = _is_w8a8(layers)
    most = max(kinds, key=lambda kind: len(kinds[kind]))
    groups = {}
    # The kind of most layers is the one of all modules of class Linear that no other group names.
    for i, (kind, names) in enumerate(sorted(kinds.items(), key=lambda item: item[0] != most)):
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if kind == most else names,
            "weights": _weight_arguments(kind),
            "input_activations": _ROUNDED_BY_TOKEN if rounded else None,
            "output_activations": None,
            "format": _format(kind, packed8, rounded),
        }
    formats = {_format(kind, packed8, rounded) for kind in kinds}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def private_config(layers: Mapping[str, LayerFormat]) -> dict[str, Any]:
    """config.json's `hasten`: how products with weights that are all the file speaks of treat their activations."""
    return {} if _is_w8a8(layers) else {"activations": next(iter(layers.values())).activations}


def _is_w8a8(layers: Mapping[str, LayerFormat]) -> bool:
    return all(layer.bits == 8 and layer.activations == "int8" for layer in layers.values())


_ROUNDED_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _format(layer: LayerFormat, packed8: bool, rounded: bool) -> str:
    if layer.bits == 4 or packed8:
        return PACKED
    return W8A8 if rounded else WEIGHT_ONLY


def _weight_arguments(layer: LayerFormat) -> dict[str, Any]:
    return {
        "num_bits": layer.bits,
        "type": "int",
        "symmetric": layer.symmetric,
        "strategy": "group" if layer.group_size else "channel",
        "group_size": layer.group_size or None,
        "dynamic": False,
    }
