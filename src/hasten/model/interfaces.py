"""What the decoder asks of the objects it is called with: the contexts of its layers, and a stack of all blocks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.packed import Intervals
from hasten.ops.attention.view import KVView, StackView

# What the queries see of the keys: all up to their own place (None), a mask (B, T, S) or of each head (B, H, T, S), an
# interval each, or the blocks of a sparse pattern.
Seen = Tensor | Intervals | BlockMask | None


class LayerContext(Protocol):
    """What one layer's attention may look at besides the tokens at hand.

    One whose sequences have different numbers of tokens (`generation.paged`) has, in place of `extend`,
    `attend(q, k, v, *, spec, dense)`, which returns what attention gives (B, T, H, D); dense is the layer's kernel.
    """

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Seen]:
        """Take the new k, v (B, T, Hkv, D) in; return all keys and values (B, S, Hkv, D), and what is seen of them."""
        ...

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """The cache's tensors, for a kernel that writes the new keys and values itself and reads all of them."""
        ...


class Context(Protocol):
    """One object for each layer: its tensors, and no layer number, so that one compiled graph serves all layers."""

    @property
    def layers(self) -> Sequence[LayerContext]: ...

    @property
    def together(self) -> StackView | None:
        """All layers for a kernel that takes them at once, where they share all but k and v."""
        ...


class Stack(Protocol):
    """All blocks at once (unless `apart`), and the last norm with the head."""

    apart: bool

    def __call__(self, x: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], context: Context) -> Tensor: ...

    def scores(self, x: Tensor) -> Tensor: ...
