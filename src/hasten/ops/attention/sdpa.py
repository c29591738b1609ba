"""PyTorch's scaled_dot_product_attention: one fused kernel that never writes the score matrix to memory.

`sdpa` lets PyTorch choose the backend at every call. `flash`, `memory_efficient`, `cudnn` and `math` each force one, as
in "Accelerated Generative Diffusion and nanoGPT with PyTorch 2" (PyTorch blog, April 2023), with
`torch.nn.attention.sdpa_kernel`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hasten.ops.attention.inputs import PLAIN, AttentionInputs, alibi_bias, per_document, positions, visibility
from hasten.ops.attention.spec import AttentionSpec

# cuDNN, PyTorch's first choice on Hopper GPUs, makes a plan for each length: 74 ms of the host on an H200.
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """Same contract as `reference`, without soft-capping. Lengths are taken to vary where no gradient is wanted."""
    return _sdpa(q, k, v, spec, inputs, varies=not torch.is_grad_enabled())


def _backends(q: Tensor, varies: bool) -> AbstractContextManager:
    """Those that PyTorch chooses from: without cuDNN on a GPU where lengths vary."""
    return sdpa_kernel(WITHOUT_PLANS) if varies and q.device.type == "cuda" else nullcontext()


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN, *, varies: bool = False
) -> Tensor:
    queries, keys = q.shape[1], k.shape[1]
    if inputs.documents is not None and q.device.type == "cpu":
        # Document by document, the work is the sum of the squares; a mask would make it the square of the sum.
        return per_document(partial(_sdpa, varies=varies), q, k, v, spec, inputs)
    mask, windowed = inputs.mask, spec.window is not None and spec.window < keys
    simple = inputs.only_a_mask
    if queries == 1 and simple and (mask is not None or not windowed):
        return _one_query(q, k, v, spec, inputs, varies=varies)
    # PyTorch aligns `is_causal` to the top left, so it is our causal attention only when the lengths are equal.
    # Its CPU kernel hides the later keys before it scales the scores: with a scale of zero or less that gives NaN.
    square = simple and mask is None and spec.causal and queries == keys and not windowed and spec.scale > 0
    attn_mask = None if square else visibility(queries, keys, spec, inputs, q.device)
    if inputs.bias is not None or inputs.alibi is not None:
        attn_mask = _added(attn_mask, q, keys, inputs)
    if attn_mask is not None:  # a mask of fewer dimensions is the same for all that it lacks
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    # The fused kernels want the head's values next to each other.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with _backends(q, varies and attn_mask is None):  # with a mask and grouped heads only cuDNN is fused
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # (B, H, T, D)
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=attn_mask,
            dropout_p=inputs.dropout,
            is_causal=square,
            scale=spec.scale,
            enable_gqa=spec.heads != spec.kv_heads,
        )
    return out.transpose(1, 2)


def _added(seen: Tensor | None, q: Tensor, keys: int, inputs: AttentionInputs) -> Tensor:
    """One additive mask of what is added to the scores and, as -infinity, what hides keys."""
    # The CPU's kernels take a float32 mask beside half precision; CUDA's want the inputs' own dtype.
    dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
    added = torch.zeros((), dtype=dtype, device=q.device) if inputs.bias is None else inputs.bias.to(dtype)
    if inputs.alibi is not None:
        places = positions(q.shape[1], keys, inputs.documents, q.device)[:2]
        added = added + alibi_bias(inputs.alibi, *places).to(dtype)  # (…, H, T, S)
    return added if seen is None else added.masked_fill(~seen, float("-inf"))


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, *, varies: bool
) -> Tensor:
    """A decode step: query heads that share a key head see the same keys, so they become the rows of one small matrix.

    PyTorch's grouped-query path walks through the keys once for every query head instead.
    """
    groups, mask = spec.groups, inputs.mask
    rows = q[:, 0].unflatten(1, (spec.kv_heads, groups))  # (B, Hkv, G, D)
    if mask is not None and mask.dim() == 4:  # of each head: (B, H, 1, S) -> (B, Hkv, G, S)
        mask = mask[:, :, 0].unflatten(1, (-1 if mask.shape[1] > 1 else 1, groups if mask.shape[1] > 1 else 1))
    if groups == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # One row of half precision takes the kernel's slow path; two equal ones do not.
        rows = rows.expand(-1, -1, 2, -1)
    with _backends(q, varies):
        out = F.scaled_dot_product_attention(
            rows,
            k.transpose(1, 2),  # (B, Hkv, S, D)
            v.transpose(1, 2),
            attn_mask=mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask,  # (B, 1, 1, S)
            dropout_p=inputs.dropout,
            scale=spec.scale,
        )
    return out[:, :, :groups].flatten(1, 2).unsqueeze(1)  # (B, 1, H, D)


def only(backend: SDPBackend) -> Callable[..., Tensor]:
    """`sdpa`, but by this backend or not at all (PyTorch raises RuntimeError where it does not serve)."""

    def run(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v, spec, inputs)

    return run


def memory_efficient(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """PyTorch's memory-efficient backend, which knows no shared key heads: one call for each group of heads instead.

    Query heads g, g + G, g + 2G … each read a key head of their own, so nothing is copied out.
    """
    run = only(SDPBackend.EFFICIENT_ATTENTION)
    groups = spec.groups
    if groups == 1 or q.shape[1] == 1:
        return run(q, k, v, spec, inputs)
    one = replace(spec, heads=spec.kv_heads)
    parts = []
    for g in range(groups):
        bias = inputs.bias if inputs.bias is None or inputs.bias.shape[1] == 1 else inputs.bias[:, g::groups]
        alibi = None if inputs.alibi is None else inputs.alibi[g::groups]
        parts.append(run(q[:, :, g::groups], k, v, one, inputs._replace(bias=bias, alibi=alibi)))
    return torch.stack(parts, dim=3).flatten(2, 3)  # (B, T, Hkv, G, D) -> (B, T, H, D)
