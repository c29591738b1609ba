"""Runs the commands of a page from top to bottom in an empty folder, and compares what they print with the page.

python tests/command_pages.py docs/start.md            # the differences; exit status 1 if there are any
python tests/command_pages.py docs/start.md --write    # put what the commands print now into the page

The fence of a block says what it is:

    ```bash                            commands, run as a reader types them
    ```bash title="Leave it running"   the same in the background, until the page ends; it is ready once it prints a URL
    ```bash title="Install"            not run: the environment of the tests is its result
    ```python title="ask.py"           a file that the reader writes, in any language; its title is the name
    ```text                            output of the commands above: the same words, other numbers
    ```text title="For example"        the same, but its words depend on the processor (what a model wrote, its name)
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md")))
SECONDS = 600  # limit for the commands of a block

FENCE = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
RUNNING, INSTALL, EXAMPLE = "Leave it running", "Install", "For example"
URL = re.compile(r"https?://\S+")
# Printed only by the first command of a machine, or on a busy one.
ONCE = re.compile(
    r"compiling .*, once: |.*another process|  done in \d+ s$|[\w-]+: .* by .*, Apache-2\.0$|.*other programs use "
)
OF_TESTS = ("HASTEN_MEASURE", "HASTEN_SHARE_CORES", "FORCE_COLOR", "NO_COLOR")  # variables that a reader has not set
NUMBER = re.compile(r"(?<=native, )\w+|(?<![A-Za-z_])[+-]?\d[\d,.]*")  # or the instruction set that the kernels use
DRAWN = re.compile(r"[─━]+")  # lines of a table, as long as its cells are wide


class PageError(AssertionError):
    """A page that cannot be run as it is printed."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, title and text, and where its text is."""

    kind: str
    title: str
    text: str
    span: tuple[int, int]

    @property
    def is_file(self) -> bool:
        """Whether the title is the name of a file that holds the text."""
        return re.fullmatch(r"[\w-]+\.\w+", self.title) is not None


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(m["kind"], m["title"] or "", m["text"], m.span("text")) for m in FENCE.finditer(page)]


class Reader:
    """A reader in an empty folder, who types commands into a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            end(process, signal.SIGINT)

    def run(self, commands: str) -> str:
        """What the commands print to the terminal. Raises PageError if one of them fails or takes too long."""
        process = self._start(commands)
        try:
            printed, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            end(process, signal.SIGKILL)
            raise PageError(f"{commands}takes more than {SECONDS} s") from None
        if process.returncode:
            raise PageError(f"{commands}ends with status {process.returncode}:\n{printed}")
        return self._tidy(printed)

    def leave_running(self, commands: str) -> str:
        """What the commands print until they are ready: up to a second after the first URL."""
        process = self._start(commands)
        self._running.append(process)
        lines: list[str] = []
        assert process.stdout is not None
        threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
        limit = time.monotonic() + SECONDS
        while not any(map(URL.search, lines)):
            if process.poll() is not None or time.monotonic() > limit:
                time.sleep(0.5)  # the last lines
                raise PageError(f"{commands}ended, or printed no URL:\n{''.join(lines)}")
            time.sleep(0.2)
        time.sleep(1)
        return self._tidy("".join(lines))

    def _start(self, commands: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a group of its own, which is ended together
        )

    def _tidy(self, printed: str) -> str:
        lines = [line.rstrip() for line in printed.replace(f"{self.folder}/", "").splitlines()]
        return "\n".join(line for line in lines if not ONCE.match(line)).strip("\n")


def end(process: subprocess.Popen[str], by: signal.Signals) -> None:
    """End a process and those it started: by a signal, and by force if they are still there after half a minute."""
    if process.poll() is None:
        os.killpg(process.pid, by)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment() -> dict[str, str]:
    """Environment variables of a reader: this checkout's hasten, and none of the tests' own settings."""
    own = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    own["PYTHONPATH"] = str(ROOT / "src")
    own["PYTHONUNBUFFERED"] = "1"  # output in the order in which a terminal shows it
    own["COLUMNS"] = "120"  # of a terminal
    return own


def outputs(page: str, folder: Path) -> Iterator[tuple[Block, str]]:
    """Run a page; yields each block of output with what the commands above it printed."""
    printed: str | None = None
    with Reader(folder) as reader:
        for block in blocks(page):
            if block.is_file:
                (folder / block.title).write_text(block.text)
            elif block.kind == "bash" and block.title == INSTALL:
                printed = None
            elif block.kind == "bash":
                run = reader.leave_running if block.title == RUNNING else reader.run
                printed = run(block.text)
            elif block.kind == "text" and printed is not None:
                yield block, printed
                printed = None
            else:
                raise PageError(f"a block of {block.kind!r} titled {block.title!r} is no command, file or output")


def differences(page: str, folder: Path) -> list[str]:
    """Lines in which the page's output is not what its commands print in the folder, which is empty."""
    found: list[str] = []
    for block, printed in outputs(page, folder):
        if block.title == EXAMPLE:
            found += [] if printed else ["nothing is printed where the page shows an example"]
        else:
            found += difflib.unified_diff(shape(block.text), shape(printed), "the page", "printed", lineterm="", n=1)
    return found


def shape(output: str) -> list[str]:
    """The lines of an output without what differs between runs and machines: numbers, instruction sets, widths."""
    text = DRAWN.sub("─", NUMBER.sub("#", output.strip("\n")))
    return [" ".join(line.split()) for line in text.splitlines()]


def written(page: str, folder: Path) -> str:
    """The page with what its commands print."""
    for block, printed in reversed(list(outputs(page, folder))):
        start, stop = block.span
        page = f"{page[:start]}{printed}\n{page[stop:]}"
    return page


def main() -> None:
    """Run the page that the command line names."""
    page = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[2:] == ["--write"]:
            page.write_text(written(page.read_text(), Path(folder).resolve()))
        elif found := differences(page.read_text(), Path(folder).resolve()):
            raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
