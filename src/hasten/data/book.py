"""Short texts of different kinds that come with hasten, for benchmarks and examples.

alice.txt   a book in English: the first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865)
chat.txt    questions and answers, written for this
code.txt    Python: this package's packing.py as it once was
german.txt  another language: the beginning of Die Verwandlung (Franz Kafka, 1915)
"""

import glob
from pathlib import Path

_FOLDER = Path(__file__).parent
BOOK = _FOLDER / "alice.txt"
TEXTS = f"{glob.escape(str(_FOLDER))}/*.txt"  # as `read_documents` takes it, in alphabetical order


def book() -> str:
    """The chapter, 11 kB, a paragraph a line."""
    return BOOK.read_text(encoding="utf-8")


def texts() -> dict[str, str]:
    """All of them, by the kind: alice, chat, code, german."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.txt"))}
