"""Numbers that a caller gave, checked: each function raises ConfigError that names the number, or returns it."""

import math
from numbers import Integral, Real
from typing import Any

from hasten.errors import ConfigError

LARGEST_SEED = 2**63 - 1


def real(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, finite: bool = True) -> float:
    """The number as a float; ConfigError naming it unless it is one, finite (if so asked) and within the bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, found {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if finite and not (math.isfinite(number) and low <= number <= high):
        bounds = f"between {low} and {high}" if math.isfinite(high) else f"at least {low} and finite"
        raise ConfigError(f"{name} is {value!r:.80}; it must be {bounds}")
    return number


def whole(name: str, value: Any, *, low: int = 1, high: int | None = None) -> int:
    """The whole number as an int; ConfigError naming it unless it is one within the bounds."""
    most = "" if high is None else f", at most {high}"
    integral = isinstance(value, Integral) and not isinstance(value, bool)
    if not integral or value < low or (high is not None and value > high):
        raise ConfigError(f"{name} must be a whole number, at least {low}{most}; found {value!r:.80}")
    return int(value)
