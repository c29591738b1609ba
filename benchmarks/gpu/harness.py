"""Prepares many jobs side by side on the host's cores, then measures each alone on the GPU, peers in turns with ours.

A job is a process of its own (worker.py): one that fails, fails alone. What was measured is written after every number,
so that a run that ends early keeps it.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
TAIL = 900  # characters of a log that explain a failure


@dataclass(frozen=True, slots=True)
class JobSpec:
    """function: MODULE:FUNCTION of this package. idle_gb is held while the job waits, peak_gb while it warms up."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    idle_gb: float = 3.0
    peak_gb: float = 5.0
    needs: str = ""  # a folder of the peers, without which the job is left out


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs measured in turns, `rounds` times, then ended. extras: (command, name prefix it is for) once each after.

    limit: seconds that a measurement, or an extra, may take.
    """

    names: tuple[str, ...]
    rounds: int = 1
    extras: tuple[tuple[str, str], ...] = ()
    limit: float = 60


class Run:
    """One measurement: its time, its results and its notes. `results` by job and command, each a list."""

    def __init__(
        self, out: Path, scratch: Path, budget: float, environment: dict[str, str], started: float | None = None
    ) -> None:
        """out: for what is kept; scratch: for the logs of each job, and whatever else only the run needs."""
        self.out, self.scratch, self.budget, self.environment = out, scratch, budget, environment
        self.start = time.time() if started is None else started
        self.results: dict[str, Any] = {}
        self.notes: list[str] = []
        self.jobs: list[Job] = []
        self.logs = scratch / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def now(self) -> float:
        return time.time() - self.start

    def left(self) -> float:
        return self.budget - self.now()

    def say(self, text: str) -> None:
        line = f"[{self.now():4.0f}s] {text}"
        self.notes.append(line)
        print(line, flush=True)

    def save(self) -> None:
        part = self.out / "results.part"
        part.write_text(json.dumps({"results": self.results, "notes": self.notes}, indent=1, default=str))
        part.rename(self.out / "results.json")

    def fail(self, name: str, error: Any, log: str = "") -> None:
        self.results.setdefault(name, {}).setdefault("failed", {"error": error, "log": log})

    def end(self) -> None:
        for job in self.jobs:
            job.kill()


class Job:
    """A worker's process and what it answers. state: new, preparing, ready, failed or ended."""

    def __init__(self, run: Run, name: str, spec: JobSpec) -> None:
        self.run, self.name, self.spec, self.state = run, name, spec, "new"
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log = run.logs / f"{name}.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "gpu.worker", self.spec.function]
        self.file = open(self.log, "w")  # noqa: SIM115 - it is open as long as the process runs
        self.process = subprocess.Popen(
            [*command, json.dumps(self.spec.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.file,
            text=True,
            env=self.run.environment,
            start_new_session=True,
        )
        self.run.jobs.append(self)
        self.state = "preparing"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("@@"):
                self.file.write(line)
                continue
            event = json.loads(line[2:])
            if event["event"] == "ready":
                self.run.results.setdefault(self.name, {})["prepared"] = event
                self.state = "ready"
            if event["event"] == "failed":
                self.run.fail(self.name, event["error"], event["trace"])
            self.events.put(event)
        if self.state != "ended":
            self.state = "failed"
            self.run.fail(self.name, f"ended with status {self.process.wait()}", self.tail())
        self.events.put({"event": "closed"})

    def tail(self) -> str:
        if self.state == "new":
            return ""
        self.file.flush()
        return self.log.read_text(errors="replace")[-TAIL:]

    def ask(self, command: str, timeout: float) -> None:
        """Run one command and keep what it found, or why it found nothing."""
        if self.state != "ready":
            return
        while not self.events.empty():
            self.events.get()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            event = self.events.get(timeout=max(1.0, timeout))
        except queue.Empty:
            event = {"found": {"error": f"no answer to {command!r} in {timeout:.0f} s"}}
            self.kill()
        except BrokenPipeError:
            event = {"found": {"error": "its process is gone"}}
        found = event.get("found", {"error": str(event)})
        self.run.results.setdefault(self.name, {}).setdefault(command, []).append(found)
        self.run.say(f"{self.name} {command}: {brief(found)}")
        self.run.save()

    def kill(self) -> None:
        if self.state in ("new", "ended"):
            return
        self.state = "ended"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """SIGSTOP and SIGCONT: one that still prepares stands still while others are measured."""
        if self.state == "preparing":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Let it quit, so that its memory is free when this returns."""
        if self.state == "ready":
            self.state = "ended"
            try:
                assert self.process.stdin is not None
                self.process.stdin.write("quit\n")
                self.process.stdin.flush()
                self.process.wait(timeout=4)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
            self.state = "ready"
        self.kill()


def brief(found: dict[str, Any]) -> str:
    """One line: the numbers of a result, or its error."""
    if "error" in found:
        return f"ERROR {str(found['error'])[:200]}"
    shown = {}
    for key, value in found.items():
        if isinstance(value, bool | str | dict):
            continue
        shown[key] = f"{value:.4g}" if isinstance(value, float) else len(value) if isinstance(value, list) else value
    return " ".join(f"{key}={value}" for key, value in list(shown.items())[:8])


def prepare(
    run: Run, jobs: Sequence[Job], *, needed: Collection[str], until: float, limit_gb: float, most: int
) -> None:
    """Start the jobs in their order as memory allows; wait until each that is needed is ready or has failed.

    Needed ones that are late end; others may go on. until: seconds since the run began. most: jobs preparing at a time.
    """
    waiting = [job for job in jobs if job.state == "new"]
    started = [job for job in jobs if job.state == "preparing"]
    while run.now() < until:
        preparing = [job for job in started if job.state == "preparing"]
        held = sum(job.spec.idle_gb for job in run.jobs if job.state in ("ready", "preparing"))
        # Peaks are short and each job tries again where memory is short: only the largest has to fit.
        top = max((job.spec.peak_gb - job.spec.idle_gb for job in preparing), default=0.0)
        for job in list(waiting):
            more = max(top, job.spec.peak_gb - job.spec.idle_gb)
            if len(preparing) < most and held + job.spec.idle_gb + more <= limit_gb:
                job.start()
                waiting.remove(job)
                started.append(job)
                preparing.append(job)
                held, top = held + job.spec.idle_gb, more
        if not any(job.name in needed for job in (*preparing, *(waiting if preparing else ()))):
            break  # all is there, or what still waits does not fit
        time.sleep(0.1)
    for job in jobs:
        if job.name in needed and job.state in ("new", "preparing"):
            run.fail(job.name, f"not ready at {until:.0f} s ({job.state})", job.tail())
            job.kill()
            job.state = "ended"
    took = " ".join(f"{j.name}({run.results[j.name]['prepared']['seconds']:.0f})" for j in jobs if j.state == "ready")
    run.say(f"ready: {took or '-'}")
    for job in jobs:
        if job.name in needed and job.state != "ready":
            run.say(f"  {job.name}: {str(run.results.get(job.name, {}).get('failed', {}).get('error'))[:300]}")
    run.save()


def measure(run: Run, groups: Iterable[Group], jobs: dict[str, Job], *, until: float) -> None:
    """Measure one group after the other; groups that would begin after `until` end unmeasured."""
    for group in groups:
        here = [jobs[name] for name in group.names if name in jobs]
        if here and run.now() > until:
            run.say(f"no time for {' '.join(group.names)}")
        else:
            for _ in range(group.rounds):
                for job in here:
                    if run.left() > 6:
                        job.ask("measure", min(group.limit, run.left() - 4))
            for command, prefix in group.extras:
                for job in here:
                    if job.name.startswith(prefix) and run.left() > 8:
                        job.ask(command, min(group.limit, run.left() - 4))
        for job in here:
            job.end()


class Background:
    """Work beside the preparing of jobs that stands still (SIGSTOP) while something is measured."""

    def __init__(self, processes: Callable[[], list[subprocess.Popen[Any]]]) -> None:
        self.processes = processes

    def _send(self, number: int) -> None:
        for process in self.processes():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        self._send(signal.SIGCONT)
        self._send(signal.SIGKILL)
