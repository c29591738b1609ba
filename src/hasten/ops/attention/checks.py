"""Argument checks of `attention`, before a kernel is chosen; errors name what was found."""

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.inputs import AttentionInputs, Documents
from hasten.ops.attention.spec import AttentionSpec

INTEGERS = (torch.int32, torch.int64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> None:
    """Raise ConfigError, naming what was found, if arguments of `attention` are inconsistent.

    Call after `check_tensors` of q, k and v; `inputs` are as the caller gave them.
    """
    mask, key_padding, block_mask = inputs.mask, inputs.key_padding, inputs.block_mask
    others = {"mask": mask, "key_padding_mask": key_padding, "bias": inputs.bias, "alibi": inputs.alibi}
    others["sinks"] = inputs.sinks
    if inputs.documents is not None:
        others |= {"cu_seqlens": inputs.documents.queries, "cu_seqlens_k": inputs.documents.keys}
    _check_kinds({"q": q} | {name: x for name, x in others.items() if x is not None})
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise ConfigError(
            f"block_mask must be a BlockMask, as BlockMask.of(pattern, keys) makes it; found "
            f"{type(block_mask).__name__}"
        )
    check_numbers(window=spec.window, softcap=spec.softcap, scale=spec.scale)
    rows = (q.shape[1], k.shape[1])  # (T, S)
    check_causal(
        queries=rows[0],
        keys=rows[1],
        window=spec.window,
        causal=spec.causal,
        masked=mask is not None or block_mask is not None or inputs.documents is not None,
    )
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) not in (rows, (q.shape[0], *rows))):
        raise ConfigError(
            f"mask must be bool of shape {rows} or {(q.shape[0], *rows)}; found {mask.dtype}, {tuple(mask.shape)}"
        )
    if key_padding is not None:
        expected = (k.shape[0], k.shape[1])
        lengths = key_padding.dtype in INTEGERS and key_padding.shape == (k.shape[0],)
        if not lengths and (key_padding.dtype != torch.bool or key_padding.shape != expected):
            raise ConfigError(
                f"key_padding_mask must be bool of shape {expected}, True for keys that exist, or lengths, integers "
                f"{expected[:1]}; found {key_padding.dtype}, {tuple(key_padding.shape)}"
            )
    _check_scores(q, k, inputs)
    if block_mask is not None:
        if block_mask.heads not in (1, q.shape[2]):
            raise ConfigError(
                f"the block mask has {block_mask.heads} heads; found {q.shape[2]} query heads: one for all, or each"
            )
        if mask is not None:
            raise ConfigError("give a mask or a block mask, not both")
        if spec.causal and not block_mask.causal:
            raise ConfigError("causal=True was given with a block mask that lets queries see later keys")
    if inputs.documents is not None:
        if any(other is not None for other in (mask, key_padding, inputs.bias)):
            raise ConfigError(
                "packed documents (cu_seqlens) go with causal, window, block mask, ALiBi and soft-capping only"
            )
        if block_mask is not None and inputs.documents.keys is not inputs.documents.queries:
            raise ConfigError("with a block mask, queries and keys are packed alike: give no cu_seqlens_k")
        _check_documents(q, k, inputs.documents)


