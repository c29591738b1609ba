"""What a caller gave, checked: single numbers, and the fields of a dataclass by their annotations.

    block_size: Annotated[int, ABOVE_0] = 16
    kind: Literal["cosine", "constant"] | None = None

`require` raises ConfigError for the first field whose value its annotation does not allow; `real` and `whole` check one
number. All name what is wrong.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hasten.errors import ConfigError

LARGEST_SEED = 2**63 - 1
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    NoneType: "None",
}


@dataclass(frozen=True, slots=True)
class Must:
    """In the annotation of a field: what its number must be, in words, and the test."""

    be: str
    test: Callable[[float], bool]


ABOVE_0 = Must("more than 0", lambda n: n > 0)
AT_LEAST_0 = Must("at least 0", lambda n: n >= 0)
SHARE_ABOVE_0 = Must("more than 0, and at most 1", lambda n: 0 < n <= 1)
BELOW_1 = Must("at least 0 and less than 1", lambda n: 0 <= n < 1)
SHARE = Must("from 0 to 1", lambda n: 0 <= n <= 1)


def require(settings: Any) -> None:
    """Raise ConfigError for the first of a dataclass's `mistakes`."""
    for mistake in mistakes(settings):
        raise ConfigError(mistake)


def mistakes(settings: Any, prefix: str = "") -> Iterator[str]:
    """A sentence for each field of a dataclass, or of one inside it, whose value its annotation does not allow."""
    kind: Any = type(settings)
    for name, hint, default in _checked(kind):
        value = getattr(settings, name)
        if value is default:
            continue
        if is_dataclass(value) and type(value) is hint:
            yield from mistakes(value, f"{prefix}{name}.")
        elif wanted := unmet(value, hint):
            yield f"{prefix}{name} is {value!r:.80}; it must be {wanted}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{prefix}{name} is {value}; it must be a finite number"


@lru_cache
def hints_of(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields, evaluated."""
    return get_type_hints(kind, include_extras=True)


@lru_cache
def _checked(kind: Any) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of a dataclass's fields; a default needs no check."""
    defaults = {field.name: field.default for field in fields(kind)}
    return [(name, hint, defaults.get(name, MISSING)) for name, hint in hints_of(kind).items()]


def unmet(value: Any, hint: Any) -> str | None:
    """What a value must be by an annotation, in words; None where it is.

    Known are Annotated with `Must`, unions, None, Literal, lists and tuples (JSON has one for both), whole numbers and
    numbers (of which whole ones are some), and plain classes. An annotation of another kind allows everything.
    """
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        return None if number else WORDS[hint]
    if isinstance(hint, type):
        return None if isinstance(value, hint) else WORDS.get(hint, f"a {hint.__name__}")
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        broken = unmet(value, inner[0])
        if broken is None and value is not None:
            broken = next((rule.be for rule in inner if isinstance(rule, Must) and not rule.test(value)), None)
        return broken
    if origin in (Union, UnionType):
        found = [unmet(value, kind) for kind in inner]
        return None if None in found else " or ".join(map(str, found))
    if origin is Literal:
        known = any(type(value) is type(choice) and value == choice for choice in inner)
        return None if known else f"{'one of ' if len(inner) > 1 else ''}{', '.join(map(str, inner))}"
    if origin in (list, tuple):
        several = list(value) if isinstance(value, list | tuple) else [None]
        kinds = inner[:1] * len(several) if origin is list or Ellipsis in inner else inner
        fits = len(kinds) == len(several) and not any(map(unmet, several, kinds))
        return None if fits else f"a list of {' and '.join(_words(kind) for kind in inner if kind is not Ellipsis)}"
    return None


def _words(hint: Any) -> str:
    """What an annotation allows, in words."""
    if get_origin(hint) is Annotated:
        kind, *rules = get_args(hint)
        bounds = ", ".join(rule.be for rule in rules if isinstance(rule, Must))
        return f"{_words(kind)} ({bounds})" if bounds else _words(kind)
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


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
