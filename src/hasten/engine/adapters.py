"""The adapters of an engine's model: which place has which name, and how they change between two steps."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.engine.request import Request, RequestRefused
from hasten.model.lora import Adapter

if TYPE_CHECKING:
    from hasten.engine.engine import Engine


class AdapterNumbers:
    """The numbers of a model's adapters by their names. unnamed: the number of "", by default none (-1)."""

    def __init__(self, names: Sequence[str], *, unnamed: int = -1) -> None:
        self._places: list[str | None] = [*names]  # None: nobody can ask for the adapter that is there, if one is
        self._versions: dict[str, str] = {}
        self.held: dict[object, int] = {}  # places that somebody uses beside the scheduler's texts
        self._unnamed = unnamed

    @property
    def names(self) -> list[str]:
        """The names that requests may give, in the order of their places."""
        return [name for name in self._places if name is not None]

    def number(self, name: str) -> int:
        """From 0, or -1 for none. Raises RequestRefused for a name that there is not."""
        if not name:
            return self._unnamed
        if name not in self._places:
            known = ", ".join(self.names) or "none"
            raise RequestRefused(f"there is no adapter {name!r:.100} here; loaded: {known}", field="adapter")
        return self._places.index(name)

    def sharing(self, request: Request) -> str | None:
        """`Request.sharing`, which tells the prompts of an adapter from those of another that had its name before."""
        own = request.sharing
        return None if own is None else own + self._versions.get(request.adapter, "")

    def hold(self, holder: object, name: str) -> int:
        """The number of a name, whose adapter stays in its place until `release`. Raises RequestRefused."""
        self.held[holder] = number = self.number(name)
        return number

    def release(self, holder: object) -> None:
        """End a `hold`, if it began."""
        self.held.pop(holder, None)

    def free_place(self, used: set[int]) -> int:
        """The first place without a name that no text uses, or the next new one."""
        return next((i for i, name in enumerate(self._places) if name is None and i not in used), len(self._places))

    def name_place(self, number: int, name: str) -> None:
        """Give a place a name. Blocks that the disk or the memory has of an earlier one are never found."""
        self._places += [None] * (number + 1 - len(self._places))
        self._places[number], self._versions[name] = name, secrets.token_hex(16)

    def forget(self, name: str) -> int:
        """Take a name away; returns its place."""
        number = self.number(name)
        self._places[number] = None
        self._versions.pop(name, None)
        return number


def load(engine: Engine, name: str, adapter: Adapter, folder: Path | None = None) -> None:
    """Give the model an adapter under a new name. Between two steps. Raises RequestRefused and as `place_adapter`.

    folder: where it was read; the other ranks that hold the model read their shares there.
    """
    engine.check_open()
    if not name or name in engine.adapters.names:
        known = ", ".join(engine.adapters.names)
        raise RequestRefused(f"an adapter needs a name that no other has, found {name!r:.100}; loaded: {known}")
    number = engine.adapters.free_place(_used(engine))
    engine.runner.place_adapter(number, adapter, folder)
    engine.adapters.name_place(number, name)


def unload(engine: Engine, name: str) -> None:
    """Take an adapter's name away: texts that use it go on with it, and nobody else can ask for it.

    Between two steps. Its place is free for another when the last of those texts has ended. Raises RequestRefused.
    """
    engine.check_open()
    number = engine.adapters.forget(name)
    if number not in _used(engine):
        engine.runner.place_adapter(number, None)


def _used(engine: Engine) -> set[int]:
    texts = (*engine.scheduler.running, *engine.scheduler.waiting)
    return {text.adapter for text in texts} | set(engine.adapters.held.values())
