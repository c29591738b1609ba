"""Shows a run to people: a progress bar on standard error, a picture of the losses, TensorBoard files."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hasten.errors import ResourceError
from hasten.machine.files import replacing
from hasten.machine.progress import bars, on_terminal

PLAIN_SECONDS = 30  # between two lines if standard error is not a terminal


class Progress:
    """Interface for showing progress; this base class shows nothing."""

    def show(self, line: Mapping[str, Any], *, total: int | None, validation: float | None) -> None:
        """Show a line of train.jsonl. total: steps of the whole run. validation: the last validation loss."""

    def note(self, text: str) -> None:
        """Show a text that stays visible above the bar."""


class PlainLines(Progress):
    """Prints a line to standard error for the first step, about every 30 seconds, and for the last step: for logs."""

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.clock = title, clock
        self._next = self._started = clock()
        self._before: int | None = None  # steps taken in an earlier run

    def show(self, line: Mapping[str, Any], *, total: int | None, validation: float | None) -> None:
        step, now = line["step"], self.clock()
        if self._before is None:
            self._before = step - 1
        if now < self._next and step != total:
            return
        self._next = now + PLAIN_SECONDS
        text = f"step {step:,}" + ("" if total is None else f" of {total:,}")
        parts = [text, numbers(line, validation)]
        if total is not None and step < total:
            left = (now - self._started) / (step - self._before) * (total - step)
            parts.append(f"{left / 60:.1f} minutes left")
        self.note(" · ".join(parts))

    def note(self, text: str) -> None:
        print(f"{self.title}: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Progress]:
    """Show a bar with loss, tokens/s, MFU and time left; plain lines if standard error is not a terminal.

    shown: if False, show nothing.
    """
    if not shown:
        yield Progress()
        return
    if not on_terminal():
        yield PlainLines(title)
        return
    with bars("count", "{task.fields[numbers]}", "elapsed", "left", "remaining", transient=False) as display:
        task = display.add_task(title, total=None, numbers="compiling and measuring the speed")

        class Bar(Progress):
            def show(self, line: Mapping[str, Any], *, total: int | None, validation: float | None) -> None:
                display.update(task, completed=line["step"], total=total, numbers=numbers(line, validation))

            def note(self, text: str) -> None:
                display.console.print(text, highlight=False, markup=False)

        yield Bar()


def numbers(line: Mapping[str, Any], validation: float | None) -> str:
    """Format the middle of the bar: "loss 3.21 · validation 3.40 · 4,100 tokens/s · MFU 41%"."""
    # A skipped float16 step may have no loss.
    parts = ["skipped" if line["loss"] is None else f"loss {line['loss']:.3f}"]
    if validation is not None:
        parts.append(f"validation {validation:.3f}")
    parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if line.get("mfu") is not None:
        parts.append(f"MFU {line['mfu']:.0%}")
    if line.get("spike"):
        parts.append("spike")
    return " · ".join(parts)


def draw_losses(lines: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation loss over tokens to a PNG, from the lines of train.jsonl."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()

    def points(key: str, some: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        """Tokens and values of the lines that have a value."""
        known = [line for line in some if line.get(key) is not None]
        return [line["tokens"] for line in known], [line[key] for line in known]

    axes.plot(*points("loss", lines), linewidth=0.8, alpha=0.6, label="training")
    measured = points("validation_loss", lines)
    if measured[0]:
        axes.plot(*measured, marker="o", markersize=3, label="validation")
    tokens, losses = points("loss", [line for line in lines if line.get("spike")])
    if tokens:
        axes.scatter(tokens, losses, marker="x", s=20, label="spike")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


class TensorBoard:
    """Writes the numbers of each line as TensorBoard scalars; scalars after `after_step` in the folder are discarded.

    Raises ResourceError if the package is missing.
    """

    def __init__(self, folder: Path, *, after_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ResourceError(
                f"run.tensorboard needs the package tensorboard ({error}); pip install 'hasten[tensorboard]', or leave "
                "it off: train.jsonl and loss.png have the same numbers"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line, at its step."""
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
