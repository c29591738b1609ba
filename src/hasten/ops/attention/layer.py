"""The kernels of one layer: picked when the model is bound, for each form that the layer's calls can take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.inputs import AttentionInputs, Intervals
from hasten.ops.attention.operator import KERNELS
from hasten.ops.attention.request import AttentionRequest
from hasten.ops.attention.spec import AttentionSpec
from hasten.ops.picker import Kernel, pick

# What a query sees, as a layer's context has it: all keys up to its own place (None), a mask (B, T, S) or of each head
# (B, H, T, S), an interval each, or the blocks of a sparse pattern.
Mask = Tensor | Intervals | BlockMask | None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A layer's attention, called by its contexts as attention(q, k, v, mask=…, dropout=…).

    tokens: over the tokens at hand, or over all that is there, without a mask. dropout: with dropout of probabilities.
    masked: several queries with a mask, over a cache. decode: one query a sequence with a mask, where no gradient is
    wanted.
    """

    spec: AttentionSpec
    tokens: Kernel[AttentionRequest]
    dropout: Kernel[AttentionRequest]
    masked: Kernel[AttentionRequest]
    decode: Kernel[AttentionRequest]

    @classmethod
    def bind(cls, request: AttentionRequest, forced: str | None = None) -> LayerAttention:
        """Pick the kernel of each form. forced: the one of all forms that it serves.

        Raises ConfigError where it serves none, with its reason against the tokens at hand.
        """
        forms = layer_requests(request)
        serving = [form for form, asked in forms.items() if _serves(forced, asked)]
        if forced is not None and not serving:
            pick(KERNELS, request, forced=forced)
        kernels = {form: pick(KERNELS, forms[form], forced=forced if form in serving else None) for form in forms}
        return cls(request.spec, **kernels)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, dropout: float = 0.0) -> Tensor:
        """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D): (B, T, H, D)."""
        if isinstance(mask, Tensor):
            learns = torch.is_grad_enabled() and q.requires_grad
            kernel = self.decode if q.shape[1] == 1 and not learns else self.masked
            inputs = AttentionInputs(mask=mask, dropout=dropout)
        else:
            kernel = self.tokens
            intervals, blocks = (mask, None) if isinstance(mask, Intervals) else (None, mask)
            inputs = AttentionInputs(intervals=intervals, block_mask=blocks, dropout=dropout)
        return (self.dropout if dropout else kernel).run(q, k, v, self.spec, inputs)


def _serves(name: str | None, request: AttentionRequest) -> bool:
    return any(kernel.name == name and kernel.unsupported_reason(request) is None for kernel in KERNELS)


def layer_requests(request: AttentionRequest) -> dict[str, AttentionRequest]:
    """Each form of a layer's calls as a request of its own; `request` is that of the tokens at hand."""
    masked: dict[str, Any] = {"mask": True, "block_mask": False, "block_size": None}
    return {
        "tokens": request,
        "dropout": replace(request, dropout=True),
        "masked": replace(request, **masked),
        # A pattern's mask may be of each head, which the decode kernels do not take.
        "decode": replace(request, **masked, queries=None if request.block_mask else 1),
    }
