"""Which functions of hasten a run calls, and in which files they are: a measure of how far a reader has to walk."""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import hasten

SOURCE = f"{Path(hasten.__file__).parent}/"
_INLINE = ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>")


@dataclass
class Walk:
    """The calls of functions of hasten, in order, as ("engine/engine.py", "Engine.step"), in all threads."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Each function once, in the order of first calls."""
        return list(dict.fromkeys(self.calls))

    @property
    def files(self) -> list[str]:
        """Each file once, in the order of first calls."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def counts(self) -> dict[str, int]:
        """How many functions were called, in how many files."""
        return {"functions": len(self.functions), "files": len(self.files)}

    def before(self, name: str) -> "Walk":
        """The calls before the first one of a function."""
        return Walk(self.calls[: self._starts(name)[0]])

    def between(self, name: str, number: int) -> "Walk":
        """The calls from the `number`-th one of a function (counted from 0) to the next one."""
        starts = self._starts(name)
        return Walk(self.calls[starts[number] : starts[number + 1]])

    def _starts(self, name: str) -> list[int]:
        return [index for index, (_, called) in enumerate(self.calls) if called == name]


@contextmanager
def traced() -> Iterator[Walk]:
    """Record the calls made in this thread, and in those that it starts, while the context is open."""
    walk = Walk()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(_INLINE)
        if event == "call" and code.co_filename.startswith(SOURCE) and is_function:
            walk.calls.append((code.co_filename.removeprefix(SOURCE), code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
