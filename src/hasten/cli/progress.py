"""Progress on standard error, so that standard output stays clean for results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counter(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar that counts up; yields the function that advances it. Gone when done."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        update(done, total)

    with share(description, total) as update:
        yield advance


@contextmanager
def share(description: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """A bar with the time left; yields the function that is told how much is done, and of how much. Gone when done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *left, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)
