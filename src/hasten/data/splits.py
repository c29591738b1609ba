"""Decides which documents are for training and which are held out."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hasten.data.documents import Conversation, Document, Item, Source
from hasten.data.sources import item_bytes
from hasten.errors import DataError

SplitName = Literal["train", "validation"]
BorderKind = Literal["line", "character"]


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The split of a source, decided document by document from its name and the seed alone.

    So a document stays in its split when others are added. Only where that leaves a split empty (a few documents) is
    one of them moved: `moved`. A source with one document is cut inside it at byte `cut`.
    """

    seed: int
    fraction: float
    moved: tuple[str, SplitName] | None = None
    cut: int | None = None
    cut_at: BorderKind | None = None

    def describe(self) -> str:
        """Describe the split, for logs and the manifest."""
        if self.cut is not None:
            return f"inside the only document, at a {self.cut_at} boundary (byte {self.cut})"
        if self.moved is not None:
            return f"by document; {self.moved[0]} was put into {self.moved[1]}, which had none"
        return "by document"

    def split_of(self, name: str) -> SplitName:
        """The split of a whole document."""
        if self.moved is not None and self.moved[0] == name:
            return self.moved[1]
        return "validation" if place_of(name, seed=self.seed) < self.fraction else "train"

    def parts(self, item: Item) -> Iterator[tuple[SplitName, Item]]:
        """Yield an item with its split, or both parts of the only document if that is cut."""
        if self.cut is None:
            yield self.split_of(item.name), item
            return
        assert isinstance(item, Document), "a conversation is never cut"
        cut, document = self.cut, item
        yield "train", Document(f"{item.name}#train", lambda: _cut_pieces(document, 0, cut))
        yield "validation", Document(f"{item.name}#validation", lambda: _cut_pieces(document, cut, None))


def place_of(name: str, *, seed: int) -> float:
    """A uniform number in [0, 1), a hash of the name and the seed."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def plan_split(source: Source, *, fraction: float, seed: int) -> SplitPlan:
    """Read a source once and assign documents by name. `fraction` 0 keeps everything for training.

    Raises DataError for a single conversation, which cannot be cut.
    """
    if fraction == 0:
        return SplitPlan(seed, fraction)
    count, lowest, highest = 0, (2.0, ""), (-1.0, "")  # outside of what a place can be
    for item in source.items():
        count += 1
        place = (place_of(item.name, seed=seed), item.name)
        lowest, highest = min(lowest, place), max(highest, place)
    if count == 1:
        return _plan_cut(item, source.name, fraction=fraction, seed=seed)
    if count and lowest[0] >= fraction:
        return SplitPlan(seed, fraction, moved=(lowest[1], "validation"))
    if count and highest[0] < fraction:
        return SplitPlan(seed, fraction, moved=(highest[1], "train"))
    return SplitPlan(seed, fraction)  # also for an empty source: whoever reads it says so


def _plan_cut(document: Item, source: str, *, fraction: float, seed: int) -> SplitPlan:
    if isinstance(document, Conversation):
        raise DataError(
            f"{source}: has one conversation, which cannot be cut into training and validation; give more, or set "
            "validation_fraction to 0"
        )
    total = item_bytes(document)
    cut, kind = _border(document, max(1, round(total * (1 - fraction))), total)
    if cut >= total:
        raise DataError(f"{source}: {total} bytes are too few to hold out a part; set validation_fraction to 0")
    return SplitPlan(seed, fraction, cut=cut, cut_at=kind)


def _encoded(document: Document) -> Iterator[tuple[int, bytes]]:
    """The pieces in UTF-8, each with the byte of the document at which it begins."""
    position = 0
    for piece in document.pieces():
        data = piece.encode()
        yield position, data
        position += len(data)


def _border(document: Document, wanted: int, total: int) -> tuple[int, BorderKind]:
    """The position to cut at: after the first line end from `wanted` on, else after the last one before it.

    Without any line end, the first boundary between characters from `wanted` on.
    """
    line, character = None, total
    for position, data in _encoded(document):
        at = max(0, wanted - position)
        after = data.find(b"\n", max(0, at - 1))
        if after >= 0 and position + after + 1 < total:
            return position + after + 1, "line"
        before = data.rfind(b"\n", 0, max(0, at - 1))
        if before >= 0:
            line = position + before + 1
        if character == total and at <= len(data):
            while at < len(data) and data[at] & 0xC0 == 0x80:  # inside a character
                at += 1
            character = position + at
    return (character, "character") if line is None else (line, "line")


def _cut_pieces(document: Document, start: int, stop: int | None) -> Iterator[str]:
    """Bytes start..stop of a document; both are at characters' borders."""
    for position, data in _encoded(document):
        if stop is not None and position >= stop:
            return
        part = data[max(start - position, 0) : None if stop is None else stop - position]
        if part:
            yield part.decode()
