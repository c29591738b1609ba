"""What a kernel is asked to serve: all that one can refuse by, known before any tensor is looked at."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hasten.ops.attention.spec import AttentionSpec

# The flags of a request in words, in the order in which a refusal names them.
GIVEN = {
    "softcap": "soft-capping of scores",
    "mask": "explicit mask",
    "key_padding": "key-padding mask",
    "bias": "bias",
    "alibi": "ALiBi",
    "documents": "packed documents",
    "block_mask": "block mask",
    "dropout": "dropout",
}
ASSUMED_CAPABILITY = (9, 0)  # of a CUDA device that is asked about on a machine without one: Hopper


class Documents(NamedTuple):
    """Documents packed into one row: document i has the queries queries[i] … queries[i+1]-1, and keys likewise.

    Both are integer tensors (documents + 1,) that start with 0, as FlashAttention's `cu_seqlens`. Within a document
    the queries are the last of its keys.
    """

    queries: Tensor
    keys: Tensor


class BlockMaskProtocol(Protocol):
    """What a kernel needs of a block-sparse mask; it says by itself what is causal, and replaces causality."""

    @property
    def causal(self) -> bool:
        """No query sees a later key."""
        ...

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """bool (1 or H, T, S), True where a query sees a key."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """One call, or with `queries` None a layer, whose calls differ: with or without a mask, one query or many.

    mask: an explicit bool (T, S) or (B, T, S) that replaces causality. key_padding: bool (B, S). bias: added to the
    scores, bias_gradient: and learned. documents: packed by cumulative lengths. block_size: positions of a block of the
    block mask (None: unknown). gradient: q, k or v needs one (None: unknown). int8_cache: keys and values lie in int8
    rows (int8_rows.py). capability: of a CUDA device, asked of the device itself where it is None.
    """

    spec: AttentionSpec
    device: torch.device
    dtype: torch.dtype
    batch: int | None = None
    queries: int | None = None
    keys: int | None = None
    mask: bool = False
    key_padding: bool = False
    bias: bool = False
    bias_gradient: bool = False
    alibi: bool = False
    documents: bool = False
    block_mask: bool = False
    block_size: int | None = None
    dropout: bool = False
    gradient: bool | None = None
    int8_cache: bool = False
    capability: tuple[int, int] | None = None

    @property
    def layer(self) -> bool:
        """A layer asks when it is bound, and its calls are not known."""
        return self.queries is None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def windowed(self) -> bool:
        """A window that hides something."""
        return self.spec.window is not None and (self.keys is None or self.spec.window < self.keys)

    @property
    def softcap(self) -> bool:
        return self.spec.softcap is not None

    def given(self, *flags: str) -> str | None:
        """The first of these flags (of GIVEN, in its order) that is set, in words."""
        return next((words for flag, words in GIVEN.items() if flag in flags and getattr(self, flag)), None)

    def compute_capability(self) -> tuple[int, int]:
        """Of the CUDA device: the one given, the device's own, or Hopper's where there is no device to ask."""
        if self.capability is not None:
            return self.capability
        if not torch.cuda.is_available():
            return ASSUMED_CAPABILITY
        return torch.cuda.get_device_capability(self.device)
