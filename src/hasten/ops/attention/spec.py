"""What one layer's attention is, apart from the tensors it works on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The fixed properties of an attention layer.

    scale multiplies the scores, usually 1/√D. window is the number of keys a query sees, itself included (None: all
    of them). softcap c replaces a score s by c·tanh(s/c) (Gemma 2). Attention is always causal here.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
