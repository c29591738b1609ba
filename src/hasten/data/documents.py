"""Sources and what they yield: documents of text and conversations, and how a long text is cut into pieces."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Long texts are encoded in pieces of this many characters: enough of them to keep every core busy in one batch, and
# small enough that a file of many gigabytes never lies in memory as a whole.
PIECE_CHARACTERS = 1 << 17


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that is unique in its source. `pieces()` starts over at every call; pieces are never empty."""

    name: str
    pieces: Callable[[], Iterator[str]]

    @staticmethod
    def of_text(name: str, text: str) -> "Document":
        return Document(name, lambda: iter((text,) if text else ()))


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat: messages of {"role", "content", ...}, in order. `name` says file and line, as errors do.

    tools: JSON schemas of the functions that its assistant may call.
    """

    name: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None


Item = Document | Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A corpus. It can be read any number of times, in the same order, and has a cheap fingerprint.

    name: as the user gave it. items: iterates over it. fingerprint: returns a hex digest of the present contents.
    size: bytes to read, for a progress bar; None where it is not known. skipped: files left out because they
    are not UTF-8 text.
    """

    name: str
    items: Callable[[], Iterator[Item]]
    fingerprint: Callable[[], str]
    size: int | None = None
    skipped: int = 0


def cut_text(pieces: Iterable[str], *, characters: int) -> Iterator[str]:
    """Cut a text into pieces of at most `characters` characters, at places that do not change its token ids.

    A single line end between two characters that are not white space is a border for the pre-tokenizers of GPT-2 and
    its successors, so the ids of the pieces are those of the whole text. Where there is no such place the cut is at
    another line end, at a space, or at last anywhere.
    """
    buffer = ""
    for piece in pieces:
        buffer += piece
        while len(buffer) > characters:
            end = _cut(buffer, characters)
            yield buffer[:end]
            buffer = buffer[end:]
    if buffer:
        yield buffer


def _cut(text: str, limit: int) -> int:
    """The position to cut at: 1 <= cut <= limit < len(text)."""
    end = text.rfind("\n", 1, limit)
    while end > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
        end = text.rfind("\n", 1, end)
    for separator in ("\n", " "):
        end = text.rfind(separator, 0, limit)
        if end >= 0:
            return end + 1
    return limit
