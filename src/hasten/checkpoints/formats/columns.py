"""The layouts of GPTQ and AWQ checkpoints: integers of input features one below the other, in int32 words.

Tensors of a linear module, in place of its `weight` (N, K), with G groups of input features:

  GPTQ (AutoGPTQ, GPTQModel)                             AWQ (AutoAWQ's "GEMM")
    qweight  int32 (K · bits / 32, N), packed along K      qweight  int32 (K, N / 8), packed along N
    qzeros   int32 (G, N · bits / 32), packed along N      qzeros   int32 (G, N / 8), likewise
    scales   float16 or bfloat16 (G, N)                    scales   float16 or bfloat16 (G, N)
    g_idx    int32 (K), the group of each input feature

GPTQ stores zero points less one, unless config.json's `checkpoint_format` is "gptq_v2". AWQ packs the eight values of
a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoints.checkpoint import DTYPES, StoredTensors, check_finite
from hasten.checkpoints.formats.file_format import ConfigFields, OpenFolder, QuantizedFolder, QuantizedModule, fail
from hasten.checkpoints.formats.packing import pack_columns, pack_rows, signed, unpack_columns, unsigned
from hasten.errors import ConfigError
from hasten.model.layer_format import Activations, LayerFormat, of_integers, own_activations
from hasten.ops.linear import QuantizedWeight, WeightFormat, int4_format

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_SCALES = ("F16", "BF16")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the values 0 … 7 are in a word


@dataclass(frozen=True, slots=True)
class ColumnsLayout:
    """Bits and group size (0: one group a row) of all modules, and how they are packed."""

    awq: bool
    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int  # what is added to a stored zero point
    ordered: bool = False  # each module says which group a column belongs to
    activations: Activations = "float"


class ColumnsFolder(QuantizedFolder):
    """GPTQ or AWQ."""

    def __init__(self, config: ColumnsLayout, stored: StoredTensors) -> None:
        super().__init__(stored, _SUFFIXES)
        self.config = config
        for name, tensor in stored.items():
            if name.endswith(".qweight"):
                self._add_module(name.removesuffix(".qweight"))
            elif name.endswith(_SUFFIXES) and f"{name.rpartition('.')[0]}.qweight" not in stored:
                fail(tensor, f"is there without {name.rpartition('.')[0]}.qweight; download the folder again")

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """Read a module's weight; the columns are in the file's order."""
        n, k = module.shape
        bits, words = self.config.bits, self.values(module)
        scales = self.tensor(f"{module.name}.scales").t().contiguous()
        check_finite(f"{module.name}.scales", scales, self.stored[f"{module.name}.scales"].file)
        zeros = self._unpacked(self.tensor(f"{module.name}.qzeros"), n).t().contiguous()  # (N, G)
        zeros = (zeros + self.config.zero_offset) & ((1 << bits) - 1)
        if self.config.awq:
            values = self._unpacked(words, n).t().contiguous()
        else:
            values = unpack_columns(words.t().contiguous(), k, bits)
        values, zeros = signed(values, bits), signed(zeros, bits)
        symmetric = module.stored.symmetric
        if symmetric and (zeros != module.stored.middle).any():
            fail(
                self.stored[f"{module.name}.qzeros"],
                f"holds other zero points than {module.stored.middle}, though config.json calls them symmetric",
            )
        columns = self.tensor(f"{module.name}.g_idx").long() if module.stored.permuted else None
        own = None if symmetric else zeros
        return QuantizedWeight(format=module.stored, values=values, scales=scales, zeros=own, columns=columns)

    def _unpacked(self, words: Tensor, columns: int) -> Tensor:
        """int32 (R, columns · bits / 32) packed along the columns -> uint8 (R, columns)."""
        values = unpack_columns(words, columns, self.config.bits)
        return values.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1) if self.config.awq else values

    def _add_module(self, name: str) -> None:
        config = self.config
        weight = self.matrix(f"{name}.qweight", "I32")
        rows, columns = weight.shape
        n, k = (columns * 8, rows) if config.awq else (columns, rows * 32 // config.bits)
        groups = -(-k // config.group_size) if config.group_size else 1
        dtype = DTYPES[self.needed(weight, f"{name}.scales", _SCALES, (groups, n)).dtype]
        self.needed(weight, f"{name}.qzeros", ("I32",), (groups, -(-n * config.bits // 32)))
        index = self.index(weight, f"{name}.g_idx", k, promised=config.ordered and groups > 1)
        stored = int4_format(config.group_size, symmetric=config.symmetric, scale_dtype=dtype, bits=config.bits)
        self.add(weight, (n, k), stored, activations=config.activations, index=index)


def read_gptq(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """AutoGPTQ and GPTQModel: 2, 3, 4 and 8 bits, any group size, both kinds of zero points, activation order."""
    fields = ConfigFields(where, given, method="gptq")
    fields.only(bits=(2, 3, 4, 8), checkpoint_format=(None, "gptq", "gptq_v2"))
    fields.only(dynamic=(None, {}), pack_dtype=(None, "int32"), desc_act=(None, False, True))
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    size, symmetric = _group_size(fields), given.get("sym", True) is True
    activations = own_activations(values, size)
    ordered = given.get("desc_act") is True
    return partial(ColumnsFolder, ColumnsLayout(False, given["bits"], size, symmetric, offset, ordered, activations))


def read_awq(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """AutoAWQ, packed for its GEMM kernel: 4 bits with zero points, any group size."""
    fields = ConfigFields(where, given, method="awq")
    fields.only(bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))
    return partial(ColumnsFolder, ColumnsLayout(True, 4, _group_size(fields), False, 0))


def read_auto_round(given: Any, values: Mapping[str, Any], where: Path) -> OpenFolder:
    """AutoRound's own: the tensors of GPTQ, in either convention, or of AWQ; `packing_format` says of which."""
    fields = ConfigFields(where, given, method="auto-round")
    packings = {f"auto_round:{name}": name for name in ("auto_gptq", "gptqmodel", "auto_awq")}
    fields.only(packing_format=tuple(packings), data_type=("int",), extra_config=(None, {}))
    if packings[given["packing_format"]] == "auto_awq":
        return read_awq(given, values, where)
    version = "gptq_v2" if packings[given["packing_format"]] == "gptqmodel" else None
    return read_gptq(given | {"checkpoint_format": version}, values, where)


