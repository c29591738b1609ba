"""Compiles C++ sources into one shared library: the longest first, as many at a time as there are cores.

It takes tens of seconds, so there is a bar, or two lines where standard error is no terminal.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from hasten.errors import ResourceError
from hasten.machine import available_cores
from hasten.machine.progress import bars, on_terminal

TIMEOUT = 600  # seconds for one source


def compile_library(
    command: Sequence[str],
    link: Sequence[str],
    *,
    sources: Path,
    names: Sequence[str],
    together: Sequence[str] = (),
    place: Path,
    log: Path,
    title: str,
) -> Path:
    """Compile sources/name for each of the names with `command`, link them with `link`, in the folder `place`.

    Those of the names that are in `together` are compiled as one source. Shows "compiling <title>" and the time left on
    standard error. Returns the library. Raises ResourceError with the first error in its message, and the whole output
    in `log`.
    """
    joined = [name for name in names if name in together]
    units = {sources / name: (sources / name).stat().st_size for name in names if name not in joined}
    if joined:
        one = place / "together.cpp"
        one.write_text("".join(f'#include "{sources / name}"\n' for name in joined))
        units[one] = sum((sources / name).stat().st_size for name in joined)
    objects = {unit: str(place / f"{number}.o") for number, unit in enumerate(units)}
    workers = max(1, min(len(units), available_cores().logical))

    def compile_one(unit: Path) -> int:
        call([*command, "-c", str(unit), "-o", objects[unit]], log)
        return units[unit]

    with ThreadPoolExecutor(workers) as pool, _shown(title, sum(units.values())) as advance:
        running = [pool.submit(compile_one, unit) for unit in sorted(units, key=lambda unit: -units[unit])]
        try:
            for done in as_completed(running):
                advance(done.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    library = place / "library.so"
    call([command[0], "-shared", *objects.values(), "-o", str(library), *link], log)
    return library


def call(command: Sequence[str], log: Path) -> None:
    """Run a compiler. Raises ResourceError where it fails."""
    try:
        # English messages, so that the first error can be found in them.
        environment = {**os.environ, "LC_ALL": "C"}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"the compiler {command[0]} did not run: {error}") from error
    if answer.returncode:
        log.write_text(f"{' '.join(command)}\n{answer.stdout}{answer.stderr}")
        lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        first = next((line for line in lines if re.search(r"\berror:", line)), lines[0] if lines else "no message")
        raise ResourceError(f"{command[0]} failed: {first}; its whole output is in {log}")


@contextmanager
def _shown(title: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over `size` bytes of sources (without a terminal, two lines); yields what advances it."""
    start, terminal = time.monotonic(), on_terminal()
    if not terminal:
        print(f"compiling {title}, once: some tens of seconds", file=sys.stderr, flush=True)
    with bars("elapsed", "left", "remaining", shown=terminal) as display:
        task = display.add_task(f"compiling {title}, once", total=size)
        yield lambda count: display.advance(task, count)
    if not terminal:
        print(f"  done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
