"""Options without effect: each field declares the condition it depends on, and one check reports those that fail it.

    momentum: Annotated[float, BELOW_1, Needs("optimizer.kind", "muon")] = 0.95
    layers: Annotated[int, ABOVE_0, Unless("init")] = 12
    optimizer: Annotated[Optimizer, Reads("kind")]    # a section: only this one of its fields is read
    dtype: Annotated[str, Holds("writes_folder", "in a GGUF file")]    # a property, for what no field says alone
    capture: Annotated[bool, ON_CUDA, Neutral(False)]    # elsewhere nothing is captured anyway: False is no error
    EFFECTS = {"price": Needs("goal"), "run.export": ...}    # of inherited fields, and of those of sections

A path names a field as its option does ("optimizer.kind"), a property, or a fact such as KIND. `refuse_ignored` checks
the options of a command line, `ignored` any fields. An option that equals its default, or is neutral, is never
refused. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin

from hasten.checks import hints_of
from hasten.errors import ConfigError

Values = Callable[[str], Any]  # the value of a field, by its path
Write = Callable[[str], str]  # how a field is written in a message: its path, or its option
Facts = Mapping[str, Callable[[], Any]]  # paths that are no fields, such as KIND: found when a condition asks

KIND = "a device of kind"  # cpu or cuda, what the option --device comes to


def facts_of(device: str) -> Facts:
    """The facts that follow from a device, as options name it. torch is imported when a condition asks."""

    def kind() -> str:
        from hasten.machine import resolve_device

        return resolve_device(device).type

    return {KIND: kind}


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
        written = write(self.path)
        shown = _shown(written, found)
        if not self.values:
            if shown == written and _negative(written):
                return f"{name} has no effect with {written}; leave one of them out"
            unset = found is None or found is False or found == () or found == ""
            without = f"without {written}" if unset else f"with {shown}"
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
        advice = f"change that, or leave {name} out" if self.values else "leave one of them out"
        return f"{name} has no effect with {_shown(write(self.path), values(self.path))}; {advice}"


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


@dataclass(frozen=True, slots=True)
class Holds:
    """A field has an effect only where a property is true; `why` says where it is not, and may say what to do."""

    path: str
    why: str
    but: tuple[str, ...] = ()

    def met(self, values: Values) -> bool:
        """Whether the field has an effect."""
        return bool(values(self.path))

    def says(self, name: str, values: Values, write: Write) -> str:
        """Why the option `name` has no effect, and what to do."""
        return f"{name} has no effect {self.why}{', or' if ';' in self.why else ';'} leave {name} out"


@dataclass(frozen=True, slots=True)
class Neutral:
    """Values that ask for what holds anyway where their field has no effect. Like the default, they are not refused."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)


Condition = Needs | Reads | Holds
ON_CPU, ON_CUDA = Needs(KIND, "cpu"), Needs(KIND, "cuda")


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a dataclass, or of a section in it. place: the attributes that lead to it. neutral: see Neutral."""

    path: str
    place: tuple[str, ...]
    conditions: tuple[Condition, ...]
    aliases: tuple[str, ...]
    neutral: tuple[Any, ...] = ()


def options_of(kind: Any, *, flat: bool = False) -> dict[str, Option]:
    """The fields of a dataclass and of its sections, by path. flat: sections add no prefix to their fields' paths."""
    found = {option.path: option for option in _options(kind, "", (), (), flat)}
    for base in kind.__mro__:
        for path, added in base.__dict__.get("EFFECTS", {}).items():
            if path in found:  # else a subclass hides it
                conditions = added if isinstance(added, tuple) else (added,)
                found[path] = replace(found[path], conditions=(*found[path].conditions, *conditions))
    return found


def _options(
    kind: Any, prefix: str, place: tuple[str, ...], conditions: Sequence[Condition], flat: bool
) -> Iterator[Option]:
    for name in (one.name for one in fields(kind)):
        hint = hints_of(kind)[name]
        inner, extras = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        own = [one for one in extras if isinstance(one, Condition)]
        own += [one for one in conditions if name not in one.but]
        if "Suppress" in map(str, extras):  # no option: another one sets it
            continue
        if is_dataclass(inner):
            # As tyro reads arg(name="") and OmitArgPrefixes.
            bare = flat or any(getattr(one, "name", None) == "" or str(one) == "OmitArgPrefixes" for one in extras)
            yield from _options(inner, prefix if bare else f"{prefix}{name}.", (*place, name), own, flat)
        else:
            aliases = tuple(alias for one in extras for alias in getattr(one, "aliases", None) or ())
            neutral = tuple(value for one in extras if isinstance(one, Neutral) for value in one.values)
            yield Option(f"{prefix}{name}", (*place, name), tuple(own), aliases, neutral)


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
        if path in known:
            return value_at(settings, known[path].place)
        section, _, name = path.rpartition(".")  # a property, of a section or of all
        places = (option.place[:-1] for option in known.values() if option.path.rpartition(".")[0] == section)
        return getattr(value_at(settings, next(places)) if section else settings, name)

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


def refuse_ignored(settings: Any, arguments: Iterable[str], *, usual: Any = None, flat: bool = False) -> None:
    """Raise ConfigError for the first option of a command line that has no effect beside the others.

    usual: the settings without options; by default the dataclass's own defaults. What conditions depend on beside
    options are the settings' `facts()`, where they have such a method, or follow from their device.
    """
    kind = type(settings)
    given, known = given_options(arguments, kind, flat=flat), options_of(kind, flat=flat)
    facts = settings.facts() if hasattr(settings, "facts") else facts_of(getattr(settings, "device", "auto"))

    def changed(path: str) -> bool:
        place = known[path].place
        default = default_at(kind, place) if usual is None else value_at(usual, place)
        return value_at(settings, place) not in (default, *known[path].neutral)

    def write(path: str) -> str:
        return given.get(path, f"--{path.replace('_', '-')}" if path in known else path)

    for sentence in ignored(settings, filter(changed, given), facts=facts, write=write, flat=flat):
        raise ConfigError(sentence)


def value_at(settings: Any, place: Iterable[str]) -> Any:
    """The value of a field, by the attributes that lead to it."""
    for name in place:
        settings = getattr(settings, name)
    return settings


def default_at(kind: Any, place: Sequence[str]) -> Any:
    """A field's default; MISSING where it has none."""
    first, *inner = place
    field = next(one for one in fields(kind) if one.name == first)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default if default is MISSING else value_at(default, inner)


def _negative(option: str) -> bool:
    return option.rpartition(".")[2].removeprefix("--").startswith("no-")


def _shown(option: str, value: Any) -> str:
    if value is True or (value is False and _negative(option)):
        return option
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{option} {'unset' if value is None else value}"
