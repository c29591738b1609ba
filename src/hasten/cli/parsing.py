"""Command lines: parsed by tyro into a command's dataclass, after what tyro does not do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import tyro

from hasten.cli.help import first_screen, for_parser, wants_help
from hasten.effects import refuse_ignored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def parse(command: Any, arguments: list[str], *, prog: str, description: str | None = None) -> Any:
    """Make a command of its arguments. What it holds of the library's dataclasses are options of their own names."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_several)
    config = (tyro.conf.OmitArgPrefixes,)
    if wants_help(arguments):
        print(first_screen(command, prog=prog, flat=True, description=description))
        raise SystemExit(0)
    arguments = for_parser(together(arguments, command))
    made = tyro.cli(command, args=arguments, prog=prog, description=description, config=config, registry=registry)
    refuse_ignored(made, arguments, flat=True)
    return made


def together(arguments: Sequence[str], command: type) -> list[str]:
    """The arguments, with an option of several values that is given more than once as one: the parser keeps the last.

    command: the dataclass whose fields, and those of the dataclasses in it, are the options.
    """
    several = set(_of_several_values(command))
    found: list[list[str]] = [[]]
    known: dict[str, list[str]] = {}
    group = found[0]
    for word in arguments:
        name, _, value = word.partition("=")
        if not word.startswith("--"):
            group.append(word)
        elif name.rpartition(".")[2].strip("-").replace("-", "_") not in several or value.startswith("-"):
            found.append(group := [word])
        elif name in known:
            group = known[name]
            group += [value] * bool(value)
        else:
            found.append(group := known.setdefault(name, [name, *[value] * bool(value)]))
    return [word for group in found for word in group]


def _of_several_values(options: type) -> Iterator[str]:
    for one in dataclasses.fields(options):
        if isinstance(one.default_factory, type) and dataclasses.is_dataclass(one.default_factory):
            yield from _of_several_values(one.default_factory)
        elif "tuple[" in str(one.type):
            yield one.name


def _several(wanted: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Tuples of names and of numbers: one word with commas, or several."""
    kinds: dict[Any, type] = {tuple[str, ...]: str, tuple[int, ...]: int, tuple[float, ...]: float}
    if wanted.type not in kinds:
        return None
    kind = kinds[wanted.type]

    def read(words: list[str]) -> tuple[Any, ...]:
        parts = [part.strip() for word in words for part in word.split(",") if part.strip()]
        try:
            return tuple(kind(part) for part in parts)
        except ValueError:
            numbers = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"{numbers} separated by commas are wanted, such as 1,8; found {words}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME,..." if kind is str else f"{kind.__name__.upper()},...",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )
