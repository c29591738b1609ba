"""A published layout of quantized weights: what reads and writes it, and a folder in it as the loader sees it.

The rest of the loader sees a folder in which every quantized module has a plain `weight` of its true shape; it locates
and checks it as ever, and `checkpoints/fill_quantized.py` fills it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hasten.checkpoints.checkpoint import StoredTensor, StoredTensors, check_finite
from hasten.errors import CheckpointError
from hasten.model.layer_format import Activations, LayerFormat, held_format, regrouped
from hasten.ops.linear import QuantizedWeight, WeightFormat
from hasten.ops.linear.blocks import GgufBlocks

BLOCK_ELEMENTS = 1 << 20  # of a weight that are in float32 at a time
INDEX = ("I32", "I64")  # of a tensor that says to which group each column belongs


class ConfigFields:
    """Values of one object of a quantization_config, and errors that say where in the file it is.

    prefix: the object's place in it. method: the `quant_method`, where an error should name it.
    """

    def __init__(self, where: Path, values: Any, prefix: str = "", *, method: str = "") -> None:
        self.where, self.values, self.prefix, self.method = where, values, prefix, method
        if not isinstance(values, dict):
            self.prefix = prefix.rstrip(".")
            self.fail("", "an object", values)

    def only(self, **known: tuple[Any, ...]) -> None:
        """Refuse a value that is none of those known for its name; None: the name may be absent."""
        for name, values in known.items():
            found = self.values.get(name)
            if not any(found is one or (type(found) is type(one) and found == one) for one in values):
                self.fail(name, " or ".join("absent" if one is None else repr(one) for one in values), found)

    def fail(self, name: str, wanted: str, found: Any) -> NoReturn:
        """CheckpointError for a field."""
        place = f"quantization_config.{self.prefix}{name}".rstrip(".")
        method = f" ({self.method})" if self.method else ""
        raise CheckpointError(
            f"{self.where}: {place}{method} must be {wanted}; found {found!r:.60}. "
            "hasten reads weights of 2, 3, 4 and 8 bits: take such a checkpoint, or the unquantized one and "
            "`hasten quantize`"
        )


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """One quantized linear module of a folder: its published name, its true shape, how the file stores it.

    shape: (N, K), or (E, N, K) of the stacked matrices of E experts. layer: how a packed layer holds it (its groups may
    be parts of the file's), or None where no kernel can. values: the name of the tensor with its values. type: the
    file's own name of the format (Q4_1), or "".
    """

    name: str
    shape: tuple[int, ...]
    stored: WeightFormat
    layer: LayerFormat | None
    values: str
    type: str = ""


class QuantizedFolder:
    """A folder's quantized modules, by the name of the plain weight that each replaces, and how to read them.

    A layout finds its modules (`add`) and reads their numbers (`weight`); it refuses tensors that do not fit each other
    with CheckpointError. `tensor` reads one by name. logical: the folder's tensors as the loader sees them, without
    those that end in `aside`.
    """

    def __init__(self, stored: StoredTensors, aside: tuple[str, ...] = ()) -> None:
        self.stored, self.tensor = stored, stored.read
        self.modules: dict[str, QuantizedModule] = {}
        self.logical = {name: tensor for name, tensor in stored.items() if not (aside and name.endswith(aside))}

    def add(
        self,
        weight: StoredTensor,
        shape: tuple[int, int],
        stored: WeightFormat,
        *,
        activations: Activations = "float",
        index: StoredTensor | None = None,
        type: str = "",
    ) -> None:
        """Add the module whose values are in the tensor `weight`. index: the group of each input feature (K,)."""
        held = held_format(stored)
        if index is not None:
            stored, held = _ordered(stored, self.tensor(index.name), shape[1], index)
        module = weight.name.rpartition(".")[0]
        layer, name = None if held is None else LayerFormat(held, activations), f"{module}.weight"
        self.modules[name] = QuantizedModule(module, shape, stored, layer, weight.name, type)
        self.logical[name] = StoredTensor(name, "BF16", shape, weight.file)

    def matrix(self, name: str, dtype: str) -> StoredTensor:
        """A tensor of two dimensions; CheckpointError for anything else."""
        found = self.stored[name]
        if found.dtype != dtype or len(found.shape) != 2:
            fail(found, f"must be a matrix of {dtype}; found {seen(found)}")
        return found

    def beside(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> StoredTensor | None:
        """An optional tensor of a module, or None; CheckpointError for a dtype or shape that is not one of these."""
        found = self.stored.get(name)
        if found is not None and (found.dtype not in dtypes or found.shape not in shapes):
            wanted = " or ".join(str(list(shape)) if shape else "one number" for shape in shapes)
            fail(found, f"must be {' or '.join(dtypes)} {wanted} beside its weight; found {seen(found)}")
        return found

    def needed(self, weight: StoredTensor, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> StoredTensor:
        """`beside`, of a tensor without which `weight` cannot be read."""
        found = self.beside(name, dtypes, *shapes)
        if found is None:
            fail(weight, f"lacks {name} ({' or '.join(dtypes)}) beside it; download the folder again")
        return found

    def index(self, weight: StoredTensor, name: str, columns: int, *, promised: bool) -> StoredTensor | None:
        """The groups of a module's columns (K,). promised: config.json says that they are in another order, which
        nothing else tells; without it the weight would be a wrong one.
        """
        if promised:
            return self.needed(weight, name, INDEX, (columns,))
        return self.beside(name, INDEX, (columns,))

    def weight(self, module: QuantizedModule) -> QuantizedWeight:
        """The numbers as the file groups them, a byte for each integer."""
        raise NotImplementedError(module.name)

    def read(self, module: QuantizedModule) -> QuantizedWeight:
        """The numbers as the module's layer holds them; `layer` is not None."""
        assert module.layer is not None
        weight, held = self.weight(module), module.layer.weight
        return weight if weight.format == held else regrouped(weight, held)

    def int4_words(self, module: QuantizedModule) -> QuantizedWeight | None:
        """Read a module with its values as int32 words, for PackedLinear.from_int4_words; None if they are stored
        differently.
        """
        return None

    def blocks(self, module: QuantizedModule) -> GgufBlocks | None:
        """Read a weight as the blocks of a GGUF file; None where it is not stored as such."""
        return None

    def dequantize(self, module: QuantizedModule, dtype: torch.dtype) -> Tensor:
        """The plain weight (N, K) of a module, each number rounded once, to `dtype`.

        Computed a few rows at a time, so that little of it is in float32 at once.
        """
        (n, k), plain, name = module.shape, self.plain_rows(module), f"{module.name}.weight"
        weight = torch.empty(n, k, dtype=dtype)
        step = max(1, BLOCK_ELEMENTS // k)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            weight[part] = plain(part).to(dtype)
        check_finite(name, weight, self.logical[name].file)
        return weight

    def plain_rows(self, module: QuantizedModule) -> Callable[[slice], Tensor]:
        """A function that returns some rows of the weight in float32."""
        whole = self.weight(module)
        return lambda rows: whole.rows(rows).dequantize()

    def values(self, module: QuantizedModule) -> Tensor:
        """The mapped tensor of the module's values, as it is in the file."""
        return self.tensor(module.values)


OpenFolder = Callable[[StoredTensors], QuantizedFolder]  # what a config says of the folder beside it, which reads that


class WrittenFormat(Protocol):
    """A published layout of quantized weights that is written."""

    method: str  # `quant_method` in config.json's quantization_config

    def check(self, layers: Mapping[str, LayerFormat]) -> None:
        """ConfigError where this layout cannot hold weights of these formats exactly: which, and what to do."""

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors that store a weight (N, K), by the suffix after the module's name; on the meta device too.

        ConfigError where its numbers cannot be held exactly.
        """

    def write_config(self, layers: Mapping[str, LayerFormat], ignored: Sequence[str]) -> dict[str, Any]:
        """The config.json entry for layers, by published module names, and for linear ones left as they are."""


def _ordered(
    stored: WeightFormat, index: Tensor, in_features: int, where: StoredTensor
) -> tuple[WeightFormat, WeightFormat | None]:
    """A format whose columns belong to the groups that `index` (K,) names, and how a layer holds it.

    None: no layer does, because no kernel takes it or a group has more columns than its size. CheckpointError for
    groups that there are not.
    """
    size, groups = stored.group_size or in_features, stored.groups(in_features)
    if torch.equal(index.long(), plain := torch.arange(in_features) // size):
        return stored, held_format(stored)
    least, most = (int(end) for end in index.aminmax())
    if least < 0 or most >= groups:
        fail(where, f"names groups from {least} to {most} of {groups}")
    stored = replace(stored, permuted=True)
    return stored, held_format(stored) if torch.equal(index.long().sort().values, plain) else None


def seen(tensor: StoredTensor) -> str:
    """A stored tensor's dtype and shape, for an error."""
    return f"{tensor.dtype!s:.20} {list(tensor.shape)}"


def fail(tensor: StoredTensor, what: str) -> NoReturn:
    """CheckpointError for a stored tensor: file, name, and what is wrong with it."""
    raise CheckpointError(f"{tensor.file}: {tensor.name!s:.100} {what}")
