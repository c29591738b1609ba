"""What queries see of the keys, in every form that a layer's context may have it, handed to a kernel as its options."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.packed import Intervals
from hasten.ops.attention.spec import AttentionSpec

# All keys up to a query's own place (None), a mask (B, T, S) or of each head (B, H, T, S), an interval each, or the
# blocks of a sparse pattern.
Seen = Tensor | Intervals | BlockMask | None


def over_seen(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, seen: Seen, *, spec: AttentionSpec, dropout: float
) -> Tensor:
    """What the kernel of a layer makes of q (B, T, H, D) and the keys and values (B, S, Hkv, D): (B, T, H, D)."""
    options: dict[str, Any] = {"mask": seen}
    if isinstance(seen, Intervals):
        options = {"intervals": seen}
    elif isinstance(seen, BlockMask):
        options = {"block_mask": seen}
    return kernel(q, k, v, spec=spec, dropout=dropout, **options)
