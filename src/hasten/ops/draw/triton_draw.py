"""The draw on CUDA, in Triton: one launch for how far scores are kept, one for the token that wins among them.

Import this file only where the kernels are taken; it imports Triton and registers the operators.
"""

import torch
import triton
from torch import Tensor

from hasten.ops.draw import step_kernels
from hasten.ops.draw import triton_kernels as kernels
from hasten.ops.draw.splitmix import FIRST, GOLDEN, SECOND
from hasten.ops.triton_support import readable, registered

LANES = ROOM = 1 << 13  # of a row: maxima that bound its k-th largest logit, and candidates that are searched
WARPS = 32  # of the program that searches a row
BLOCK = 1024  # scores that a program of the draw looks at together
WARPS_AT_ONCE = 4224  # of all programs of the draw, about: 32 on each multiprocessor of an H100


@registered("hasten_triton::draw")
def draw(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    log_min_p: Tensor | None,
    greedy: Tensor | None,
    drawn: bool,
) -> Tensor:
    """The tokens (B,) int64 of logits (B, V) of 16 or 32 bits, in two launches.

    The settings have B values each, None: off in all rows (`RowParams`). greedy: bool, rows that take their largest
    logit; drawn: whether any row draws, with the noise of its seed and step (int64).
    """
    logits = _rows(logits)
    tokens = torch.empty_like(seeds)
    rows, vocab = logits.shape
    if not rows:
        return tokens
    best, arrived = seeds.new_empty(rows), seeds.new_empty(rows, dtype=torch.int32)
    settings = (temperature, top_k, top_p, log_min_p) if drawn else (None,) * 4
    shifts, least = _cut(logits, *settings, best, arrived)
    blocks = triton.cdiv(vocab, BLOCK)
    warps = BLOCK // 256
    tiles = max(1, min(blocks, rows * blocks * warps // WARPS_AT_ONCE))
    with torch.cuda.device_of(logits):
        kernels.draw[(rows, triton.cdiv(blocks, tiles))](
            *(readable(logits), seeds.contiguous(), steps.contiguous(), settings[0], greedy if drawn else None),
            *(shifts, least, best, arrived, tokens, vocab, logits.stride(0), tiles),
            GOLDEN=GOLDEN,
            FIRST=FIRST,
            SECOND=SECOND,
            ON_GPU=logits.is_cuda,
            DRAWN=drawn,
            BLOCK=BLOCK,
            num_warps=warps,
        )
    return tokens


@draw.register_fake
def _(logits: Tensor, seeds: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(seeds)


@registered("hasten_triton::least_kept")
def least_kept(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest score of each row that top-k and then top-p keep, (B, 1); -inf where neither cuts.

    scores (B, V); top_k (B, 1) int64, V: off; top_p (B, 1) float32, 1: off.
    """
    if not len(scores):
        return scores.new_empty(0, 1, dtype=torch.float32)
    _, least = _cut(_rows(scores), None, top_k, top_p, None, None, None)
    assert least is not None
    return least[:, None]


@least_kept.register_fake
def _(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    return scores.new_empty(len(scores), 1, dtype=torch.float32)


def _cut(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    log_min_p: Tensor | None,
    best: Tensor | None,
    arrived: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Each row's shift before its temperature, and the smallest score it keeps, (B,); None where nothing asks."""
    rows, vocab = logits.shape
    searched = top_k is not None or top_p is not None
    shifts = None if temperature is None else logits.new_empty(rows, dtype=torch.float32)
    least = logits.new_empty(rows, dtype=torch.float32) if searched or log_min_p is not None else None
    with torch.cuda.device_of(logits):
        kernels.cut[(rows,)](
            readable(logits),
            *(None if own is None else own.contiguous() for own in (temperature, top_k, top_p, log_min_p)),
            *(shifts, least, best, arrived),
            logits.new_empty(rows, ROOM, dtype=torch.float32) if searched else None,
            *(vocab, logits.stride(0)),
            BLOCK=min(LANES, triton.next_power_of_2(vocab)),
            ROOM=ROOM,
            ON_GPU=logits.is_cuda,
            num_warps=WARPS,
        )
    return shifts, least


@registered("hasten_triton::place")
def place(lengths: Tensor, counts: Tensor, table: Tensor, width: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and slots (S, W) of a batch's new tokens, and the lengths (S,) that attention takes.

    lengths, counts (S,): tokens after the step, and of them new ones; table (S, columns); all int64.
    """
    size = len(lengths)
    positions, slots, seq_lens = (lengths.new_empty(shape) for shape in ((size, width), (size, width), (size,)))
    with torch.cuda.device_of(lengths):
        step_kernels.place[(size,)](
            *(lengths, counts, table, positions, slots, seq_lens, table.shape[1], block_size), W=width, num_warps=1
        )
    return positions, slots, seq_lens


@place.register_fake
def _(lengths: Tensor, counts: Tensor, table: Tensor, width: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    size = len(lengths)
    return lengths.new_empty(size, width), lengths.new_empty(size, width), lengths.new_empty(size)


@registered("hasten_triton::move_on", mutates_args=("tokens", "lengths", "steps"))
def move_on(drawn: Tensor, tokens: Tensor, lengths: Tensor, steps: Tensor) -> None:
    """Make the drawn tokens (S,) the next step's, of the rows that have a length, and count them."""
    size = len(lengths)
    with torch.cuda.device_of(drawn):
        step_kernels.move_on[(triton.cdiv(size, 256),)](drawn, tokens, lengths, steps, size, BLOCK=256, num_warps=1)


@move_on.register_fake
def _(drawn: Tensor, tokens: Tensor, lengths: Tensor, steps: Tensor) -> None:
    return None


def _rows(logits: Tensor) -> Tensor:
    logits = logits.float() if logits.dtype == torch.float64 else logits
    return logits if logits.stride(1) == 1 else logits.contiguous()
