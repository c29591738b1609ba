"""The Jinja sandbox that chat templates run in (chat.py), imported when the first one is compiled."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Far above what a real template counts or repeats in one rendering (tens), far below what would hang a machine.
MAX_LOOP_STEPS = 1_000_000
MAX_REPEATED = 1_000_000
MAX_APPENDED = 10_000  # items of a list; a loop over it that appends to it ends so


class RaisedByTemplate(TemplateError):
    """The template called `raise_exception`: it refuses these messages."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also bounds repetition and powers: 'a' * 10**12 would take all memory in one step.

    A template may append to lists: those it makes, and the rendering's own copies of what it was given.
    """

    intercepted_binops = frozenset(["*", "**"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr == "append") or super().is_safe_attribute(obj, attr, value)

    # Jinja's own signature: a template may give arguments of any name.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, list) and len(owner) >= MAX_APPENDED:
            raise SecurityError(f"a list has grown past {MAX_APPENDED:,} items")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise SecurityError(f"a power of {right} is too large")
        for times, repeated in ((left, right), (right, left)):
            if not isinstance(times, int):
                continue
            if times.bit_length() > 4096:
                raise SecurityError("a number has grown too large")
            if isinstance(repeated, (str, list, tuple)) and times * len(repeated) > MAX_REPEATED:
                raise SecurityError(f"repeating {len(repeated)} items {times} times is too much")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # its own scope, as the call block that transformers makes of it


class _Namespace(Namespace):
    """Jinja's `namespace` without underscored names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Jinja's own signature: a template may call namespace(self=...).
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


def environment() -> Environment:
    """The sandbox, with what transformers gives to a chat template."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # a function: the type itself would show its attributes
        "namespace": _Namespace,
    }
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model was not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise RaisedByTemplate(str(message))


def bounded_range() -> Callable[..., range]:
    """`range` of one rendering, which counts MAX_LOOP_STEPS in all."""
    left = MAX_LOOP_STEPS

    def bounded(*args: int) -> range:
        nonlocal left
        numbers = range(*args)
        try:
            left -= len(numbers)
        except OverflowError:
            left = -1
        if left < 0:
            raise SecurityError(f"range({', '.join(map(str, args))}) passes {MAX_LOOP_STEPS:,} loop steps")
        return numbers

    return bounded
