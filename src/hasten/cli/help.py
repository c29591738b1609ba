"""The first screen of a command's --help: the options that most people need, then the names of the others in groups.

`FIRST` lists the explained options of each command; by default those of its own class. The groups are the dataclasses
that declare the others. `--help-all` explains everything.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hasten.checks import hints_of
from hasten.effects import Reads, default_at, options_of

WIDTH = 100
COLUMN = 30  # where explanations begin
ONE_LINE = 140  # characters of an explanation; longer ones are cut at a semicolon
FIRST = {
    "generate": "prompt chat max_new_tokens temperature top_p seed quantize device json",
    "chat": "system max_new_tokens temperature top_p seed quantize device verbose",
    "serve": "host port api_key served_model_name adapter quantize device max_sequences max_length cache_gib",
    "eval": "text against limit_bytes context tasks limit quantize device json",
    "quantize": "output scheme group_size method calibration samples format overwrite json",
    "merge": "dtype text overwrite json",
    "export": "dtype dequantize gguf json",
    "convert": "format overwrite json",
    "plan": "use device batch_size length weights ranks json picture",
    "doctor": "quick json",
    "demo": "minutes budget published folder again",
    "explain": "quantize dtype device adapter json",
    "explain attention": "shape kv_heads dtype window layer device json",
    "bench generate": "model shape rungs batches text gptq draft rounds json picture",
    "bench train": "shape recipe rungs sequence_length batch_size rounds json picture",
    "bench serve": "model shape url quantize requests concurrency lengths rates json picture",
    "profile train RECIPE": "measured sort output tensorboard",
    "profile generate": "batch prompt_tokens quantize dtype device measured output",
    "profile serve": "batch prompt_tokens quantize dtype device measured output",
}
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True, slots=True)
class Shown:
    """An option as a help screen shows it. owner: the dataclass that declares it."""

    path: str
    flag: str
    metavar: str
    text: str
    owner: type
    positional: bool
    required: bool


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for the first screen."""
    return bool({"-h", "--help"} & set(arguments))


def for_parser(arguments: Sequence[str]) -> list[str]:
    """Replace --help-all by the parser's --help, which explains every option."""
    return ["--help" if one == "--help-all" else one for one in arguments]


def first_screen(
    command: type, *, prog: str, flat: bool = False, description: str | None = None, may_follow: str = ""
) -> str:
    """The help of a command in one screen. prog: the command as typed. flat: options of sections have no prefixes.
    may_follow: a word that the command takes in the place of an option, such as MODEL."""
    options = [
        _shown(command, option.path, option.place)
        for option in options_of(command, flat=flat).values()
        if not any(isinstance(one, Reads) for one in option.conditions)  # it never has an effect here
    ]
    places = [one for one in options if one.positional]
    by_path = {one.path: one for one in options}
    named = FIRST.get(prog.removeprefix("hasten "), "").split()
    own = [by_path[path] for path in named] or [one for one in options if one.owner is command]
    first = [*places, *(one for one in own if not one.positional)]
    needed = [f"{one.flag} {one.metavar}" for one in options if one.required]
    words = [*([f"[{may_follow}]"] if may_follow else []), *(one.metavar for one in places), *needed]
    usage = " ".join(["usage:", prog, *words, "[options]"])
    about = description or inspect.cleandoc(str(command.__doc__))
    lines = [usage, "", *textwrap.wrap(about.partition("\n\n")[0], WIDTH), ""]
    for one in first:
        lines += _explained(one)
    groups: dict[type, list[str]] = {command: []}
    for one in options:
        if one not in first:
            groups.setdefault(one.owner, []).append(one.flag)
    more = {owner: flags for owner, flags in groups.items() if flags}
    if more:
        lines += ["", f"More options ({prog} --help-all explains them):"]
    for owner, flags in more.items():
        lines += [f"  {_title(owner, command)}:", *textwrap.wrap(", ".join(flags), WIDTH, **_indented(4))]
    return "\n".join(lines)


def _explained(one: Shown) -> list[str]:
    flag = re.sub(r"^--no-|(?<=\.)no-", "--[no-]" if one.flag.startswith("--no-") else "[no-]", one.flag, count=1)
    head = f"  {one.metavar}" if one.positional else f"  {flag} {one.metavar}".rstrip()
    text = textwrap.wrap(one.text, WIDTH - COLUMN) or [""]
    if len(head) < COLUMN - 1:
        return [f"{head:<{COLUMN}}{text[0]}", *(" " * COLUMN + line for line in text[1:])]
    return [head, *(" " * COLUMN + line for line in text)]


def _indented(size: int) -> dict[str, Any]:
    return {"initial_indent": " " * size, "subsequent_indent": " " * size, "break_on_hyphens": False}


def _title(owner: type, command: type) -> str:
    """The heading of a group of options: the beginning of its class's docstring."""
    return "Specific to this command" if owner is command else re.split(r"[:;]| \(", _sentence(str(owner.__doc__)))[0]


def _sentence(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    whole = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", whole, maxsplit=1)[0]


def _shown(command: type, path: str, place: tuple[str, ...]) -> Shown:
    kind: Any = command
    for name in place[:-1]:
        kind = _inner(hints_of(kind)[name])
    name = place[-1]
    owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
    hint = hints_of(kind)[name]
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    default = default_at(command, place)
    if default is MISSING:  # of the section, or of the option itself
        default = default_at(kind, (name,))
    positional = "Positional" in map(str, extras)
    said = next((one.name for one in extras if getattr(one, "name", None)), None)
    section, dot, last = path.rpartition(".")
    metavar, switch = _metavar(_inner(hint)), default is True
    flag = f"--{section}{dot}{'no-' if switch else ''}{said or last}".replace("_", "-")
    if positional:
        metavar = next((one.metavar for one in extras if getattr(one, "metavar", None)), name.upper())
    text = _sentence(_texts(owner).get(name, ""))
    if len(text) > ONE_LINE:
        text = re.split(r";(?![^(]*\))", text)[0]  # outside brackets
    if switch:
        text += " (the default)"
    elif default not in (MISSING, None, False, (), "") and not positional:
        text += f" (default {', '.join(map(str, default)) if isinstance(default, tuple) else default})"
    required = default is MISSING and not positional and len(place) == 1  # a section comes with its values
    return Shown(path, flag, metavar, text, owner, positional, required)


def _inner(hint: Any) -> Any:
    """A type without its annotations, and without None."""
    if get_origin(hint) is Annotated:
        return _inner(get_args(hint)[0])
    if get_origin(hint) not in (Literal, tuple, dict) and type(None) in get_args(hint):
        return _inner(next(one for one in get_args(hint) if one is not type(None)))
    return hint


def _metavar(kind: Any) -> str:
    if kind is bool or is_dataclass(kind):
        return ""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return "|".join(_metavar(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"{_metavar(_inner(get_args(kind)[0]))} ..."
    return METAVARS.get(kind, "VALUE")


@lru_cache
def _texts(kind: type) -> dict[str, str]:
    """The documentation of a dataclass's fields: below each, or under Args in the class's docstring."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(getattr(text.value, "value", "")).split())
    arguments = inspect.cleandoc(str(kind.__doc__)).partition("Args:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?=    \w+: )", f"\n{arguments}"):
        name, _, said = entry.strip().partition(": ")
        if said:
            texts.setdefault(name, " ".join(said.split()))
    return texts
