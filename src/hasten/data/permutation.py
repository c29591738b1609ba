"""A random permutation of n items, computed element by element without a list of n numbers."""

from dataclasses import dataclass

_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers, the same on every machine (the finalizer of splitmix64; Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of 0..size-1 chosen by `key`: a Feistel network, walked until it is back in range.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), the cycle-walking cipher.
    """

    size: int
    key: int

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size, (index, self.size)
        half = ((self.size - 1).bit_length() + 1) // 2
        low_bits = (1 << half) - 1
        while True:
            left, right = index >> half, index & low_bits
            for turn in range(_ROUNDS):
                left, right = right, left ^ (mix(self.key, turn, right) & low_bits)
            index = left << half | right
            if index < self.size:  # at most four tries on average: the domain is less than 4 × size
                return index
