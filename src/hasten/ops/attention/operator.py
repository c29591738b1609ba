"""The attention operator: its kernels in order of preference, and the public function."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from hasten.errors import ConfigError, HastenWarning
from hasten.ops import triton_support
from hasten.ops.attention import native_kernels, sdpa_rules
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.checks import DTYPES, check, check_tensors
from hasten.ops.attention.chunked import chunked
from hasten.ops.attention.inputs import (
    PLAIN,
    AttentionInputs,
    Documents,
    Intervals,
    alibi_slopes,
    as_autocast,
    document_bounds,
)
from hasten.ops.attention.inputs import causal as causal_mask
from hasten.ops.attention.reference import reference
from hasten.ops.attention.regroup import regrouped, regroups
from hasten.ops.attention.sdpa import memory_efficient, only, sdpa
from hasten.ops.attention.spec import HALVES, AttentionRequest, AttentionSpec
from hasten.ops.attention.train import native
from hasten.ops.picker import Kernel, pick_at_call


def _triton_unsupported(request: AttentionRequest) -> str | None:
    if (reason := request.outside(*HALVES)) is not None:
        return reason
    if request.queries != 1:
        return "it is for decoding, one query a sequence"
    if request.gradient:
        return "it has no backward pass"
    beside = ("key_padding", "key_lengths", "intervals", "bias", "alibi", "sinks", "documents", "block_mask", "dropout")
    if (found := request.given(*beside)) is not None:
        return f"it takes no {found}"
    return triton_support.refusal(request.device, request.compute_capability)


def _triton(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """A decode step in Triton, imported only when it is used."""
    from hasten.ops.attention.triton_decode import one_query

    return one_query(q, k, v, spec=spec, mask=inputs.mask)


def _flash_triton_unsupported(request: AttentionRequest) -> str | None:
    if (reason := request.outside(*(DTYPES if request.device.type == "cpu" else HALVES))) is not None:
        return reason
    if not request.spec.scale > 0:
        return f"it wants a scale above zero; this one is {request.spec.scale}"
    beside = ("mask", "key_padding", "intervals", "bias", "alibi", "sinks", "block_mask", "dropout")
    if (found := request.given(*beside)) is not None:
        return f"it takes no {found}{'; give lengths' if found == 'key-padding mask' else ''}"
    return triton_support.refusal(request.device, request.compute_capability)


LONG, SHORT = 2048, 128  # queries


def _flash_triton_opt_in(request: AttentionRequest) -> str | None:
    """Why it is only used by name, from measurements on an H100 (docs/in-depth/attention.md), or None."""
    if (reason := sdpa_rules.not_measured(request)) is not None:
        return reason
    few = request.queries is not None and request.queries < SHORT
    if request.softcap:  # PyTorch's have none
        return f"on fewer than {SHORT} queries its launch costs the host more than explicit scores" if few else None
    if request.layer and request.windowed:  # PyTorch's would read a mask of queries x keys
        return None
    if request.queries is None or request.queries < LONG:
        return f"from {LONG:,} queries on it is faster than PyTorch's; on few its launch costs the host more"
    if request.spec.head_dim > 128 and request.gradient is not False:
        return "its backward pass is slower than PyTorch's with heads above 128"
    return None


def _flash_triton(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """FlashAttention in Triton, imported only when it is used."""
    from hasten.ops.attention.flash_triton import flash_triton

    return flash_triton(*as_autocast(q, k, v), spec, inputs)


def _chunked_unsupported(request: AttentionRequest) -> str | None:
    if request.device.type == "meta":
        return "it computes chunk by chunk, and on meta there is nothing to compute"
    return "it takes no block mask" if request.block_mask else None


def _chunked_opt_in(request: AttentionRequest) -> str | None:
    return "it is slower than explicit scores on the short steps of a layer" if request.layer else None


# In order of preference: the first that fits is taken. `unsupported_reason` and `opt_in_reason` are asked without
# touching a tensor or a device, so that `hasten explain attention` can answer for a machine that is not here. Every
# kernel is called as run(q, k, v, spec, inputs).
KERNELS: tuple[Kernel[AttentionRequest], ...] = (
    Kernel("triton", _triton, _triton_unsupported),
    Kernel("native", native, native_kernels.native_unsupported, native_kernels.native_opt_in),
    Kernel("native-sparse", native, native_kernels.native_sparse_unsupported),
    Kernel("flex", native_kernels.flex, native_kernels.flex_unsupported, native_kernels.flex_opt_in),
    Kernel("cudnn", only(SDPBackend.CUDNN_ATTENTION), sdpa_rules.cudnn, sdpa_rules.cudnn_opt_in),
    Kernel("flash-triton", _flash_triton, _flash_triton_unsupported, _flash_triton_opt_in),
    Kernel("flash", only(SDPBackend.FLASH_ATTENTION), sdpa_rules.flash, sdpa_rules.flash_opt_in),
    Kernel("memory-efficient", memory_efficient, sdpa_rules.memory_efficient, sdpa_rules.one_by_one),
    Kernel("sdpa", sdpa, sdpa_rules.any_backend, sdpa_rules.named_instead),
    Kernel("chunked", chunked, _chunked_unsupported, _chunked_opt_in),
    Kernel("math", only(SDPBackend.MATH), sdpa_rules.any_backend, sdpa_rules.never_first),
    Kernel("reference", reference, lambda request: None),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | bool | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    block_mask: BlockMask | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
) -> Tensor:
    """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D), returning (B, T, H, D).

    H is a multiple of Hkv; query head h reads key/value head h // (H // Hkv), and keys and values are not repeated for
    it. The T queries are the last of the S positions (aligned bottom right, as in FlashAttention 2).

    What a query sees:
    - causal: the keys up to its own position. None, the default: yes, unless a mask says what is seen.
    - window: the last `window` of them, its own included.
    - mask: bool (T, S) or (B, T, S), True where a query sees a key; together with causal=True, both must allow it.
    - key_padding_mask: bool (B, S) or (B, 1, 1, S), True for keys that exist; or integer lengths (B,). Where each row
      has one stretch of keys (found out on a CPU), kernels skip the others. A query that sees no key gives zeros.
    - block_mask: a block-sparse pattern, see hasten.ops.attention.patterns; it replaces causality.
    - cu_seqlens: integer (documents + 1,), starting with 0: the B·T tokens, laid end to end, are packed documents of
      these cumulative lengths, and no query sees another document. cu_seqlens_k: those of the keys, if they differ.

    Scores are multiplied by `scale` (1/√D), soft-capped to c·tanh(s/c), and added to `bias`,
    (T, S) or broadcasting to (B, H, T, S), and to ALiBi's -slope·distance (`alibi`: True, or slopes (H,)). Then the
    softmax, in float32, which `sinks` join, a logit (H,) of each head that has no key and no value; and dropout of
    probabilities.

    All tensors are on one device. kernel: force one by name; by default the first that fits, see `hasten explain
    attention`.
    Raises ConfigError for shapes, dtypes, devices and options that do not fit, and for a kernel that cannot serve them.
    Warns (HastenWarning) where no kernel that skips blocks serves a block mask, and all scores are computed.
    """
    check_tensors(q, k, v)
    if cu_seqlens is None and cu_seqlens_k is not None:
        raise ConfigError("cu_seqlens_k was given without cu_seqlens")
    documents = None
    if cu_seqlens is not None:
        documents = Documents(cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    if isinstance(alibi, bool):
        alibi = alibi_slopes(q.shape[2], q.device) if alibi else None
    if isinstance(key_padding_mask, Tensor) and key_padding_mask.dim() == 4:
        key_padding_mask = key_padding_mask[:, 0, 0]
    spec = AttentionSpec(
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        causal=mask is None and block_mask is None if causal is None else causal,
    )
    inputs = AttentionInputs(
        mask=mask,
        block_mask=block_mask,
        documents=documents,
        key_padding=key_padding_mask,
        bias=bias,
        alibi=alibi,
        sinks=sinks,
        dropout=dropout,
    )
    check(q, k, v, spec, inputs)
    shape = q.shape
    if key_padding_mask is not None and (there := Intervals.of_padding(key_padding_mask)) is not None:
        inputs = inputs._replace(key_padding=None, intervals=there)
    if documents is not None:
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
        if block_mask is not None:
            own = document_bounds(documents, q.shape[1], spec)
            inputs = inputs._replace(documents=None, intervals=own)
    if mask is not None and spec.causal:
        inputs = inputs._replace(mask=mask & causal_mask(q.shape[1], k.shape[1], window, q.device))
        spec = replace(spec, window=None)
    if bias is not None and bias.dim() == 2:
        inputs = inputs._replace(bias=bias[None, None])  # (1, 1, T, S)
    run = partial(_run, kernel=kernel)
    return (regrouped(run, q, k, v, spec, inputs) if regroups(inputs) else run(q, k, v, spec, inputs)).reshape(shape)


def request_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> AttentionRequest:
    """The request to a kernel for these arguments."""
    there, wants = inputs.intervals, torch.is_grad_enabled()
    given = ("mask", "key_padding", "bias", "alibi", "sinks", "documents", "block_mask")
    flags: dict[str, Any] = {name: getattr(inputs, name) is not None for name in given}
    return AttentionRequest(
        **flags,
        spec=spec,
        device=q.device,
        dtype=q.dtype,
        batch=q.shape[0],
        queries=q.shape[1],
        keys=k.shape[1],
        key_lengths=there is not None and there.low.shape[1] == 1,
        intervals=there is not None and there.low.shape[1] != 1,
        bias_gradient=inputs.bias is not None and wants and inputs.bias.requires_grad,
        block_size=None if inputs.block_mask is None else inputs.block_mask.layout.block,
        dropout=inputs.dropout > 0,
        gradient=wants and (q.requires_grad or k.requires_grad or v.requires_grad),
    )


def _run(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, *, kernel: str | None
) -> Tensor:
    request = request_of(q, k, v, spec, inputs)
    chosen = pick_at_call(KERNELS, request, forced=kernel)
    if request.block_mask and kernel is None and chosen.name not in ("native-sparse", "flex"):
        skips = native_kernels.native_sparse_unsupported if q.device.type == "cpu" else native_kernels.flex_unsupported
        message = f"the absent blocks of this block mask are not skipped, all scores are computed: {skips(request)}"
        warnings.warn(message, HastenWarning, stacklevel=3)
    out: Tensor = chosen.run(q, k, v, spec, inputs)
    return out
