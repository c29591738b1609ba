"""Boolean masks: True where a query may look at a key."""

import torch
from torch import Tensor


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None = None) -> Tensor:
    """Causal visibility, optionally limited to the last `window` keys, the query's own included.

    query_positions (..., T) and key_positions (..., S) are positions in the sequence; returns bool (..., T, S).
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)  # (..., T, S)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def causal(queries: int, keys: int, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """The mask (T, S) of `queries` that are the last ones of `keys` positions: aligned bottom right."""
    key_positions = torch.arange(keys, device=device)
    return visible(key_positions[keys - queries :], key_positions, window)
