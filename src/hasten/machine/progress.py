"""Progress on standard error, so that standard output stays clean for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def bars(*columns: str, shown: bool = True, transient: bool = True) -> Progress:
    """Create rich's progress display, a context manager: each task's description, its bar, and these columns.

    columns: "count" (3/8), "bytes" and "speed" of tasks counted in bytes, "elapsed" and "remaining" time; anything
    else is a text with rich's fields, such as "{task.fields[loss]}". transient: gone when done.
    """
    from rich import progress
    from rich.console import Console

    known: dict[str, type[progress.ProgressColumn]] = {
        "count": progress.MofNCompleteColumn,
        "bytes": progress.DownloadColumn,
        "speed": progress.TransferSpeedColumn,
        "elapsed": progress.TimeElapsedColumn,
        "remaining": progress.TimeRemainingColumn,
    }
    behind = [known[name]() if name in known else progress.TextColumn(name) for name in columns]
    every = (progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24), *behind)
    return progress.Progress(*every, console=Console(stderr=True), transient=transient, disable=not shown)


def on_terminal() -> bool:
    """Whether bars can be seen: standard error is a terminal, or FORCE_COLOR says so."""
    from rich.console import Console

    return Console(stderr=True).is_terminal


@contextmanager
def share(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar with the time left; yields update(done, total). The bar disappears at the end."""
    with bars("count", "elapsed", "left", "remaining") as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


@contextmanager
def byte_counter(description: str, *, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar that counts bytes of text; yields the function that advances it. total: None if unknown."""
    with bars("bytes", "speed", "remaining", shown=shown, transient=False) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
        progress.update(task, total=progress.tasks[0].completed)  # byte-order marks make the total an estimate
