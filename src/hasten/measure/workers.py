"""Processes that a benchmark starts and talks to: workers that answer in JSON, ranks, commands of hasten, a server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


def child_command(file: str, name: str, *arguments: object) -> list[str]:
    """The command that runs one of a script's `children` in a process of its own."""
    return [sys.executable, file, "--child", name, *map(str, arguments)]


def last_json(command: Sequence[object], **options: Any) -> Any:
    """The JSON in the last line that a process prints. Ends this one where it fails."""
    done = subprocess.run([str(one) for one in command], stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"{' '.join(map(str, command))[:300]} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def hasten_json(arguments: Sequence[str]) -> Any:
    """What a command of hasten reports with --json."""
    command = [sys.executable, "-m", "hasten", *arguments, "--json", "-"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def on_ranks(ranks: int, command: Sequence[str]) -> None:
    """Run a child on ranks of this machine, by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*torchrun, *command[1:]], check=True, env=os.environ | {"HASTEN_MEASURE": "0"})


class Worker:
    """A process that answers each line of its standard input with a line of JSON; other lines are passed over."""

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        environment: Mapping[str, str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [str(one) for one in command],
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,  # in this session: if this process dies, the system ends the stopped ones
        )

    def send(self, line: str = "go") -> None:
        """Have it begin; `answer` waits for the end."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Its next line of JSON."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with status {self.process.wait()}; its own words are above")

    def ask(self, line: str = "go") -> Any:
        """Send a line, and wait for the answer."""
        self.send(line)
        return self.answer()

    def close(self) -> None:
        """End it and what it has started."""
        with suppress(ProcessLookupError, PermissionError):  # all are gone; on macOS, all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def reply(answer: Mapping[str, Any]) -> None:
    """What a worker says to the process that started it."""
    print(json.dumps(answer), flush=True)


def address_in(line: str) -> str:
    """The URL without /v1 in the line that `hasten serve` prints when it listens."""
    return line.partition(" is served at ")[2].partition("/v1")[0]


@contextmanager
def serving(model: str | Path, *options: str) -> Iterator[str]:
    """`hasten serve` of a model on a free port; yields the URL without /v1, and ends the server."""
    command = [sys.executable, "-m", "hasten", "serve", str(model), "--port", "0", "--log", "error", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise SystemExit(f"hasten serve ended with status {server.wait()}; its own words are above")
        yield address_in(line)
    finally:
        server.terminate()
        server.wait(60)
