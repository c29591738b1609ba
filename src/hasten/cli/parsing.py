"""Command lines: parsed by tyro into a command's dataclass, after steps that tyro lacks."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import tyro

from hasten.cli.help import first_screen, for_parser, wants_help
from hasten.effects import refuse_ignored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def parse(
    command: Any, arguments: list[str], *, prog: str, description: str | None = None, may_follow: str = ""
) -> Any:
    """Parse arguments into a command. Fields of dataclasses in it are options without a prefix.

    may_follow: a word in the usage line that `with_model_option` makes an option of.
    """
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_several)
    config = (tyro.conf.OmitArgPrefixes,)
    if wants_help(arguments):
        print(first_screen(command, prog=prog, flat=True, description=description, may_follow=may_follow))
        raise SystemExit(0)
    arguments = for_parser(merge_repeated(arguments, command))
    made = tyro.cli(command, args=arguments, prog=prog, description=description, config=config, registry=registry)
    refuse_ignored(made, arguments, flat=True)
    return made


def with_model_option(arguments: Sequence[str], command: type) -> list[str]:
    """The arguments, with the first word that is no option's value as --model's, wherever it is.

    A list with a comma in it is one word, so that MODEL may follow it.
    """
    kinds = dict(_kinds(command))
    values = 0.0  # words that the last option still takes
    for index, word in enumerate(arguments):
        if word.startswith("--"):
            name, assigned, _ = word.removeprefix("--").partition("=")
            kind = kinds.get(name.replace("-", "_"), "bool")  # --no-OPTION too; the parser refuses unknown ones
            values = math.inf if "tuple[" in kind else 1.0
            if assigned or "bool" in kind:
                values = 0.0
        elif not values:
            return [*arguments[:index], "--model", *arguments[index:]]
        else:
            values = 0.0 if "," in word else values - 1
    return list(arguments)


def merge_repeated(arguments: Sequence[str], command: type) -> list[str]:
    """Join an option of several values that is given more than once, of which the parser would keep the last.

    command: the dataclass whose fields, and those of the dataclasses in it, are the options.
    """
    several = {name for name, kind in _kinds(command) if "tuple[" in kind}
    found: list[list[str]] = [[]]
    known: dict[str, list[str]] = {}
    group = found[0]
    for word in arguments:
        name, _, value = word.partition("=")
        if not word.startswith("--"):
            group.append(word)
            continue
        if name.rpartition(".")[2].strip("-").replace("-", "_") not in several or value.startswith("-"):
            group = [word]
            found.append(group)
            continue
        if name not in known:
            known[name] = [name]
            found.append(known[name])
        group = known[name]
        if value:
            group.append(value)
    return [word for group in found for word in group]


def _kinds(options: type) -> Iterator[tuple[str, str]]:
    """The names of a dataclass's fields, and of those of the dataclasses in it, each with the text of its type."""
    for one in dataclasses.fields(options):
        if isinstance(one.default_factory, type) and dataclasses.is_dataclass(one.default_factory):
            yield from _kinds(one.default_factory)
        else:
            yield one.name, str(one.type)


def _several(wanted: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """The parser of tuples of names or numbers: one word with commas, or several words."""
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
