"""The draw on CUDA, in Triton: one launch each for what is kept of the scores, and for the token that wins.

Import this file only where the kernels are taken; it imports Triton and registers the operators.
"""

import torch
import triton
from torch import Tensor

from hasten.ops.draw import triton_kernels as kernels
from hasten.ops.draw.splitmix import FIRST, GOLDEN, SECOND

_BLOCK = 4096  # scores that a program looks at together


@torch.library.custom_op("hasten_triton::draw", mutates_args=())
def draw(scores: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """As `reference_draw`: scores (B, V) float32, seeds and steps (B,) -> tokens (B,) int64."""
    scores = _rows(scores)
    tokens = torch.empty_like(seeds)
    if not len(scores):
        return tokens
    with torch.cuda.device_of(scores):
        kernels.draw[(len(scores),)](
            *(scores, seeds.contiguous(), steps.contiguous(), tokens, scores.shape[1], scores.stride(0)),
            GOLDEN=GOLDEN,
            FIRST=FIRST,
            SECOND=SECOND,
            ACCURATE=scores.is_cuda,
            BLOCK=min(_BLOCK // 4, triton.next_power_of_2(scores.shape[1])),
            num_warps=8,
        )
    return tokens


@draw.register_fake
def _(scores: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    return torch.empty_like(seeds)


@torch.library.custom_op("hasten_triton::least_kept", mutates_args=())
def least_kept(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest score of each row that top-k and then top-p keep, (B, 1); -inf where neither cuts.

    scores (B, V) float32; top_k (B, 1) int64, V: off; top_p (B, 1) float32, 1: off.
    """
    scores = _rows(scores)
    least = scores.new_empty(len(scores), 1)
    if not len(scores):
        return least
    with torch.cuda.device_of(scores):
        kernels.least_kept[(len(scores),)](
            scores,
            None if top_k is None else top_k.contiguous(),
            None if top_p is None else top_p.contiguous(),
            least,
            *(scores.shape[1], scores.stride(0)),
            BLOCK=min(_BLOCK, triton.next_power_of_2(scores.shape[1])),
            num_warps=8,
        )
    return least


@least_kept.register_fake
def _(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    return scores.new_empty(len(scores), 1)


@torch.library.custom_op("hasten_triton::place", mutates_args=())
def place(lengths: Tensor, counts: Tensor, table: Tensor, width: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where a batch's tokens stand: positions and slots (S, W), and the lengths (S,) that attention takes.

    lengths, counts (S,): tokens after the step, and of them new ones; table (S, columns); all int64.
    """
    size = len(lengths)
    positions, slots, seq_lens = (lengths.new_empty(shape) for shape in ((size, width), (size, width), (size,)))
    with torch.cuda.device_of(lengths):
        kernels.place[(size,)](
            *(lengths, counts, table, positions, slots, seq_lens, table.shape[1], block_size), W=width, num_warps=1
        )
    return positions, slots, seq_lens


@place.register_fake
def _(lengths: Tensor, counts: Tensor, table: Tensor, width: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    size = len(lengths)
    return lengths.new_empty(size, width), lengths.new_empty(size, width), lengths.new_empty(size)


@torch.library.custom_op("hasten_triton::move_on", mutates_args=("tokens", "lengths", "steps"))
def move_on(drawn: Tensor, tokens: Tensor, lengths: Tensor, steps: Tensor) -> None:
    """Make the drawn tokens (S,) the next step's, of the rows that have a length, and count them."""
    size = len(lengths)
    with torch.cuda.device_of(drawn):
        kernels.move_on[(triton.cdiv(size, 256),)](drawn, tokens, lengths, steps, size, BLOCK=256, num_warps=1)


@move_on.register_fake
def _(drawn: Tensor, tokens: Tensor, lengths: Tensor, steps: Tensor) -> None:
    return None


def _rows(scores: Tensor) -> Tensor:
    return scores if scores.stride(1) == 1 else scores.contiguous()
