"""Documents to shards: batches of text through the tokenizer's threads, in bounded memory."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from hasten.data.chat import RenderedChat, encode_chats, render, special_ids
from hasten.data.documents import PIECE_CHARACTERS, Conversation, Document, Source, cut_text
from hasten.data.shards import ShardWriter
from hasten.data.sources import item_bytes
from hasten.data.splits import SplitName, SplitPlan
from hasten.errors import DataError
from hasten.model.tokenizer import Tokenizer

# Text that is encoded at once: the tokenizer's threads share it. An encoding takes about 30 bytes a byte of text.
_BATCH_CHARACTERS = 1 << 21
VALIDATION_FILE = "validation.jsonl"


class Encoder:
    """Takes the items of a source in order and writes both splits and the held-out texts into `folder`.

    advance: told the bytes of text that are done. before, separator: the tokens around a document.
    """

    def __init__(self, *, folder: Path, tokenizer: Tokenizer, plan: SplitPlan, advance: Callable[[int], None]) -> None:
        self.tokenizer, self.plan, self.advance = tokenizer, plan, advance
        self.before, self.separator = _around(tokenizer)
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        splits: tuple[SplitName, ...] = ("train", "validation")
        self.writers = {split: ShardWriter(folder, split, dtype) for split in splits}
        self._held_out = (folder / VALIDATION_FILE).open("w", encoding="utf-8", newline="\n")
        self._texts: list[tuple[SplitName, str, bool, bool]] = []  # split, text, first, last piece
        self._chats: list[tuple[SplitName, RenderedChat, int]] = []
        self._waiting = 0

    def run(self, source: Source) -> None:
        """Encode everything. The files are complete when this returns."""
        try:
            for item in source.items():
                for split, part in self.plan.parts(item):
                    if isinstance(part, Document):
                        self._take_text(split, part)
                    else:
                        self._take_chat(split, part)
            self._flush()
            self._held_out.close()
        except BaseException:
            with suppress(OSError):
                self._held_out.close()
            for writer in self.writers.values():
                writer.abort()
            raise

    def _take_text(self, split: SplitName, document: Document) -> None:
        if self._chats:
            self._flush()
        for piece, first, last in _marked(cut_text(document.pieces(), characters=PIECE_CHARACTERS)):
            if split == "validation":
                self._hold_out(document.name, piece, first=first, last=last)
            self._texts.append((split, piece, first, last))
            self._wait_or_flush(len(piece))

    def _take_chat(self, split: SplitName, conversation: Conversation) -> None:
        if self._texts:
            self._flush()
        if self.tokenizer.chat_template is None:
            raise no_template(conversation, tokenizer="the given one")
        size = item_bytes(conversation)  # shared among the renderings, for the progress bar
        for chat in render(conversation, tokenizer=self.tokenizer):
            if split == "validation":
                self._hold_out(chat.name, chat.text, first=True, last=True)
            self._chats.append((split, chat, size))
            size = 0
            self._wait_or_flush(len(chat.text))

    def _hold_out(self, name: str, piece: str, *, first: bool, last: bool) -> None:
        if first:
            self._held_out.write(f'{{"name": {json.dumps(name)}, "text": "')
        self._held_out.write(json.dumps(piece, ensure_ascii=False)[1:-1])
        if last:
            self._held_out.write('"}\n')

    def _wait_or_flush(self, characters: int) -> None:
        self._waiting += characters
        if self._waiting >= _BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        if self._texts:
            batch = self.tokenizer.encode_batch([text for _, text, _, _ in self._texts], add_special_tokens=False)
            for (split, text, first, last), ids in zip(self._texts, batch, strict=True):
                writer, size = self.writers[split], len(text.encode())
                if first:
                    writer.begin_document()
                    ids = [*self.before, *ids]
                writer.add([*ids, self.separator] if last else ids)
                writer.text_bytes += size
                self.advance(size)
        if self._chats:
            encoded = encode_chats([chat for _, chat, _ in self._chats], tokenizer=self.tokenizer)
            special = special_ids(self.tokenizer)
            for (split, chat, size), (ids, weights) in zip(self._chats, encoded, strict=True):
                writer = self.writers[split]
                writer.begin_document()
                if not ids or ids[-1] != self.separator:
                    # A template without an end token leaves it to the separator to say that the answer is over.
                    unended = chat.finished and bool(weights) and weights[-1] == 1 and ids[-1] not in special
                    ids, weights = [*ids, self.separator], [*weights, int(unended)]
                writer.add(ids, weights=weights)
                writer.text_bytes += len(chat.text.encode())
                self.advance(size)
        self._texts.clear()
        self._chats.clear()
        self._waiting = 0


def _around(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """BOS where the tokenizer itself puts it before a text; end of text after it. Raises DataError without either."""
    ends = [*tokenizer.eos_ids[:1], *([] if tokenizer.bos_id is None else [tokenizer.bos_id])]
    if not ends:
        raise DataError(
            "the tokenizer has no end-of-text token to separate documents with; set eos_token in its "
            "tokenizer_config.json"
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
    """Each piece with: is it the first, is it the last."""
    first, held = True, None
    for piece in pieces:
        if held is not None:
            yield held, first, False
            first = False
        held = piece
    if held is not None:
        yield held, first, True
