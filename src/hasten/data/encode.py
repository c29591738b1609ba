"""Encodes documents to shards, in batches on the tokenizer's threads and in bounded memory."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from hasten.data.chat import RenderedChat, encode_chats, render, special_ids
from hasten.data.documents import PIECE_CHARACTERS, Conversation, Document, Source, cut_text
from hasten.data.shards import ShardWriter
from hasten.data.sources import item_bytes
from hasten.data.splits import SplitName, SplitPlan
from hasten.errors import DataError
from hasten.text.tokenizer import Tokenizer

# Text that is encoded at once: the tokenizer's threads share it. An encoding takes about 30 bytes a byte of text.
_BATCH_CHARACTERS = 1 << 21
VALIDATION_FILE = "validation.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A unit of encoding: a part of a text, or a whole chat. read: its bytes in the source, to show progress."""

    split: SplitName
    name: str
    text: str
    read: int
    first: bool = True
    last: bool = True
    chat: RenderedChat | None = None


class Encoder:
    """Takes the items of a source in order and writes both splits and the held-out texts into `folder`.

    advance: called with the bytes of text that were encoded. before, separator: the tokens around a document.
    """

    def __init__(self, *, folder: Path, tokenizer: Tokenizer, plan: SplitPlan, advance: Callable[[int], None]) -> None:
        self.tokenizer, self.plan, self.advance = tokenizer, plan, advance
        self.before, self.separator = _around(tokenizer)
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        splits: tuple[SplitName, ...] = ("train", "validation")
        self.writers = {split: ShardWriter(folder, split, dtype) for split in splits}
        self._held_out = (folder / VALIDATION_FILE).open("w", encoding="utf-8", newline="\n")
        self._waiting: list[_Piece] = []

    def run(self, source: Source) -> None:
        """Encode everything. The files are complete when this returns."""
        characters = 0
        try:
            for piece in self._pieces(source):
                if piece.split == "validation":
                    self._hold_out(piece)
                self._waiting.append(piece)
                characters += len(piece.text)
                if characters >= _BATCH_CHARACTERS:
                    self._flush()
                    characters = 0
            self._flush()
            self._held_out.close()
        except BaseException:
            with suppress(OSError):
                self._held_out.close()
            for writer in self.writers.values():
                writer.abort()
            raise

    def _pieces(self, source: Source) -> Iterator[_Piece]:
        for item in source.items():
            for split, part in self.plan.parts(item):
                if isinstance(part, Document):
                    for text, first, last in _marked(cut_text(part.pieces(), characters=PIECE_CHARACTERS)):
                        read = len(text.encode())
                        yield _Piece(split=split, name=part.name, text=text, read=read, first=first, last=last)
                    continue
                if self.tokenizer.chat_template is None:
                    raise no_template(part, tokenizer="the given one")
                read = item_bytes(part)  # counted with the first of its renderings
                for chat in render(part, tokenizer=self.tokenizer):
                    yield _Piece(split=split, name=chat.name, text=chat.text, read=read, chat=chat)
                    read = 0

    def _hold_out(self, piece: _Piece) -> None:
        if piece.first:
            self._held_out.write(f'{{"name": {json.dumps(piece.name)}, "text": "')
        self._held_out.write(json.dumps(piece.text, ensure_ascii=False)[1:-1])
        if piece.last:
            self._held_out.write('"}\n')

    def _flush(self) -> None:
        """Encode and write the waiting pieces."""
        plain = [piece.text for piece in self._waiting if piece.chat is None]
        texts = iter(self.tokenizer.encode_batch(plain, add_special_tokens=False))
        chats = iter(encode_chats([p.chat for p in self._waiting if p.chat is not None], tokenizer=self.tokenizer))
        special = special_ids(self.tokenizer)
        for piece in self._waiting:
            writer, weights = self.writers[piece.split], None
            if piece.first:
                writer.begin_document()
            if piece.chat is None:
                ids = [*(self.before if piece.first else ()), *next(texts), *([self.separator] if piece.last else ())]
            else:
                ids, weights = next(chats)
                if not ids or ids[-1] != self.separator:
                    # A template without an end token leaves it to the separator to say that the answer is over.
                    unended = piece.chat.finished and bool(weights) and weights[-1] == 1 and ids[-1] not in special
                    ids, weights = [*ids, self.separator], [*weights, int(unended)]
            writer.add(ids, weights=weights)
            writer.text_bytes += len(piece.text.encode())
            self.advance(piece.read)
        self._waiting.clear()


def _around(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Tokens around a document: BOS if the tokenizer adds it, and the end of text. Raises DataError without either."""
    ends = [*tokenizer.eos_ids[:1], *([] if tokenizer.bos_id is None else [tokenizer.bos_id])]
    if not ends:
        raise DataError(
            "the tokenizer has no end-of-text token to separate documents; set eos_token in its tokenizer_config.json"
        )
    begins = tokenizer.encode("", add_special_tokens=True)[:1]
    return begins if begins == [tokenizer.bos_id] and begins != ends[:1] else [], ends[0]


def training_texts(source: Source, plan: SplitPlan, *, limit: int) -> Iterator[str]:
    """The training split's text in pieces, about `limit` characters of it. DataError for a conversation."""
    taken = 0
    for item in source.items():
        for split, part in plan.parts(item):
            if isinstance(part, Conversation):
                raise no_template(part, tokenizer="one trained here")
            if split != "train":
                continue
            for piece in cut_text(part.pieces(), characters=PIECE_CHARACTERS):
                yield piece
                taken += len(piece)
                if taken >= limit:
                    return


def no_template(conversation: Conversation, *, tokenizer: str) -> DataError:
    """The error for a chat that cannot be rendered."""
    return DataError(
        f"{conversation.name}: a chat needs a tokenizer with a chat template, and {tokenizer} has none; name a chat "
        "model's folder as the tokenizer"
    )


def _marked(pieces: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield (piece, is first, is last)."""
    before: str | None = None
    for piece, after in pairwise(chain(pieces, [None])):
        assert piece is not None
        yield piece, before is None, after is None
        before = piece
