"""Drafts without a model: what followed the longest suffix of the text where it occurred before.

It occurred in the prompt, in the answer so far, or in an answer to an earlier request of the same salt (suffix
decoding, arXiv 2411.04975; looking in the prompt only is prompt lookup). Among several places of the longest match the
tokens that follow most of them are taken. Instead of a tree of all suffixes there is a table of the places of short
pieces, from which a match is followed backwards: it is as exact but for pieces with very many places, of which the
latest are looked at, and a token costs two entries.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

from hasten.engine.speculation.proposer import Chance, Draft, Text

PIECES = (4, 2)  # tokens of the pieces, the longer ones are looked up first
PLACES = 16  # of a piece that are kept, the latest
LONGEST = 64  # a longer match says no more
SHARED_TOKENS = 1 << 16  # in one half of a salt's earlier answers; when the second is full, the first is dropped
SALTS = 64  # tenants whose answers are kept, at most
ALL_TOKENS = 1 << 18  # of all tenants together: about 500 bytes a token
# Lengths of a match from which on it is another kind.
_LENGTHS = (2, 3, 4, 5, 7, 9, 13, 17, 25, 33)
# How often the next token is right after a match of these lengths, where all its places go on alike; where they do not.
_PRIORS = (0.3, 0.5, 0.6, 0.75, 0.8, 0.8, 0.85, 0.93, 0.97, 0.98, 0.98)
_DIVIDED = 0.3


class SuffixIndex:
    """A text, and the places of its short pieces."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # of the token after a piece

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        text = self.tokens
        for end in range(start + 1, len(text) + 1):
            for size in PIECES:
                if end >= size:
                    places = self._places.setdefault(tuple(text[end - size : end]), [])
                    places.append(end)
                    if len(places) > 2 * PLACES:
                        del places[:PLACES]

    def find(self, text: Sequence[int]) -> tuple[int, list[int]]:
        """The length of the longest match of the text's end, and where it goes on, the latest place first."""
        for size in PIECES:
            places = self._places.get(tuple(text[-size:]), ()) if len(text) >= size else ()
            found: dict[int, list[int]] = {}
            for place in islice(reversed(places), PLACES):
                if place < len(self.tokens):
                    found.setdefault(self._length(text, place, size), []).append(place)
            if found:
                length = max(found)
                return length, found[length]
        return 0, []

    def _length(self, text: Sequence[int], place: int, length: int) -> int:
        most = min(LONGEST, place, len(text))
        while length < most and self.tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


class SuffixProposer:
    """Drafts by the longest match in the text itself, or where that is longer, in earlier answers."""

    name = "suffix"

    def __init__(self) -> None:
        self._own: dict[int, SuffixIndex] = {}
        self._earlier: OrderedDict[str, list[SuffixIndex]] = OrderedDict()  # of a salt: older answers, newer ones

    def prior(self, kind: int) -> float:
        """See `Proposer`."""
        return _PRIORS[kind // 2] if kind % 2 else _DIVIDED

    def propose(self, texts: Sequence[Text], *, floor: float, chance: Chance) -> list[Draft]:
        """See `Proposer`. A kind is a match's length, and whether all places of it go on alike."""
        return [self._draft(text, floor, chance) for text in texts]

    def _draft(self, text: Text, floor: float, chance: Chance) -> Draft:
        index = self._own.setdefault(text.number, SuffixIndex())
        index.extend(text.tokens[len(index.tokens) :])
        length, places = index.find(text.tokens)
        for earlier in reversed(self._earlier.get(text.salt, ())):
            other, elsewhere = earlier.find(text.tokens)
            if other > length:
                length, places, index = other, elsewhere, earlier
        draft, likely = Draft(), 1.0
        while len(draft.tokens) < text.room and places:
            (token, count), *_ = Counter(index.tokens[place] for place in places).most_common(1)
            kind = 2 * sum(length >= one for one in _LENGTHS) + (count == len(places))
            likely *= chance(kind)
            if likely < floor:
                break
            draft.tokens.append(token)
            draft.kinds.append(kind)
            length += 1
            places = [p + 1 for p in places if index.tokens[p] == token and p + 1 < len(index.tokens)]
        return draft

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """Forget a sequence and keep its answer, to be found by later ones of its salt."""
        self._own.pop(number, None)
        kept = self._earlier.setdefault(salt, [SuffixIndex()])
        self._earlier.move_to_end(salt)
        if len(kept[-1].tokens) >= SHARED_TOKENS:
            kept[:] = [kept[-1], SuffixIndex()]
        kept[-1].extend(answer)
        while len(self._earlier) > SALTS or (len(self._earlier) > 1 and self._remembered() > ALL_TOKENS):
            longest_ago = next(iter(self._earlier))
            del self._earlier[longest_ago][0]
            if not self._earlier[longest_ago]:
                del self._earlier[longest_ago]

    def _remembered(self) -> int:
        return sum(len(index.tokens) for kept in self._earlier.values() for index in kept)
