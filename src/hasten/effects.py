"""Options without effect: each field declares the condition it depends on, and one check reports those that fail it.

    momentum: Annotated[float, BELOW_1, Needs("optimizer.kind", "muon")] = 0.95
    layers: Annotated[int, ABOVE_0, Unless("init")] = 12
    optimizer: Annotated[Optimizer, Reads("kind")]    # a section: only this one of its fields is read
    EFFECTS = {"price": Needs("goal")}                # of a field that the dataclass inherits

A path names a field as its option does ("optimizer.kind"). `refuse_ignored` checks the options of a command line,
`ignored` any fields. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin

from hasten.checks import hints_of
from hasten.errors import ConfigError

Values = Callable[[str], Any]  # the value of a field, by its path
Write = Callable[[str], str]  # how a field is written in a message: its path, or its option
Facts = Mapping[str, Callable[[], Any]]  # paths that are no fields, such as "device": found when a condition asks


@dataclass(frozen=True, slots=True)
class Needs:
    """A field has an effect only where another one has one of `values`; without values: where it is set at all.

    Not set are None, False, 0 and "". but: fields of a section that need nothing.
    """

    path: str
    values: tuple[Any, ...]
    but: tuple[str, ...]

    def __init__(self, path: str, *values: Any, but: Sequence[str] = ()) -> None:
        for name, own in (("path", path), ("values", values), ("but", tuple(but))):
            object.__setattr__(self, name, own)

    def met(self, values: Values) -> bool:
        """Whether the field has an effect."""
        found = values(self.path)
        return found in self.values if self.values else bool(found)

    def says(self, name: str, values: Values, write: Write) -> str:
        """Why the option `name` has no effect, and what to do."""
        found = values(self.path)
        shown = _shown(write(self.path), found)
        if not self.values:
            without = f"without {write(self.path)}" if found is None or found is False else f"with {shown}"
            return f"{name} has no effect {without}; set that too, or leave {name} out"
        *others, last = map(str, self.values)
        wanted = f"{', '.join(others)} or {last}" if others else last
        return f"{name} has no effect with {shown}, only with {wanted}; change that, or leave {name} out"


class Unless(Needs):
    """A field has no effect where another one has one of `values`; without values: where it is set at all."""

    __slots__ = ()

    def met(self, values: Values) -> bool:
        return not Needs.met(self, values)

    def says(self, name: str, values: Values, write: Write) -> str:
        return f"{name} has no effect with {_shown(write(self.path), values(self.path))}; leave one of them out"


@dataclass(frozen=True, slots=True)
class Reads:
    """Only these fields of a section have an effect, in what `by` names."""

    but: tuple[str, ...]
    by: str

    def __init__(self, *names: str, by: str) -> None:
        object.__setattr__(self, "but", names)
        object.__setattr__(self, "by", by)

    def met(self, values: Values) -> bool:
        return False

    def says(self, name: str, values: Values, write: Write) -> str:
        return f"{name} has no effect in {self.by}; leave it out"


Condition = Needs | Reads


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a dataclass, or of a section in it. place: the attributes that lead to it."""

    path: str
    place: tuple[str, ...]
    conditions: tuple[Condition, ...]
    aliases: tuple[str, ...]


def options_of(kind: Any, *, flat: bool = False) -> dict[str, Option]:
    """The fields of a dataclass and of its sections, by path. flat: sections add no prefix to their fields' paths."""
    return {option.path: option for option in _options(kind, "", (), (), flat)}


def _options(
    kind: Any, prefix: str, place: tuple[str, ...], conditions: Sequence[Condition], flat: bool
) -> Iterator[Option]:
    inherited = {name: one for base in kind.__mro__ for name, one in base.__dict__.get("EFFECTS", {}).items()}
    for name in (one.name for one in fields(kind)):
        hint = hints_of(kind)[name]
        inner, extras = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        own = [one for one in extras if isinstance(one, Condition)]
        own += [one for one in conditions if name not in one.but]
        own += [inherited[name]] if name in inherited else []
        if is_dataclass(inner):
            # As tyro reads arg(name="") and OmitArgPrefixes.
            bare = flat or any(getattr(one, "name", None) == "" or str(one) == "OmitArgPrefixes" for one in extras)
            yield from _options(inner, prefix if bare else f"{prefix}{name}.", (*place, name), own, flat)
        else:
            aliases = tuple(alias for one in extras for alias in getattr(one, "aliases", None) or ())
            yield Option(f"{prefix}{name}", (*place, name), tuple(own), aliases)


def ignored(
    settings: Any,
    paths: Iterable[str],
    *,
    facts: Facts | None = None,
    write: Write = str,
    counts: Callable[[Condition], bool] = lambda condition: True,
    flat: bool = False,
) -> Iterator[str]:
    """A sentence for each of the fields that has no effect beside the others. counts: the conditions looked at."""
    known = options_of(type(settings), flat=flat)

    def values(path: str) -> Any:
        if facts is not None and path in facts:
            return facts[path]()
        found, place = settings, known[path].place if path in known else ()
        if not place:  # a property of a section, no option
            section, _, name = path.rpartition(".")
            place = next((*o.place[:-1], name) for o in known.values() if o.path.rpartition(".")[0] == section)
        for name in place:
            found = getattr(found, name)
        return found

    for path in paths:
        broken = (one for one in known[path].conditions if counts(one) and not one.met(values))
        if (condition := next(broken, None)) is not None:
            yield condition.says(write(path), values, write)


def given_options(arguments: Iterable[str], kind: Any, *, flat: bool = False) -> dict[str, str]:
    """The fields of a dataclass that a command line sets, by path, as their options are written there."""
    known = options_of(kind, flat=flat)
    aliases = {
        alias.lstrip("-").replace("-", "_"): option.path for option in known.values() for alias in option.aliases
    }
    found: dict[str, str] = {}
    for word in arguments:
        written = word.partition("=")[0].replace("_", "-")
        name = written.removeprefix("--").replace("-", "_")
        section, dot, last = name.rpartition(".")
        for one in (name, f"{section}{dot}{last.removeprefix('no_')}") if written.startswith("--") else ():
            if (path := aliases.get(one, one)) in known:
                found[path] = written
                break
    return found


def refuse_ignored(settings: Any, arguments: Iterable[str], *, facts: Facts | None = None, flat: bool = False) -> None:
    """Raise ConfigError for the first option of a command line that has no effect beside the others."""
    kind = type(settings)
    given, known = given_options(arguments, kind, flat=flat), options_of(kind, flat=flat)

    def write(path: str) -> str:
        return given.get(path, f"--{path.replace('_', '-')}" if path in known else path)

    for sentence in ignored(settings, given, facts=facts, write=write, flat=flat):
        raise ConfigError(sentence)


def _shown(option: str, value: Any) -> str:
    return option if value is True else f"{option} {'unset' if value is None else value}"
