"""hasten's attention in other people's models: transformers' through its attention interface (5.0 and later)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.ops.attention.in_torch import replace_in_modules
from hasten.ops.attention.operator import KERNELS, attention


def replace_in(model: Any, *, kernel: str | None = None) -> Any:
    """Have every attention layer of a model call `hasten.ops.attention`, and return the model.

    A transformers model, or any module that is or holds nn.MultiheadAttention (nn.TransformerEncoderLayer does).
    kernel: one by name for all layers; by default each call takes the first that fits; `hasten.ops.picker.explained`
    tells which and why. A transformers model undoes it with `model.set_attn_implementation("sdpa")`. Raises ConfigError
    for what has no such attention, for a transformers model that does not take its own from the interface, and for an
    unknown kernel.
    """
    if kernel is not None and kernel not in [k.name for k in KERNELS]:
        raise ConfigError(f"there is no kernel {kernel!r}; known: {', '.join(k.name for k in KERNELS)}")
    if isinstance(model, nn.Module) and replace_in_modules(model, kernel=kernel):
        return model
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"a transformers model (5.0 or later) or a module with nn.MultiheadAttention is wanted; found "
            f"{type(model).__name__}"
        )
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
