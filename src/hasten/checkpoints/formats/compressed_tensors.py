"""The layout of the compressed-tensors package (github.com/vllm-project/compressed-tensors): names, shapes, config.

Tensors of a linear module, in place of its `weight` (N, K):

  int4, int3, int2, 8 bits, "pack-quantized"              int8, "int-quantized"
    weight_packed      int32 (N, ceil(K · bits / 32))       weight        int8 (N, K)
    weight_scale       float16 or bfloat16 (N, G)           weight_scale  float32 (N, 1)
    weight_zero_point  int32 (ceil(N · bits / 32), G), asymmetric
    weight_shape       int64 (2): N, K
    weight_g_idx       int32 (K), the group of each column, where they do not follow each other (actorder "group")

Plain int8 is written where all layers are int8 and round their activations, and none is an expert or an embedding;
else int8 is packed too (weight_packed, four to an int32, and weight_shape). Plain, transformers reads no experts, and
vLLM no embedding and no layer without rounded activations. An embedding that is also the head is in the file once,
under its own name; the config names both.

config.json says so under `quantization_config`. Where all layers are int8 and round their activations too, it says what
is published as W8A8 ("int-quantized", dynamic by token); everything else is weight-only there. Whether our products
still round the activations of those layers (by group for int4, which has no published name) is recorded beside it,
under our own key `hasten` (record.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoints.formats.compressed_reader import MIXED, PACKED, W8A8
from hasten.checkpoints.formats.packing import pack_columns, pack_rows, unsigned
from hasten.errors import ConfigError
from hasten.model.layer_format import LayerFormat, is_w8a8, of_integers
from hasten.ops.linear import INT8, QuantizedWeight, WeightFormat


class CompressedTensors:
    """The `WrittenFormat`. pack_int8: int8 layers are packed too."""

    method = "compressed-tensors"

    def __init__(self, *, pack_int8: bool = False) -> None:
        self.pack_int8 = pack_int8

    def check(self, layers: Mapping[str, LayerFormat]) -> None:
        """Integers of 2, 3, 4 and 8 bits are held."""
        for name, layer in layers.items():
            if not of_integers(layer.weight):
                raise ConfigError(f"{name} ({layer.weight}): in compressed-tensors' layout hasten writes integers")

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors that store a weight (N, K), by the suffix after the module's name."""
        bits = weight.format.bits
        if not self._packs(weight.format):
            return {"weight": weight.values, "weight_scale": weight.scales}
        tensors = {
            "weight_packed": pack_columns(unsigned(weight.values), bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if weight.zeros is not None:
            tensors["weight_zero_point"] = pack_rows(unsigned(weight.zeros), bits)
        return tensors if weight.columns is None else tensors | {"weight_g_idx": weight.columns.int()}

    def write_config(self, layers: Mapping[str, LayerFormat], ignored: Sequence[str]) -> dict[str, Any]:
        """config.json's `quantization_config`."""
        kinds: dict[LayerFormat, list[str]] = {}
        for name, layer in layers.items():
            kinds.setdefault(layer, []).append(name)
        w8a8 = is_w8a8(kinds)
        linears = [kind for kind in kinds if kind.activations != "none"]
        most = max(linears, key=lambda kind: len(kinds[kind]), default=None)  # none: an embedding alone
        groups = {}
        # The kind of most layers is the one of all modules of class Linear that no other group names.
        for i, (kind, names) in enumerate(sorted(kinds.items(), key=lambda item: item[0] != most)):
            groups[f"group_{i}"] = {
                "targets": ["Linear"] if kind == most else names,
                "weights": _weight_arguments(kind.weight),
                "input_activations": _ROUNDED_BY_TOKEN if w8a8 else None,
                "output_activations": None,
                "format": self._format(kind.weight),
            }
        formats = {self._format(kind.weight) for kind in kinds}
        config = {
            "quant_method": self.method,
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }
        return {"quantization_config": config}

    def _format(self, weight: WeightFormat) -> str:
        return PACKED if self._packs(weight) else W8A8

    def _packs(self, weight: WeightFormat) -> bool:
        return weight != INT8 or self.pack_int8


_ROUNDED_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _weight_arguments(weight: WeightFormat) -> dict[str, Any]:
    return {
        "num_bits": weight.bits,
        "type": "int",
        "symmetric": weight.symmetric,
        "strategy": "group" if weight.group_size else "channel",
        "group_size": weight.group_size or None,
        "actorder": "group" if weight.permuted else None,
        "dynamic": False,
    }
