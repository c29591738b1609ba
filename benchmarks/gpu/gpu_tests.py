"""The tests that need a GPU (`pytest -m gpu`), sharded over several workers beside the preparing of jobs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.harness import Background, Run

ROOT = Path(__file__).resolve().parent.parent.parent
STATES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")


def files() -> list[str]:
    """The test files in which something needs a GPU: collecting all the others would take each worker long."""
    return sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )


def counted(log: str) -> dict[str, Any]:
    """How many tests ended how, and which failed, from pytest-xdist's verbose log."""
    found: dict[str, Any] = {state: len(re.findall(rf"\] {state} ", log)) for state in STATES}
    found["failed"] = re.findall(r"\] (?:FAILED|ERROR) (\S+)", log)
    found["reasons"] = [line[:200] for line in log.splitlines() if line.startswith("E  ")][:12]
    return found


class GpuTests(Background):
    """Starts at once. A test may take `timeout` seconds of the clock, pauses included."""

    def __init__(self, run: Run, workers: int, timeout: int = 400) -> None:
        super().__init__(lambda: [self.process])
        self.run, self.log, self.begin = run, run.logs / "pytest.log", time.time()
        command = [
            "nice",
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-n",
            str(workers),
            "--dist",
            "worksteal",
            "-vv",
            "-p",
            "gpu.failures",
        ]
        command += ["--tb=short", f"--timeout={timeout}", *files()]
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=run.environment, start_new_session=True
            )

    def finish(self, wait: float) -> None:
        """Wait up to `wait` seconds, then interrupt it, so that it reports what failed; keep the counts."""
        self.resume()
        try:
            self.process.wait(timeout=max(0.1, wait))
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=6)
        self.kill()
        log = self.log.read_text(errors="replace")
        (self.run.out / "pytest.txt").write_text(log)
        last = [line for line in log.splitlines() if line.strip()][-1:]
        found = {"seconds": round(time.time() - self.begin), "status": self.process.poll(), **counted(log)}
        self.run.results["tests"] = found | {"last": last[0][:200] if last else ""}
        self.run.say(f"tests: {found}"[:900])
        self.run.save()
