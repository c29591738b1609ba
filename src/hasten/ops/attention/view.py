"""What a kernel needs to write this step's keys and values itself, and to read all the others."""

from typing import NamedTuple

from torch import Tensor


class KVView(NamedTuple):
    """One layer's keys and values during one step.

    k, v (slots + 1, Hkv, D), or int8 (slots + 1, Hkv, D + 4) (int8_rows.py), the last row taking the padding; slots
    int64 (R,): the row for each of the step's R tokens, -1 for padding. Tokens starts[b] … starts[b+1] - 1 belong to
    sequence b and are the last of its lengths[b] positions. Contiguous: first int64 (B,), the slot of each sequence's
    position 0. Paged: table int64 (B, blocks).
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    first: Tensor | None
    table: Tensor | None = None
    block_size: int = 0


class StackView(NamedTuple):
    """KVView of many layers that have all but k and v in common."""

    k: list[Tensor]
    v: list[Tensor]
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    first: Tensor | None
    table: Tensor | None = None
    block_size: int = 0
