"""Markers in text that arrives in pieces: matched and found as literals, in time linear in the text.

A marker comes from a stranger's template, so it is never a regular expression. White space in it and in the text is
skipped, since models vary it. A pattern is markers with a hole (an id, a number) between each two.
"""

import re
from collections.abc import Sequence

NO, MAYBE = -1, -2  # there is no match; the text ended before that was certain
HOLE = "\0"
_LONGEST = 64  # characters of white space in a row, or of a hole
_IN_HOLE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-")
_SPACE = re.compile(r"\s+")

Pattern = tuple[str, ...]


def squash(text: str) -> str:
    """The text without white space."""
    return _SPACE.sub("", text)


def common_prefix(first: str, second: str) -> str:
    """What two texts have in common at their beginnings."""
    length = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return min(first, second, key=len) if length is None else first[:length]


def pattern_of(text: str) -> Pattern:
    """The pattern of a text in which HOLE marks the holes."""
    return tuple(squash(text).split(HOLE))


def match(marker: str, text: str, start: int = 0) -> int:
    """Where the marker that begins at `start` ends in the text, or NO, or MAYBE."""
    at, skipped = start, 0
    for letter in marker:
        while at < len(text) and text[at].isspace() and skipped < _LONGEST:
            at, skipped = at + 1, skipped + 1
        if at >= len(text):
            return MAYBE
        if text[at] != letter:
            return NO
        at, skipped = at + 1, 0
    return at


def match_pattern(pattern: Pattern, text: str, start: int = 0) -> tuple[int, list[str]]:
    """Match a pattern as `match` does a marker; also returns what fills the holes."""
    holes: list[str] = []
    at = match(pattern[0], text, start)
    for part in pattern[1:]:
        if at < 0:
            break
        begin = at
        while at < len(text) and text[at] in _IN_HOLE and at - begin < _LONGEST:
            at += 1
        if at >= len(text):
            return MAYBE, holes
        holes.append(text[begin:at])
        at = match(part, text, at)
    return at, holes


def find(patterns: Sequence[Pattern], text: str, start: int = 0) -> tuple[int, int, int]:
    """The first place of one of the patterns: where it begins and ends, and which it is.

    The end is MAYBE where the text ends before that is certain, NO (and the place the text's end) where there is none.
    """
    places = {pattern[0][0]: text.find(pattern[0][0], start) for pattern in patterns if pattern[0]}
    while True:
        place = min((at for at in places.values() if at >= 0), default=NO)
        if place < 0:
            return len(text), NO, -1
        for which, pattern in enumerate(patterns):
            end = match_pattern(pattern, text, place)[0] if pattern[0] else NO
            if end != NO:
                return place, end, which
        places[text[place]] = text.find(text[place], place + 1)
