"""Progressive layer dropping (arXiv 2010.13369): skip blocks at random, more often in later steps and deeper blocks.

    θ(t) = (1 - θ̄)·exp(-γt) + θ̄          how often the deepest block is kept, from 1 down to θ̄; γ = decay/T
    p_l  = 1 - l/L·(1 - θ(t))             probability of keeping block l of 0 … L-1
    h = x + G/p·attention(norm x);  y = h + G/p·mlp(norm h),  G ~ Bernoulli(p): one draw a block and micro-batch

The mean over G is the whole block. The draws depend on (seed, step, micro-batch) only: they are the same on every rank
and after resuming. Evaluation drops and scales nothing.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from hasten.training.recipe import Recipe


def theta(step: int, *, total: int | None, floor: float, decay: float) -> float:
    """θ of step number `step` (from 0) of `total`; 1, nothing dropped, while the total is unknown."""
    if total is None:
        return 1.0
    return (1 - floor) * math.exp(-decay / total * step) + floor


def keep_probabilities(layers: int, *, theta: float) -> list[float]:
    """p of each block, from 1 for the first to a little more than θ for the last."""
    return [1 - layer / layers * (1 - theta) for layer in range(layers)]


def draw_block_scales(probabilities: Sequence[float], *, seed: int, step: int, micro_step: int) -> list[float]:
    """Draw each block's scale: 0 (skipped), or 1/p if kept, with p its probability."""
    digest = hashlib.blake2b(f"{seed} {step} {micro_step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    draws = torch.rand(len(probabilities), generator=generator, dtype=torch.float64).tolist()
    return [1 / p if draw < p else 0.0 for p, draw in zip(probabilities, draws, strict=True)]


def kept_share(block_scales: Sequence[Sequence[float]]) -> float:
    """Share of the blocks that ran in a step; block_scales: of its micro-batches."""
    return sum(scale > 0 for own in block_scales for scale in own) / sum(map(len, block_scales))


def block_scales_of_step(recipe: Recipe, *, layers: int, step: int, total: int | None) -> list[list[float]] | None:
    """Scales of the blocks in each micro-batch of a step; None without layer dropping."""
    techniques = recipe.techniques
    if techniques.layer_drop is None:
        return None
    now = theta(step, total=total, floor=techniques.layer_drop, decay=techniques.layer_drop_decay)
    kept = keep_probabilities(layers, theta=now)
    micro = range(recipe.data.accumulation)
    return [draw_block_scales(kept, seed=recipe.run.seed, step=step, micro_step=number) for number in micro]
