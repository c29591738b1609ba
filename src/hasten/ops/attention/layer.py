"""The attention kernels of one layer, picked for each form of its calls when the model is bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.inputs import AttentionInputs, Intervals
from hasten.ops.attention.operator import KERNELS
from hasten.ops.attention.regroup import regrouped, regroups
from hasten.ops.attention.spec import AttentionRequest, AttentionSpec
from hasten.ops.picker import Kernel, pick

# What a query sees, as a layer's context has it: all keys up to its own place (None), a mask (B, T, S) or of each head
# (B, H, T, S), or the blocks of a sparse pattern.
Mask = Tensor | BlockMask | None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A layer's attention, called by its contexts as attention(q, k, v, mask=…, dropout=…).

    tokens: kernel for calls without a mask. dropout: the same with dropout of probabilities. masked: with a mask, over
    a cache. decode: one query for each sequence with a mask, without gradient and dropout.
    """

    spec: AttentionSpec
    tokens: Kernel[AttentionRequest]
    dropout: Kernel[AttentionRequest]
    masked: Kernel[AttentionRequest]
    decode: Kernel[AttentionRequest]

    @classmethod
    def bind(cls, request: AttentionRequest, forced: str | None = None) -> LayerAttention:
        """Pick the kernel of each form. forced: a kernel for all forms that it supports.

        Raises ConfigError if it supports none, with its reason against the form `tokens`.
        """
        forms = layer_requests(request)
        serving = [form for form, asked in forms.items() if _serves(forced, asked)]
        if forced is not None and not serving:
            pick(KERNELS, forms["tokens"], forced=forced)
        kernels = {form: pick(KERNELS, forms[form], forced=forced if form in serving else None) for form in forms}
        return cls(request.spec, **kernels)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = None,
        intervals: Intervals | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D): (B, T, H, D). intervals: hide further keys. sinks (H,):
        logits that join the softmax.
        """
        if isinstance(mask, Tensor):
            learns = torch.is_grad_enabled() and q.requires_grad
            kernel = self.decode if q.shape[1] == 1 and not learns and not dropout else self.masked
            inputs = AttentionInputs(mask=mask, intervals=intervals, sinks=sinks, dropout=dropout)
            return kernel.run(q, k, v, self.spec, inputs)
        kernel = self.dropout if dropout else self.tokens
        inputs = AttentionInputs(intervals=intervals, block_mask=mask, sinks=sinks, dropout=dropout)
        if mask is not None and regroups(inputs):
            return regrouped(kernel.run, q, k, v, self.spec, inputs)
        return kernel.run(q, k, v, self.spec, inputs)


def _serves(name: str | None, request: AttentionRequest) -> bool:
    return any(kernel.name == name and kernel.unsupported_reason(request) is None for kernel in KERNELS)


def layer_requests(request: AttentionRequest) -> dict[str, AttentionRequest]:
    """The requests of all forms of a layer's calls, from that of the form `tokens`.

    request.dropout: whether the layer has dropout; the kernel for masks must then support it too.
    """
    masked: dict[str, Any] = {"mask": True, "block_mask": False, "block_size": None}
    return {
        "tokens": replace(request, dropout=False),
        "dropout": replace(request, dropout=True),
        "masked": replace(request, **masked),
        # A pattern's mask may be of each head, which the decode kernels do not take.
        "decode": replace(request, **masked, queries=None if request.block_mask else 1, dropout=False),
    }
