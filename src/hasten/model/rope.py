"""Rotary position embeddings (arXiv 2104.09864): pairs of elements of q and k are turned by position × frequency."""

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from hasten.model.config import RopeConfig


def frequencies(rope: RopeConfig, *, long: bool = False) -> Tensor:
    """The dim/2 angular frequencies in radians per position, float32, after the configured scaling."""
    found = _scaled(rope, long=long)
    return -found if rope.backwards else found


def _scaled(rope: RopeConfig, *, long: bool) -> Tensor:
    """The frequencies of a table that turns forwards."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = 1.0 / rope.theta**exponents  # (dim/2,)
    match rope.scaling:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            return plain / torch.tensor(rope.long_factor if long else rope.short_factor)
        case "proportional":
            return torch.where(torch.arange(rope.dim // 2) < rope.turned, plain / rope.factor, 0.0)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1's rule)."""
    turns = rope.original_positions * plain / (2 * math.pi)  # full turns within the pretraining context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Scale a frequency more the fewer turns it makes within the pretraining context (arXiv 2309.00071)."""

    def index_of(turns: float) -> float:
        """The (fractional) index of the frequency that makes `turns` turns in the pretraining context."""
        return rope.dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = max(high - low, 0.001)
    stretch = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain * (1 - stretch) + plain / rope.factor * stretch


Rotation = tuple[Tensor, ...]  # cos and sin (..., T, dim/2), and (..., T) by which queries are multiplied, if they are


class RotaryTable(nn.Module):
    """Computes cos and sin for given positions; keeps only the frequencies."""

    frequencies: Tensor
    long_frequencies: Tensor | None

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self._compute(None)

    def _compute(self, device: torch.device | None) -> None:
        with torch.device("cpu"):  # also where a model is made on the meta device
            short = frequencies(self.rope)
            long = frequencies(self.rope, long=True) if self.rope.scaling == "longrope" else None
        self.register_buffer("frequencies", short.to(device), persistent=False)
        self.register_buffer("long_frequencies", None if long is None else long.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move as nn.Module does, but recompute the frequencies: rounded by `to(dtype)` they give wrong angles at
        distant positions, and `to_empty` would lose them.
        """
        before = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies is not before:
            self._compute(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, stretched: Tensor | None = None) -> Rotation:
        """positions (..., T) of integers -> cos and sin (..., T, dim/2) in float32, and where the table has them the
        factors of queries (..., T).

        stretched, bool (..., T) or (..., 1): which tokens belong to sequences longer than longrope's pretraining
        context. By default each row of positions is one sequence, from its beginning.
        """
        angles = positions.unsqueeze(-1) * self.frequencies  # (..., T, dim/2)
        if self.long_frequencies is not None:
            # The long factors apply as soon as a sequence is longer than the pretraining context. Decided for each
            # sequence by itself, so that a neighbour in the batch changes nothing.
            if stretched is None:
                stretched = positions.amax(dim=-1, keepdim=True) >= self.rope.original_positions  # (..., 1)
            long_angles = positions.unsqueeze(-1).float() * self.long_frequencies
            angles = torch.where(stretched.unsqueeze(-1), long_angles, angles)
        turn = angles.cos(), angles.sin()
        if self.rope.attention_factor != 1:
            turn = turn[0] * self.rope.attention_factor, turn[1] * self.rope.attention_factor
        if not self.rope.query_beta:
            return turn
        lengths = (positions / self.rope.original_positions).floor()  # in pretraining contexts
        return *turn, 1 + self.rope.query_beta * torch.log1p(lengths)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool = False) -> Tensor:
    """Turn x (..., T, H, D) by cos, sin (..., T, dim/2): element i is paired with element i + dim/2, or (pairs) element
    2i with element 2i + 1.

    Computed in float32 and returned in x's dtype; elements past dim pass through (partial rotary).
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (..., T, 1, dim/2)
    if pairs:
        first, second = x[..., : 2 * half].float().unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)
    else:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
