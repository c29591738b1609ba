"""What one layer's attention is, apart from the tensors it works on."""

from dataclasses import dataclass

import torch

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # elements, of every kernel that has a limit


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
