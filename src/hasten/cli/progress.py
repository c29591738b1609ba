"""Progress on standard error, so that standard output stays clean for results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counter(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar that counts up; yields the function that advances it. Gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
