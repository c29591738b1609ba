"""Boolean masks: True where a query may look at a key; and ALiBi, the mask's soft relative."""

import functools
import math

import torch
from torch import Tensor

from hasten.ops.attention.inputs import AttentionInputs, Documents
from hasten.ops.attention.spec import AttentionSpec


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None = None) -> Tensor:
    """Causal visibility, optionally limited to the last `window` keys, the query's own included.

    query_positions (..., T) and key_positions (..., S) are positions in the sequence; returns bool (..., T, S).
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)  # (..., T, S)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def causal(queries: int, keys: int, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """The mask (T, S) of `queries` that are the last ones of `keys` positions: aligned bottom right."""
    return visible(torch.arange(keys - queries, keys, device=device), torch.arange(keys, device=device), window)


def positions(
    queries: int, keys: int, documents: Documents | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Positions (T,) of the queries and (S,) of the keys within their sequence, and which pairs (T, S) share one.

    The last query stands where the last key does, in every document. The third is None without documents.
    """
    key_places = torch.arange(keys, device=device)
    if documents is None:
        return torch.arange(keys - queries, keys, device=device), key_places, None
    query_places = torch.arange(queries, device=device)
    of_query = torch.searchsorted(documents.queries[1:].long(), query_places, right=True)  # (T,) document numbers
    of_key = torch.searchsorted(documents.keys[1:].long(), key_places, right=True)
    # Counted from the end of the document, which both share.
    query_places = query_places - documents.queries[1:].long()[of_query]
    return query_places, key_places - documents.keys[1:].long()[of_key], of_query[:, None] == of_key


def visibility(
    queries: int, keys: int, spec: AttentionSpec, inputs: AttentionInputs, device: torch.device
) -> Tensor | None:
    """All that hides keys, as one mask that broadcasts to (B, H, T, S), or None where every query sees every key."""
    mask, parts = inputs.mask, []
    if mask is not None:
        parts.append(mask.unsqueeze(1) if mask.dim() == 3 else mask)  # (T, S), (B, 1, T, S), or (B, H, T, S)
    elif inputs.block_mask is not None:
        parts.append(inputs.block_mask.dense(queries, keys, device))  # (1 or H, T, S)
    causal = spec.causal and not parts
    if causal or inputs.documents is not None:
        query_places, key_places, together = positions(queries, keys, inputs.documents, device)
        if causal:
            parts.append(visible(query_places, key_places, spec.window))
        if together is not None:
            parts.append(together)
    if inputs.intervals is not None:
        parts.append(inputs.intervals.dense(keys).unsqueeze(1))  # (B, 1, T or 1, S)
    if inputs.key_padding is not None:
        parts.append(inputs.key_padding[:, None, None])  # (B, 1, 1, S)
    return functools.reduce(torch.logical_and, parts) if parts else None


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """ALiBi's slopes (H,) in float32: a geometric series from 2^(-8/H) on (arXiv 2108.12409).

    Where H is no power of two, those of the next lower one, and then every other one of twice as many, as published.
    """
    whole = 1 << (heads.bit_length() - 1)
    steps = [-8 * (i + 1) / whole for i in range(whole)] + [-4 * (2 * i + 1) / whole for i in range(heads - whole)]
    return torch.tensor([math.pow(2, step) for step in steps], dtype=torch.float32, device=device)


def alibi_bias(slopes: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """-slope · distance, (H, T, S): what ALiBi adds to the scores."""
    distance = (query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)).abs()
    return -slopes[:, None, None] * distance
