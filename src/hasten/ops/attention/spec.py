"""The fixed properties of a layer's attention, and the request by which a kernel is chosen before any tensor exists."""

from dataclasses import dataclass

import torch

from hasten.ops.triton_support import compute_capability

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # elements, of every kernel that has a limit
LARGEST_NATIVE = 576  # of those in C++: DeepSeek's latents with the key that all heads share
# The flags of a request in words, in the order in which a refusal names them.
GIVEN = {
    "softcap": "soft-capping of scores",
    "mask": "explicit mask",
    "key_padding": "key-padding mask",
    "key_lengths": "key-padding lengths",
    "bias": "bias",
    "alibi": "ALiBi",
    "sinks": "attention sinks",
    "intervals": "intervals of keys",
    "documents": "packed documents",
    "block_mask": "block mask",
    "dropout": "dropout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The fixed properties of an attention layer.

    scale multiplies the scores, usually 1/√D. causal: a query sees the keys up to its own position, where the T queries
    are the last of the S positions (aligned bottom right). window is the number of keys a query sees, itself included
    (None: all of them), and needs causal. softcap c replaces a score s by c·tanh(s/c) (Gemma 2), before any bias.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """One call, or with `keys` None a form of a layer's calls (layer.py), which differ in length.

    mask: an explicit bool (T, S) or (B, T, S) that replaces causality. key_padding: bool (B, S); key_lengths: one known
    stretch of keys a row instead; intervals: one for each query. bias: added to the scores, bias_gradient: and learned.
    documents: packed by cumulative lengths. block_size: positions of a block of the block mask (None: there is none).
    gradient: q, k or v needs one (None: unknown). cache_bits: of the keys and values in a cache (None: they are in
    dtype). sinks: a logit of each head joins the softmax. capability: of a CUDA device, asked of the device itself
    where it is None.
    """

    spec: AttentionSpec
    device: torch.device
    dtype: torch.dtype
    batch: int | None = None
    queries: int | None = None
    keys: int | None = None
    mask: bool = False
    key_padding: bool = False
    key_lengths: bool = False
    intervals: bool = False
    bias: bool = False
    bias_gradient: bool = False
    alibi: bool = False
    sinks: bool = False
    documents: bool = False
    block_mask: bool = False
    block_size: int | None = None
    dropout: bool = False
    gradient: bool | None = None
    cache_bits: int | None = None
    capability: tuple[int, int] | None = None

    @property
    def layer(self) -> bool:
        """Whether a layer asks while it is bound, before the lengths of its calls are known."""
        return self.keys is None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def windowed(self) -> bool:
        """Whether there is a window that hides keys."""
        return self.spec.window is not None and (self.keys is None or self.spec.window < self.keys)

    @property
    def softcap(self) -> bool:
        return self.spec.softcap is not None

    def given(self, *flags: str) -> str | None:
        """The first of these flags (of GIVEN, in its order) that is set, in words."""
        return next((words for flag, words in GIVEN.items() if flag in flags and getattr(self, flag)), None)

    def outside(self, *dtypes: torch.dtype, largest: int = LARGEST_HEAD) -> str | None:
        """Why a kernel of these dtypes, whose heads go up to `largest`, cannot serve it."""
        if self.dtype not in dtypes:
            return f"it takes {' and '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {self.dtype_name}"
        if self.spec.head_dim > largest:
            return f"the head size is {self.spec.head_dim}; it goes up to {largest}"
        return None

    def compute_capability(self) -> tuple[int, int]:
        """CUDA compute capability: the given one, else the device's own, else Hopper's if there is no device."""
        return compute_capability(self.device) if self.capability is None else self.capability
