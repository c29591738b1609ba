"""The attention operator: its kernels in order of preference, and the public function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops import triton_support
from hasten.ops.attention.reference import reference
from hasten.ops.attention.sdpa import sdpa
from hasten.ops.attention.spec import AttentionSpec
from hasten.ops.picker import Kernel, pick

LARGEST_TRITON_HEAD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """What a kernel is asked to serve: decided once per layer, when a model is bound."""

    spec: AttentionSpec
    device: torch.device
    dtype: torch.dtype


def _sdpa_refuses(request: AttentionRequest) -> str | None:
    if request.spec.softcap is not None:
        return "PyTorch's SDPA has no soft-capping of scores"
    return None


def _triton_refuses(request: AttentionRequest) -> str | None:
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(request.dtype).removeprefix('torch.')}"
    if request.spec.head_dim > LARGEST_TRITON_HEAD:
        return f"the head size is {request.spec.head_dim}; it goes up to {LARGEST_TRITON_HEAD}"
    return triton_support.refusal(request.device)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """A decode step in Triton; what has several queries a sequence, or needs a gradient, as without it."""
    if q.shape[1] == 1 and not dropout and not (torch.is_grad_enabled() and q.requires_grad):
        # Imported here, because it imports Triton: only where the kernel is taken.
        from hasten.ops.attention.triton_decode import one_query

        return one_query(q, k, v, spec=spec, mask=mask)
    several = sdpa if spec.softcap is None else reference
    return several(q, k, v, spec=spec, mask=mask, dropout=dropout)


KERNELS: tuple[Kernel[AttentionRequest], ...] = (
    Kernel("triton", _triton, _triton_refuses),
    Kernel("sdpa", sdpa, _sdpa_refuses),
    Kernel("reference", reference, lambda request: None),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
) -> Tensor:
    """Causal attention of q (B, T, H, D) over k, v (B, S, Hkv, D), returning (B, T, H, D).

    The T queries are the last of the S positions (aligned bottom right). `mask`, bool (B, T, S) or (T, S), True where
    a query sees a key, replaces causality (and then there can be no window). `kernel` forces one by name. Raises
    ConfigError for shapes, dtypes and options that do not fit.
    """
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ConfigError(
            f"attention wants q (B, T, H, D) and equal k, v (B, S, Hkv, D); "
            f"found {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ConfigError(
            f"batch, head size and a whole number of query heads per key head must match: "
            f"q is {tuple(q.shape)}, k is {tuple(k.shape)}"
        )
    if mask is None and q.shape[1] > k.shape[1]:
        raise ConfigError(f"{q.shape[1]} causal queries over {k.shape[1]} keys: the first queries would see nothing")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ConfigError(f"q, k and v must have one floating dtype; found {q.dtype}, {k.dtype}, {v.dtype}")
    _check_options(q, k, window=window, softcap=softcap, mask=mask, dropout=dropout)
    spec = AttentionSpec(
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
    )
    chosen = pick(KERNELS, AttentionRequest(spec=spec, device=q.device, dtype=q.dtype), forced=kernel)
    run: Callable[..., Tensor] = chosen.run
    return run(q, k, v, spec=spec, mask=mask, dropout=dropout)


def _check_options(
    q: Tensor, k: Tensor, *, window: int | None, softcap: float | None, mask: Tensor | None, dropout: float
) -> None:
    if mask is not None:
        rows = (q.shape[1], k.shape[1])  # (T, S)
        if mask.dtype != torch.bool or tuple(mask.shape) not in (rows, (q.shape[0], *rows)):
            raise ConfigError(
                f"mask must be bool of shape {rows} or {(q.shape[0], *rows)}; found {mask.dtype}, {tuple(mask.shape)}"
            )
        if window is not None:
            raise ConfigError("a mask replaces causality and its window; put the window into the mask")
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1 (the query's own key), or None; found {window}")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap must be positive, or None; found {softcap}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1; found {dropout}")
