"""Progress bars that count bytes of text, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(title: str, *, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes that are done. total: None where it is not known."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total)
        yield lambda count: bars.advance(task, count)
        bars.update(task, total=bars.tasks[0].completed)  # limits and byte-order marks make the total an estimate
