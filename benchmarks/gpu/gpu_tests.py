"""The tests that need a GPU (`pytest -m gpu`), sharded over several workers."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpu.harness import Background, Run

ROOT = Path(__file__).resolve().parent.parent.parent
LOG = "tests.jsonl"
STATES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
SLOWEST = 15
UNUSED = ("benchmark", "jaxtyping", "pytest_cov", "pytest_mock")


def files() -> list[str]:
    """The test files in which something needs a GPU: collecting all the others would take each worker long."""
    return sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )


def entries(log: Path) -> dict[str, dict[str, Any]]:
    """The last line of each test in a log of log_tests.py. A line that was cut short is left out."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        with contextlib.suppress(ValueError):
            found[json.loads(line)["id"]] = json.loads(line)
    return found


def passed(log: Path) -> set[str]:
    """The tests that need not run again."""
    return {name for name, one in entries(log).items() if one["state"] in ("PASSED", "XFAIL", "SKIPPED")}


def summary(log: Path, collected: int = 0) -> dict[str, Any]:
    """How many tests ended how, why those that failed did, and which took longest. collected: how many there are."""
    found = entries(log)
    states = Counter(one["state"] for one in found.values())
    bad = {name: one for name, one in found.items() if one["state"] in ("FAILED", "ERROR")}
    slowest = sorted(found.values(), key=lambda one: -one["seconds"])[:SLOWEST]
    return {state: states[state] for state in STATES} | {
        "left": max(0, collected - len(found)),
        "failed": list(bad),
        "reasons": [f"{name}: {' '.join(one['reasons'])}"[:300] for name, one in bad.items()],
        "slowest": [[one["seconds"], one["id"]] for one in slowest],
    }


class GpuTests(Background):
    """Starts at once, and goes on where the log in the run's folder ends.

    beside: give way to other work on the host. timeout: seconds that a test may take, pauses included.
    """

    def __init__(self, run: Run, workers: int, *, beside: bool, timeout: int = 400) -> None:
        super().__init__(lambda: [self.process])
        self.run, self.output, self.begin = run, run.logs / "pytest.log", time.time()
        self.log = run.out / LOG
        self.done = len(passed(self.log))
        command = [*(["nice"] if beside else []), sys.executable, "-m", "pytest", "-m", "gpu", "-n", str(workers)]
        command += ["--dist", "load", "--maxschedchunk", "1", "-vv", "-p", "gpu.log_tests", "--tb=short"]
        command += [f"--timeout={timeout}", *files()]
        for name in UNUSED:  # plugins of this machine, which every worker would import
            command += ["-p", f"no:{name}"]
        # The workers are processes enough: a pool of compilers in each would only start slowly.
        own = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "GPU_TESTS_LOG": str(self.log)}
        with open(self.output, "a") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=run.environment | own,
                start_new_session=True,
            )

    def collected(self) -> bool:
        """Whether the workers know the tests: until then they import and compute nothing on the GPU."""
        return "items]" in self.output.read_text(errors="replace")

    def pause(self) -> None:
        if self.collected():
            super().pause()

    def finish(self, wait: float) -> None:
        """Wait up to `wait` seconds, then interrupt it; keep the counts."""
        self.resume()
        try:
            self.process.wait(timeout=max(0.1, wait))
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=3)
        self.kill()
        shutil.copyfile(self.output, self.run.out / "pytest.txt")
        counts = re.findall(r"\[(\d+) items\]", self.output.read_text(errors="replace"))
        collected = self.done + int(counts[-1]) if counts else 0
        before = self.run.results.get("tests", {})
        found = {"seconds": round(before.get("seconds", 0) + time.time() - self.begin), "status": self.process.poll()}
        found["resumed"] = before.get("resumed", self.done)  # passed in an earlier run
        self.run.results["tests"] = found | summary(self.log, collected)
        shown = {key: value for key, value in self.run.results["tests"].items() if not isinstance(value, list)}
        self.run.say(f"tests: {shown}")
        self.run.save()
