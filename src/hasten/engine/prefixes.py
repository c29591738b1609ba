"""How the blocks of a beginning are found: a key for each, and how many of them a text can begin with."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

_KEY_BYTES = 16


def prefix_keys(tokens: Sequence[int], *, block_size: int, secret: bytes, salt: str = "") -> Iterator[bytes]:
    """The keys by which blocks are found: that of the beginning (of a secret and a salt), then of each full block."""
    key = _hash(secret, secret, salt.encode())
    yield key
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        key = next_key(secret, key, tokens[start : start + block_size])
        yield key


def next_key(secret: bytes, before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block of these tokens, behind the block with the key `before`."""
    return _hash(secret, before, array("q", tokens).tobytes())


def passed_blocks(held: int, *, block_size: int, reach: int | None) -> int:
    """Number of leading blocks to which no query from position `held` on looks back."""
    return 0 if reach is None else max(0, held - reach + 1) // block_size


def usable_blocks(there: Iterable[bool], *, block_size: int, reach: int | None) -> int:
    """How many blocks a text can begin with, if these of its blocks are there.

    With a `reach` those may be missing to which no query looks back any more.
    """
    found = count = 0  # blocks in a row up to this one; blocks that the text begins with
    for number, one in enumerate(there, 1):
        if not one and reach is None:
            break
        found = found + 1 if one else 0
        if found and found >= number - passed_blocks(number * block_size, block_size=block_size, reach=reach):
            count = number
    return count


def _hash(secret: bytes, before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, key=secret, digest_size=_KEY_BYTES).digest()
