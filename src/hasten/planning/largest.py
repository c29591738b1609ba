"""The largest number that fits, of a batch or a length, in few tries."""

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int = 1 << 24) -> int:
    """The largest number up to `most` that fits, 0 if none does, by bisection: larger numbers must need more."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