class GPTQFormat:
    """The `WrittenFormat` of AutoGPTQ and GPTQModel."""

    method = "gptq"

    def check(self, layers: Mapping[str, LayerFormat]) -> None:
        """Integers of one format for all layers."""
        kinds = {
            (layer.weight.element, layer.weight.group_size, layer.weight.zero, layer.activations == "none")
            for layer in layers.values()
        }
        for name, layer in layers.items():
            weight = layer.weight
            if len(kinds) > 1 or not of_integers(weight) or weight.scale_dtype == torch.float32:
                raise ConfigError(
                    "GPTQ's layout takes integers of one width and group size in all layers, with scales in float16; "
                    f"found {name}: {weight}, scales in {str(weight.scale_dtype)[6:]}, among {len(kinds)} kinds. "
                    "Write --format compressed-tensors"
                )

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The four tensors; scales become float16 where that is exact."""
        format, (n, k) = weight.format, weight.shape
        if k * format.bits % 32 or n * format.bits % 32:
            raise ConfigError(f"GPTQ packs {n}×{k} values of {format.bits} bits in no whole words: leave it plain")
        scales = weight.scales.half()
        if not scales.is_meta and not torch.equal(scales.to(weight.scales.dtype), weight.scales):
            raise ConfigError(
                f"GPTQ's scales are float16, which does not hold those in {str(weight.scales.dtype)[6:]} exactly: "
                "write --format compressed-tensors"
            )
        values, zeros, columns = weight.values, weight.zeros, weight.columns
        if columns is None:
            columns = torch.arange(k) // (format.group_size or k)
        if zeros is None:
            zeros = torch.full_like(scales, format.middle, dtype=values.dtype)
        return {
            "qweight": pack_columns(unsigned(values), format.bits).t(),
            "qzeros": pack_rows(unsigned(zeros) - _zero_offset(format), format.bits).t(),
            "scales": scales.t(),
            "g_idx": columns.int(),
        }

    def write_config(self, layers: Mapping[str, LayerFormat], ignored: Sequence[str]) -> dict[str, Any]:
        """config.json's `quantization_config`."""
        layer = next(iter(layers.values()))
        config = {
            "quant_method": self.method,
            "bits": layer.weight.bits,
            "group_size": layer.weight.group_size or -1,
            "sym": layer.weight.symmetric,
            "desc_act": any(layer.weight.permuted for layer in layers.values()),
            "lm_head": "lm_head" in layers,
            "checkpoint_format": "gptq" if _zero_offset(layer.weight) else "gptq_v2",
            "pack_dtype": "int32",
        }
        return {"quantization_config": config}


def _zero_offset(format: WeightFormat) -> int:
    """What is subtracted from zero points in a written file: 1, which every reader knows, or 0 ("gptq_v2").

    With 1, a zero point of 0 cannot be stored.
    """
    return 1 if format.symmetric else 0


def _group_size(fields: ConfigFields) -> int:
    """0: all of a row."""
    found = fields.values.get("group_size", fields.values.get("q_group_size", -1))
    if type(found) is not int or (found < 1 and found != -1):
        fields.fail("group_size", "a number of input features, or -1", found)
    return max(0, found)
