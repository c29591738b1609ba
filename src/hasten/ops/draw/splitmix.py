"""The constants of the generator of noise, SplitMix64 (Steele, Lea, Flood 2014)."""


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# SplitMix64's constants; int64 products wrap around as the unsigned ones it is defined with.
GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)