def check_numbers(*, window: int | None, softcap: float | None, scale: float | None) -> None:
    """Raise ConfigError for numbers that are out of range."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ConfigError(f"window must be a whole number from 1 (the query's own key), or None; found {window!r}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ConfigError(f"softcap must be a finite number above 0, or None; found {softcap}")
    if scale is not None and not math.isfinite(scale):
        raise ConfigError(f"scale must be a finite number, or None; found {scale}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ConfigError unless a whole number of query heads reads each key head."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"a whole number of query heads shares each key head; found {heads} heads over {kv_heads}")


def check_causal(*, queries: int, keys: int, window: int | None, causal: bool, masked: bool) -> None:
    """Raise ConfigError for causal queries without keys, and for a window without causality.

    masked: what is seen is said by something else, which may leave a query without keys.
    """
    if causal and not masked and queries > keys:
        raise ConfigError(f"{queries} causal queries over {keys} keys: the first queries would see nothing")
    if window is not None and not causal:
        raise ConfigError("a window belongs to causal attention; put the window into the mask, or give causal=True")


def _check_kinds(given: Mapping[str, object]) -> None:
    """Tensors, of one device: a kernel reads another one's memory as if it were its own."""
    place = None
    for name, value in given.items():
        if not isinstance(value, Tensor):
            hint = "True, or a tensor of slopes" if name == "alibi" else "a torch.Tensor"
            raise ConfigError(f"{name} must be {hint}; found {type(value).__name__}")
        place = value.device if place is None else place
        if value.device != place:
            raise ConfigError(f"{name} is on {value.device} and q on {place}; move it there with .to(q.device)")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ConfigError unless q, k and v are tensors of one dtype and device whose shapes fit each other."""
    _check_kinds({"q": q, "k": k, "v": v})
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ConfigError(
            f"attention wants q (B, T, H, D) and equal k, v (B, S, Hkv, D); "
            f"found {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ConfigError(f"batch and head size must match: q is {tuple(q.shape)}, k is {tuple(k.shape)}")
    check_heads(q.shape[2], k.shape[2])
    if not q.shape[3]:
        raise ConfigError(f"a head has a size of at least 1; q is {tuple(q.shape)}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ConfigError(
            f"q, k and v must have one dtype of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}; found "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )


def _check_scores(q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
    bias, alibi, sinks = inputs.bias, inputs.alibi, inputs.sinks
    whole = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])  # (B, H, T, S)
    if bias is not None:
        fits = bias.dim() in (2, 4) and all(
            found in (1, wanted) for found, wanted in zip(bias.shape, whole[-bias.dim() :], strict=True)
        )
        if not fits or not bias.is_floating_point():
            raise ConfigError(
                f"bias must be floating, {whole[2:]} or 4-dimensional and broadcasting to {whole}; "
                f"found {bias.dtype}, {tuple(bias.shape)}"
            )
    if alibi is not None and tuple(alibi.shape) != (q.shape[2],):
        raise ConfigError(f"alibi must be True or one slope a head, ({q.shape[2]},); found {tuple(alibi.shape)}")
    if sinks is not None and (tuple(sinks.shape) != (q.shape[2],) or not sinks.is_floating_point()):
        raise ConfigError(
            f"sinks must be floating, one logit a head, ({q.shape[2]},); found {sinks.dtype}, {tuple(sinks.shape)}"
        )
    if not 0 <= inputs.dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1; found {inputs.dropout}")


def _check_documents(q: Tensor, k: Tensor, documents: Documents) -> None:
    ends, keys = documents
    for name, found in (("cu_seqlens", ends), ("cu_seqlens_k", keys)):
        if found.dim() != 1 or found.dtype not in INTEGERS or len(found) < 2 or found.shape != ends.shape:
            raise ConfigError(
                f"{name} must be int32 or int64 of shape (documents + 1,), at least 2 and as many for queries and "
                f"keys; found {found.dtype}, {tuple(found.shape)}"
            )
    if keys is ends and q.shape[1] != k.shape[1]:
        raise ConfigError(
            f"{q.shape[1]} queries and {k.shape[1]} keys have other documents: give cu_seqlens_k for the keys"
        )
    for name, found, total in (("cu_seqlens", ends, q.shape[:2].numel()), ("cu_seqlens_k", keys, k.shape[:2].numel())):
        # Reading a device's memory would make every call wait for it; there a wrong value reads out of bounds.
        if found.device.type == "cpu" and not torch.compiler.is_compiling():
            values = found.tolist()
            if values[0] != 0 or values[-1] != total or any(a > b for a, b in pairwise(values)):
                raise ConfigError(f"{name} must rise from 0 to the {total} tokens there are; found {values}")
