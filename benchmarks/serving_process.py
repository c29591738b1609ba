"""`hasten serve` in a process of its own, for the benchmarks that talk to it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """Serves the folder on a free port; yields the URL without /v1, and ends the server."""
    command = [sys.executable, "-m", "hasten", "serve", model, "--port", "0", "--log", "error", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
    finally:
        server.terminate()
        server.wait(60)
