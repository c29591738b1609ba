"""`PackedEmbedding`: rows looked up in a packed weight."""

from typing import Self

import torch
from torch import Tensor, nn

from hasten.ops.linear.modules import PackedLinear
from hasten.ops.linear.weights import QuantizedWeight


class PackedEmbedding(nn.Module):
    """An embedding whose rows are those of a packed layer: a head that it is tied to, or one of its own.

    Only the rows that are asked for become floats, in the dtype of the layer's activations.
    """

    def __init__(self, table: PackedLinear, *, own: bool = False) -> None:
        super().__init__()
        # In a list that torch does not look into, unless it is our own: a head's tensors belong to the head.
        self.tables = nn.ModuleList([table]) if own else [table]

    @property
    def table(self) -> PackedLinear:
        """The packed layer."""
        return self.tables[0]  # type: ignore[return-value]

    @property
    def own(self) -> bool:
        """Whether the packed layer is its own, and not a head's."""
        return isinstance(self.tables, nn.ModuleList)

    @classmethod
    def from_weight(cls, weight: QuantizedWeight, *, dtype: torch.dtype) -> Self:
        """An embedding of a quantized weight (V, C), kept row by row. dtype: of what it gives."""
        table = PackedLinear.from_weight(weight, kernel="pytorch", activations="float", dtype=dtype)
        return cls(table, own=True)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the rows that `forward` returns."""
        return self.table.request.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (…) -> (…, C)."""
        table: PackedLinear = self.tables[0]  # type: ignore[assignment]
        return table.rows(tokens, table.request.dtype)

    def to_weight(self) -> QuantizedWeight:
        """The quantized weight as it was given, bit for bit."""
        return self.table.to_weight()
