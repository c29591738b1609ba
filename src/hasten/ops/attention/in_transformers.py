"""hasten's attention inside a transformers model, through the attention interface of transformers (5.0 and later)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.ops.attention.operator import KERNELS, attention


def replace_in(model: Any, *, kernel: str | None = None) -> Any:
    """Have every attention layer of a transformers model call `hasten.ops.attention`, and return the model.

    kernel: one by name for all layers; by default each call takes the first that fits. Undo it with
    `model.set_attn_implementation("sdpa")`. Raises ConfigError for what is no transformers model, for a model that does
    not take its attention from the interface, and for an unknown kernel.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"a transformers model (5.0 or later) is wanted; found {type(model).__name__}")
    if kernel is not None and kernel not in [k.name for k in KERNELS]:
        raise ConfigError(f"there is no kernel {kernel!r}; known: {', '.join(k.name for k in KERNELS)}")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # transformers takes every name with "flash" in it for FlashAttention's own package, and wants it installed.
    name = "hasten" if kernel is None else f"hasten-{kernel.replace('flash', 'fa')}"

    AttentionInterface.register(name, partial(attend, kernel=kernel))
    AttentionMaskInterface.register(name, sdpa_mask)  # None where causality alone decides, else bool (B, 1, T, S)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ConfigError(f"{type(model).__name__} does not take its attention from transformers' attention interface")
    return model


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: str | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """One call as transformers makes it: query (B, H, T, D), key, value (B, Hkv, S, D); (B, T, H, D), no scores."""
    if s_aux is not None:
        raise ConfigError("this model's attention has sinks (s_aux), which hasten's does not; keep its own")
    bias = position_bias
    mask: Tensor | None = None
    causal = False
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and keys > queries:
            # Without a mask, more keys than queries are the rest of a preallocated cache, not yet written.
            key, value = key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
    elif attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1:
        mask = attention_mask[:, 0].expand(query.shape[0], -1, -1)  # (B, T, S)
    elif attention_mask.dtype == torch.bool:
        hidden = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, float("-inf"))
        bias = hidden if bias is None else bias + hidden
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        mask=mask,
        bias=bias,
        scale=scaling,
        softcap=softcap,
        dropout=dropout,
        kernel=kernel,
    )
    return out, None
