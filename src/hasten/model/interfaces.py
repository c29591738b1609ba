"""What the decoder asks of the objects it is called with: the contexts of its layers, and a stack of all blocks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hasten.ops.attention import LayerAttention
from hasten.ops.attention.view import KVView, StackView


class LayerContext(Protocol):
    """What one layer's attention may look at besides the tokens at hand."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, attention: LayerAttention, dropout: float) -> Tensor:
        """Take the new k, v (B, T, Hkv, D) in; attention of q (B, T, H, D) over all that is there now: (B, T, H, D).

        attention: the layer's kernels, for contexts whose keys stand side by side.
        """
        ...

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """The cache's tensors, for a kernel that writes the new keys and values itself and reads all of them."""
        ...


class Context(Protocol):
    """One object for each layer: its tensors, and no layer number, so that one compiled graph serves all layers."""

    @property
    def layers(self) -> Sequence[LayerContext]: ...

    @property
    def all_layers(self) -> StackView | None:
        """All layers for a kernel that takes them at once, where they share all but k and v."""
        ...


class Stack(Protocol):
    """All blocks at once, and the last norm with the head."""

    def run(self, x: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], context: Context) -> Tensor: ...

    def scores(self, x: Tensor) -> Tensor: ...
