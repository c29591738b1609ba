"""The merges of a sentencepiece vocabulary, which a GGUF file leaves out: they follow from the tokens and their scores.

Every way to make a token of two others is a merge. A vocabulary of 262,144 tokens has 1.2 million ways to divide one,
so the parts are looked up by their hashes, in numpy. These have 64 bits: two texts of one hash do not come up by
chance, and the library refuses a merge whose parts together are no token.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hasten.errors import ConfigError

MAX_TOKEN = 1024  # characters of a token whose merges are looked for; that takes their square
MAX_MERGES = 1 << 26  # characters that all merges make, and 16 more for each: half a million of 8 take a fifth
MOST_ALIKE = 64  # hashes that begin with the same bits: a file that is made to have more is searched by halves
CHUNK = 1 << 17  # characters that are hashed at once
BASE = 0x9E3779B97F4A7C15  # of the hashes, odd, so that it has an inverse


def merges_of(vocabulary: Mapping[str, int], scores: Sequence[float] | np.ndarray) -> list[tuple[str, str]]:
    """The merges, the best score first. scores: of each id.

    The order among equals is that of transformers' conversion. Raises ConfigError where there are far more of them than
    tokens, as in no real vocabulary.
    """
    names = list(vocabulary)
    sizes = np.fromiter(map(len, names), np.int64, len(names))
    hashes = np.zeros(len(names), np.uint64)
    for tokens, hashed in _chunks(names, sizes):
        hashes[tokens] = hashed.between(hashed.starts, hashed.ends)
    table = _Table(hashes, np.flatnonzero((sizes > 0) & (sizes <= MAX_TOKEN)))
    whole, left, right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    room = MAX_MERGES
    for tokens, hashed in _chunks(names, sizes):
        ways = sizes[tokens] - 1
        row = np.repeat(np.arange(len(tokens)), ways)  # of each way to divide one, whose token it is, and where
        cut = hashed.starts[row] + 1 + np.arange(len(row)) - np.repeat(np.cumsum(ways) - ways, ways)
        first = table.find(hashed.between(hashed.starts[row], cut))
        row, cut, first = (part[first >= 0] for part in (row, cut, first))
        second = table.find(hashed.between(cut, hashed.ends[row]))
        row, first, second = (part[second >= 0] for part in (row, first, second))
        room -= int((sizes[tokens[row]] + 16).sum())
        if room < 0:
            raise ConfigError(f"its {len(names):,} tokens can be made of one another in too many ways")
        for found, part in ((whole, tokens[row]), (left, first), (right, second)):
            found.append(part)
    of, a, b = map(np.concatenate, (whole, left, right))
    score = np.asarray(scores, dtype=np.float64)[np.fromiter(vocabulary.values(), np.int64, len(names))[of]]
    order = np.lexsort((-sizes[b], -sizes[a], -score))  # stable: equals stay in the order of the vocabulary
    texts = np.array(names, dtype=object)
    return list(zip(texts[a[order]].tolist(), texts[b[order]].tolist(), strict=True))


class _Hashed:
    """Hashes of any part of some tokens: polynomials in BASE over their characters, modulo 2**64."""

    def __init__(self, text: str, sizes: np.ndarray) -> None:
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(characters * _powers(BASE, len(characters)), dtype=np.uint64)
        self._sums = np.concatenate((np.zeros(1, np.uint64), sums))
        # Times BASE: the first bits of a single character's hash then differ as those of others do.
        self._shift = _powers(pow(BASE, -1, 1 << 64), len(characters) + 1) * np.uint64(BASE)

    def between(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The hashes of the characters from `starts` to before `ends`."""
        return (self._sums[ends] - self._sums[starts]) * self._shift[starts]


class _Table:
    """Where a token of a hash is: among those that begin with the same bits, a few, behind one another."""

    def __init__(self, hashes: np.ndarray, places: np.ndarray) -> None:
        order = places[np.argsort(hashes[places], kind="stable")]
        bits = max(1, len(order)).bit_length()
        self._shift = np.uint64(64 - bits)
        self._first = np.searchsorted(hashes[order], np.arange(1 << bits, dtype=np.uint64) << self._shift)
        self._most = int(np.diff(self._first, append=len(order)).max())
        self._hashes = np.append(hashes[order], np.uint64((1 << 64) - 1))  # no hash is above the last
        self._places = np.append(order, -1)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """The token of each hash, -1 where there is none."""
        if self._most > MOST_ALIKE:
            at = np.searchsorted(self._hashes[:-1], hashes)
        else:
            at = self._first[hashes >> self._shift]
            left = np.flatnonzero(self._hashes[at] < hashes)
            while len(left):
                at[left] += 1
                left = left[self._hashes[at[left]] < hashes[left]]
        return np.where(self._hashes[at] == hashes, self._places[at], -1)


def _chunks(names: Sequence[str], sizes: np.ndarray) -> Iterator[tuple[np.ndarray, _Hashed]]:
    """The tokens that may be a merge, or a part of one, some at a time."""
    tokens = np.flatnonzero((sizes > 0) & (sizes <= MAX_TOKEN))
    chunk = np.cumsum(sizes[tokens]) // CHUNK
    for part in np.split(tokens, np.flatnonzero(np.diff(chunk)) + 1):
        yield part, _Hashed("".join([names[i] for i in part.tolist()]), sizes[part])


def _powers(base: int, count: int) -> np.ndarray:
    return np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64)
