"""A pattern as one word of a command line, and as values of a JSON file.

parse_pattern("bigbird:window=5,random-blocks=2")      # names as in PATTERNS, fields as in the pattern's class
parse_pattern("variable:windows=1+2+4")                # lists with + between their numbers
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hasten.errors import ConfigError
from hasten.ops.attention.pattern_layout import Pattern
from hasten.ops.attention.patterns import PATTERNS

LARGEST = 1 << 20  # of any number, and of a file's lists: nothing absurd is laid out
LONGEST_LIST = 4096
# A model reads from left to right, and its kernels take no other patterns; all of its heads are named.
FIXED_FIELDS = ("causal", "first_head")


def parse_pattern(text: str) -> Pattern:
    """The causal pattern that a text names. Raises ConfigError with the names and fields that there are."""
    name, _, rest = text.partition(":")
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, given, value = item.partition("=")
        if not given:
            raise ConfigError(f"attention pattern {text!r}: {item!r} is not of the form field=value")
        values[key.strip().replace("-", "_")] = _value(f"attention pattern {name}: {key.strip()}", value.strip())
    return pattern_of({"name": name} | values)


def pattern_of(values: Mapping[str, Any]) -> Pattern:
    """The causal pattern of JSON values: `name`, and any of the fields. Raises ConfigError for anything else."""
    name = values.get("name")
    if not isinstance(name, str) or name not in PATTERNS or name == "dense":
        known = ", ".join(known for known in PATTERNS if known != "dense")
        raise ConfigError(f"there is no attention pattern {name!r:.60} for a causal model; known: {known}")
    kind = PATTERNS[name]
    known_fields = {f.name: f for f in fields(kind) if f.name not in FIXED_FIELDS}
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key == "name":
            continue
        if key not in known_fields:
            raise ConfigError(f"attention pattern {name}: no field {key!r:.60}; it has {', '.join(known_fields)}")
        given[key] = _checked(f"attention pattern {name}: {key}", value, known_fields[key].default)
    return kind(**given)


def _checked(what: str, value: Any, default: Any) -> Any:
    """A value from outside, of the kind that the field's default has."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{what} must be true or false; found {value!r:.60}")
        return value
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) > LONGEST_LIST or not all(type(number) is int and abs(number) <= LARGEST for number in numbers):
        raise ConfigError(f"{what} must hold integers up to {LARGEST}; found {value!r:.60}")
    if isinstance(default, tuple | None):
        return tuple(numbers)
    if isinstance(value, list):
        raise ConfigError(f"{what} must be one integer; found {value!r:.60}")
    return value


def pattern_values(pattern: Pattern) -> dict[str, Any]:
    """JSON values from which `pattern_of` makes the pattern again: its name, and the fields that are not as usual."""
    name = next(name for name, kind in PATTERNS.items() if kind is type(pattern))
    values: dict[str, Any] = {"name": name}
    for f in fields(pattern):
        value = getattr(pattern, f.name)
        if f.name not in FIXED_FIELDS and value != f.default:
            values[f.name] = list(value) if isinstance(value, tuple) else value
    return values


def _value(what: str, text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        numbers = [int(part) for part in text.split("+")]
    except ValueError:
        raise ConfigError(f"{what} is {text!r:.60}; it must be a number, a list as 1+2, true or false") from None
    return numbers[0] if len(numbers) == 1 else numbers
