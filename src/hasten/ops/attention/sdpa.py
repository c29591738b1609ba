"""PyTorch's scaled_dot_product_attention: one fused kernel that never writes the score matrix to memory.

`sdpa` lets PyTorch choose the backend at every call. `flash`, `memory_efficient`, `cudnn` and `math` each force one, as
in "Accelerated Generative Diffusion and nanoGPT with PyTorch 2" (PyTorch blog, April 2023), with
`torch.nn.attention.sdpa_kernel`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hasten.ops.attention.masks import alibi_bias, causal, positions, visibility
from hasten.ops.attention.packed import per_document
from hasten.ops.attention.request import BlockMaskProtocol, Documents
from hasten.ops.attention.spec import AttentionSpec


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    key_padding: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    documents: Documents | None = None,
    block_mask: BlockMaskProtocol | None = None,
) -> Tensor:
    """Same contract as `reference`, without soft-capping."""
    queries, keys = q.shape[1], k.shape[1]
    if documents is not None and q.device.type == "cpu":
        # Document by document, the work is the sum of the squares; a mask would make it the square of the sum.
        return per_document(sdpa, q, k, v, documents=documents, spec=spec, alibi=alibi, dropout=dropout)
    simple = key_padding is None and bias is None and alibi is None and documents is None and block_mask is None
    windowed = spec.window is not None and spec.window < keys
    if queries == 1 and simple and (mask is not None or not windowed):
        return _one_query(q, k, v, spec=spec, mask=mask, dropout=dropout)
    # PyTorch aligns `is_causal` to the top left, so it is our causal attention only when the lengths are equal.
    # Its CPU kernel hides the later keys before it scales the scores: with a scale of zero or less that gives NaN.
    square = simple and mask is None and spec.causal and queries == keys and not windowed and spec.scale > 0
    attn_mask: Tensor | None = None
    if simple and not square and (mask is not None or spec.causal):
        attn_mask = mask if mask is not None else causal(queries, keys, spec.window, q.device)
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)  # (B, 1, T, S)
    elif not simple:
        attn_mask = visibility(
            queries,
            keys,
            spec=spec,
            device=q.device,
            mask=mask,
            key_padding=key_padding,
            documents=documents,
            block_mask=block_mask,
        )
        if bias is not None or alibi is not None:
            slopes = None
            if alibi is not None:
                slopes = alibi_bias(alibi, *positions(queries, keys, documents, q.device)[:2])  # (H, T, S)
            attn_mask = _added(attn_mask, bias, slopes, q)
        attn_mask = None if attn_mask is None else _four(attn_mask)
    # The fused kernels want the head's values next to each other.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # (B, H, T, D)
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=attn_mask,
        dropout_p=dropout,
        is_causal=square,
        scale=spec.scale,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    return out.transpose(1, 2)


def _added(seen: Tensor | None, bias: Tensor | None, slopes: Tensor | None, q: Tensor) -> Tensor:
    """One additive mask of what is added to the scores and, as -infinity, what hides keys."""
    # The CPU's kernels take a float32 mask beside half precision; CUDA's want the inputs' own dtype.
    dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
    parts = [x.to(dtype) for x in (bias, slopes) if x is not None]
    added = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return added if seen is None else added.masked_fill(~seen, float("-inf"))


def _four(x: Tensor) -> Tensor:
    """A mask of four dimensions; one that has fewer is the same for all that it lacks."""
    return x[(None,) * (4 - x.dim())]


def _one_query(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None, dropout: float) -> Tensor:
    """A decode step: query heads that share a key head see the same keys, so they become the rows of one small matrix.

    PyTorch's grouped-query path walks through the keys once for every query head instead.
    """
    groups = spec.groups
    rows = q[:, 0].unflatten(1, (spec.kv_heads, groups))  # (B, Hkv, G, D)
    if mask is not None and mask.dim() == 4:  # of each head: (B, H, 1, S) -> (B, Hkv, G, S)
        mask = mask[:, :, 0].unflatten(1, (-1 if mask.shape[1] > 1 else 1, groups if mask.shape[1] > 1 else 1))
    if groups == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # One row of half precision takes the kernel's slow path; two equal ones do not.
        rows = rows.expand(-1, -1, 2, -1)
    out = F.scaled_dot_product_attention(
        rows,
        k.transpose(1, 2),  # (B, Hkv, S, D)
        v.transpose(1, 2),
        attn_mask=mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask,  # (B, 1, 1, S)
        dropout_p=dropout,
        scale=spec.scale,
    )
    return out[:, :, :groups].flatten(1, 2).unsqueeze(1)  # (B, 1, H, D)


def only(backend: SDPBackend) -> Callable[..., Tensor]:
    """`sdpa`, but by this backend or not at all (PyTorch raises RuntimeError where it does not serve)."""

    def run(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, **options)  # type: ignore[arg-type]

    return run


def memory_efficient(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, **options: object) -> Tensor:
    """PyTorch's memory-efficient backend, which knows no shared key heads: one call for each group of heads instead.

    Query heads g, g + G, g + 2G … each read a key head of their own, so nothing is copied out.
    """
    run = only(SDPBackend.EFFICIENT_ATTENTION)
    groups = spec.groups
    if groups == 1 or q.shape[1] == 1:
        return run(q, k, v, spec=spec, **options)
    one = replace(spec, heads=spec.kv_heads)
    bias, alibi = options.pop("bias", None), options.pop("alibi", None)
    parts = []
    for g in range(groups):
        own = dict(options)
        if isinstance(bias, Tensor):
            own["bias"] = bias[:, g::groups] if bias.dim() == 4 and bias.shape[1] != 1 else bias
        if isinstance(alibi, Tensor):
            own["alibi"] = alibi[g::groups]
        parts.append(run(q[:, :, g::groups], k, v, spec=one, **own))
    return torch.stack(parts, dim=3).flatten(2, 3)  # (B, T, Hkv, G, D) -> (B, T, H, D)
