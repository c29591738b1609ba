"""A short English text that is always there: the first chapter of Alice's Adventures in Wonderland (1865)."""

from pathlib import Path

BOOK = Path(__file__).parent / "alice.txt"


def book() -> str:
    """The chapter, 11 kB, a paragraph a line."""
    return BOOK.read_text(encoding="utf-8")
