"""hasten's attention in other models: transformers' (through its attention interface, 5.0 and later), and PyTorch's
nn.MultiheadAttention, modules that contain it, and its functional form.

`multi_head_attention_forward` takes the arguments of `torch.nn.functional.multi_head_attention_forward`; as there,
masks are True or -infinity for hidden keys. On a CPU, causal masks and key padding with contiguous keys are recognised
and passed to the kernels as causality and lengths; other masks stay masks. Calls that need the probabilities, or that
add keys of the module's own, are computed by PyTorch; `refusal` gives the reason.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.ops.attention.inputs import causal as causal_mask
from hasten.ops.attention.operator import KERNELS, attention

DEFAULTS = {name: one.default for name, one in inspect.signature(F.multi_head_attention_forward).parameters.items()}
NAMES = tuple(DEFAULTS)
# Those that are attributes of nn.MultiheadAttention under the same name.
OWN = ["num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "training"]
OWN += ["q_proj_weight", "k_proj_weight", "v_proj_weight"]


def multi_head_attention_forward(
    *arguments: Any, kernel: str | None = None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Replace PyTorch's function of this name: query (T, B, E), key, value (S, B, …) -> output (T, B, E), weights.

    kernel: force one by name; by default each call uses the first that fits. A query that sees no key gives zeros
    (in PyTorch NaN). Raises ConfigError if the named kernel cannot serve the call.
    """
    given = DEFAULTS | dict(zip(NAMES, arguments, strict=False)) | named
    reason = refusal(given)
    if reason is not None:
        if kernel is not None:
            raise ConfigError(f"kernel {kernel!r} cannot be used here: {reason}")
        return F.multi_head_attention_forward(**given)
    batched = given["query"].dim() == 3
    q, k, v = (x.unflatten(-1, (given["num_heads"], -1)) for x in _projected(given))  # (T, B, H, D), or (T, H, D)
    q, k, v = (x.transpose(0, 1) if batched else x[None] for x in (q, k, v))
    dropout = given["dropout_p"] if given["training"] else 0.0
    out = attention(q, k, v, **_hidden(given, q, k), dropout=dropout, kernel=kernel).flatten(-2)  # (B, T, E)
    out = out.transpose(0, 1) if batched else out[0]
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), None


def refusal(given: Mapping[str, Any]) -> str | None:
    """Why PyTorch has to compute a call with these arguments, or None."""
    if given["need_weights"]:
        return "the weights were asked for (need_weights), which only explicit scores give"
    for name in ("bias_k", "add_zero_attn", "static_k", "static_v"):
        if given[name] is not None and given[name] is not False:
            return f"it has keys of its own ({name})"
    return "nested tensors are PyTorch's" if given["query"].is_nested else None


def _projected(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    query, key, value, bias = given["query"], given["key"], given["value"], given["in_proj_bias"]
    if query is key and key is value and not given["use_separate_proj_weight"]:
        return F.linear(query, given["in_proj_weight"], bias).chunk(3, dim=-1)
    if given["use_separate_proj_weight"]:
        weights = (given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"])
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _hidden(given: Mapping[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    """The masks as `attention` takes them; q (B, T, H, D), k (B, S, H, D)."""
    mask, padding = (_as_bool(given[name]) for name in ("attn_mask", "key_padding_mask"))
    queries, keys = q.shape[1], k.shape[1]
    options: dict[str, Any] = {"causal": False}
    if padding is not None:
        padding = padding.view(-1, keys)  # (B, S)
        if padding.dtype == torch.bool:
            options["key_padding_mask"] = ~padding
        else:
            options["bias"] = padding[:, None, None]
    if queries == keys and (given["is_causal"] or _is_causal(mask)):
        return options | {"causal": True}
    if mask is None:
        return options
    if mask.dim() == 2 and mask.dtype == torch.bool:
        return options | {"mask": ~mask}
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
    if mask.dim() == 3:
        mask = mask.unflatten(0, (-1, q.shape[2])) if len(mask) > 1 else mask[None]  # (B, H, T, S)
    return options | {"bias": mask if "bias" not in options else mask + options["bias"]}


def _as_bool(mask: Tensor | None) -> Tensor | None:
    """Turn a mask of 0 and -inf back into booleans, where its values can be read: PyTorch converts boolean masks."""
    if mask is None or mask.dtype == torch.bool or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return mask
    hidden = mask == float("-inf")
    return hidden if bool((hidden | (mask == 0)).all()) else mask


def _is_causal(mask: Tensor | None) -> bool:
    if mask is None or mask.dim() != 2 or mask.dtype != torch.bool:
        return False
    readable = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return readable and torch.equal(mask, ~causal_mask(*mask.shape))


class MultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with hasten's attention; `replace_in` converts modules to it in place."""

    kernel: str | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run nn.MultiheadAttention.forward with hasten's attention; same arguments and results."""
        alike, turned = query is key and key is value, self.batch_first and query.dim() == 3
        if turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out, weights = multi_head_attention_forward(
            query,
            query if alike else key,
            query if alike else value,
            **{name: getattr(self, name) for name in OWN},
            embed_dim_to_check=self.embed_dim,
            dropout_p=self.dropout,
            out_proj_weight=self.out_proj.weight,
            out_proj_bias=self.out_proj.bias,
            use_separate_proj_weight=self.in_proj_weight is None,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            kernel=self.kernel,
        )
        return (out.transpose(0, 1) if turned else out), weights


def _replace_in_modules(model: nn.Module, *, kernel: str | None) -> bool:
    """Convert every nn.MultiheadAttention in a model; False if there is none."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    for module in found:
        module.__class__ = MultiheadAttention
        module.kernel = kernel
        # Otherwise nn.TransformerEncoderLayer skips the module for its own fast path; it does not for separate weights.
        module._qkv_same_embed_dim = False
    for encoder in model.modules() if found else ():
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor = False
    return bool(found)


def replace_in(model: Any, *, kernel: str | None = None) -> Any:
    """Make every attention layer of a model call `hasten.ops.attention`, in place; returns the model.

    model: a transformers model, or a module that is or contains nn.MultiheadAttention (as nn.TransformerEncoderLayer).
    kernel: force one by name; by default each call uses the first that fits, and `hasten.ops.picker.explained` reports
    which and why. To undo it in a transformers model: `model.set_attn_implementation("sdpa")`. Raises ConfigError for a
    model without such attention, a transformers model that does not use the attention interface, and an unknown kernel.
    """
    if kernel is not None and kernel not in [k.name for k in KERNELS]:
        raise ConfigError(f"there is no kernel {kernel!r}; known: {', '.join(k.name for k in KERNELS)}")
    if isinstance(model, nn.Module) and _replace_in_modules(model, kernel=kernel):
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
    """Compute a call of transformers: query (B, H, T, D), key, value (B, Hkv, S, D) -> (B, T, H, D), None."""
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
        sinks=s_aux,
        dropout=dropout,
        kernel=kernel,
    )
    return out, None
