"""Packs whole conversations into windows: no answer is trained without its prompt, and every window has targets.

Conversations are packed in order, as many as fit into a window. One that is longer than a window gets one to itself and
is cut at the end; if not even the beginning of an answer fits, it is left out. Plain texts among them are cut into
windows as usual.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hasten.data.shards import TokenSplit
from hasten.errors import DataError


@dataclass(frozen=True, slots=True)
class Packing:
    """The windows of a split.

    starts, counts: (W,) int64, the first token of each window and its number of tokens, with the last target.
    documents: documents in the split. cut: those whose end does not fit. skipped: those without a target in a window.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    documents: int
    cut: int
    skipped: int

    def describe(self, context: int) -> str:
        """Describe the packing in one line."""
        parts = [f"{self.documents:,} conversations in {len(self.starts):,} windows of {context:,} tokens"]
        if self.cut:
            parts.append(f"{self.cut:,} longer ones are cut at its end (--data.context)")
        if self.skipped:
            parts.append(f"{self.skipped:,} are left out, having no answer within it")
        return "; ".join(parts)


def longest_document(split: TokenSplit) -> int:
    """Number of tokens in the longest document of a split."""
    return int(np.diff(split.document_starts, append=len(split)).max(initial=0))


def pack(split: TokenSplit, *, length: int) -> Packing:
    """Pack a split with weights for rows of `length` tokens; a window has at most one more, for the last target.

    Raises DataError where no conversation has an answer that fits.
    """
    assert split.weights is not None
    weights = np.asarray(split.weights)
    begins = np.asarray(split.document_starts)
    sizes = np.diff(begins, append=len(split))
    learned = np.add.reduceat(weights, begins, dtype=np.int64) if len(begins) else begins
    room, windows = length + 1, list[tuple[int, int]]()
    start = count = cut = skipped = 0

    def close() -> None:
        nonlocal count
        if count > 1:
            windows.append((start, count))
        count = 0

    for begin, size, own in zip(begins.tolist(), sizes.tolist(), learned.tolist(), strict=True):
        if size > room and own == size:  # a text
            close()
            windows += [(at, min(room, begin + size - at)) for at in range(begin, begin + size - 1, length)]
        elif size > room:
            close()
            if weights[begin + 1 : begin + room].any():
                windows.append((begin, room))
                cut += 1
            else:
                skipped += 1
        elif not weights[begin + 1 : begin + size].any():
            close()
            skipped += 1
        else:
            if count + size > room or not count:
                close()
                start = begin
            count += size
    close()
    if not windows:
        without = ", or hold nothing out (--data.validation-fraction 0)" if split.name == "validation" else ""
        raise DataError(
            f"none of the {len(begins):,} conversations of the {split.name} split has an answer within {length:,} "
            f"tokens; the longest has {longest_document(split):,}: raise sequence_length "
            f"(hasten train: --data.context){without}"
        )
    starts, counts = np.array(windows, np.int64).T
    return Packing(starts, counts, documents=len(begins), cut=cut, skipped=skipped)
