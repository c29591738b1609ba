"""Ladders of tiny rungs in real processes; each process imports torch, so there are few of them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hasten.errors import ConfigError
from hasten.measure.ladder import Ladder
from hasten.measure.process import Rung, RungRun, run_interleaved

RUNGS = '''
"""Rungs for the tests of the measuring core: they write down when they ran."""
import os, time
from pathlib import Path
import numpy
from hasten.errors import ResourceError

class Rung:
    def __init__(self, log, name, speed=1.0, fail=None, at=0, megabytes=0):
        self.log, self.name, self.speed, self.fail, self.at = Path(log), name, speed, fail, at
        self.calls = 0
        numpy.ones(megabytes << 17)
        self.write("set-up")
        print("noise on standard output")

    def write(self, what):
        with self.log.open("a") as file:
            file.write(f"{self.name} {what} {os.getpid()}\\n")

    def measure(self):
        self.calls += 1
        self.write("measure")
        if self.fail and self.calls >= self.at:
            if self.fail == "user":
                raise ResourceError("no such thing here")
            if self.fail == "bug":
                return {"x": 1 / 0}
            if self.fail == "exit":
                os._exit(3)
            if self.fail == "kill":
                os.kill(os.getpid(), 9)
            if self.fail == "memory" and not (tried := self.log.with_name("tried")).exists():
                tried.touch()
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            if self.fail == "hang":
                time.sleep(100)
        return {"decode_tokens_per_second": self.speed * self.calls}

    def describe(self):
        return {"bytes_per_token": 1000}

class FakeLimits:
    def __init__(self, **_): pass
    def measure(self):
        return {"bandwidth": 1e5, "rate float32": 1e9}

def make(**arguments):
    return Rung(**arguments)
'''


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rungs' module on the path of this process and its children, and the file they write to."""
    (tmp_path / "ladder_test_rungs.py").write_text(RUNGS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "log"


def rung(log: Path, name: str, *, memory_bytes: int = 0, **arguments: object) -> Rung:
    arguments = {"log": str(log), "name": name, **arguments}
    return Rung(name, ("t",), "ladder_test_rungs:make", arguments, memory_bytes)


def events(log: Path) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in log.read_text().splitlines()]


def gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_rounds_interleave_and_memory_is_the_rungs_own(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rungs = [rung(log, "a", speed=10, megabytes=150), rung(log, "b", speed=30)]
    ladder = Ladder(rounds=3, warmup=1, limit_seconds=0.01, threads=1, device="cpu")
    report = ladder.measure(rungs, kind="generate", dtypes=())
    assert events(log) == ["a set-up", "a measure", "b set-up", "b measure", *["a measure", "b measure"] * 3]
    first, second = report["rows"]
    speeds = [found["decode_tokens_per_second"] for found in first["rounds"]]
    assert speeds == [20, 30, 40], "the warm-up round is not counted"
    assert (first["decode_tokens_per_second"], second["speedup"]) == (30, 3)
    assert first["bytes_per_token"] == 1000
    assert 0 < first["mbu"] < 1
    assert report["settings"]["interleaving"] == "processes kept"
    assert len(report["limits"]["rounds"]) == 3
    assert 140 << 20 < first["peak_memory_bytes"] < 250 << 20
    assert second["peak_memory_bytes"] < 100 << 20
    json.dumps(report, allow_nan=False)
    assert capfd.readouterr().out == "", "standard output belongs to the report"


def test_a_rung_that_fails_becomes_a_row_and_the_others_go_on(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.measure.ladder.LIMITS_SETUP", "ladder_test_rungs:FakeLimits")
    rungs = [
        rung(log, "user", fail="user", at=1),
        rung(log, "bug", fail="bug", at=2),
        rung(log, "exit", fail="exit", at=1),
        rung(log, "kill", fail="kill", at=1),
        rung(log, "fine", speed=5),
    ]
    report = Ladder(rounds=2, warmup=0, device="cpu").measure(rungs, kind="generate")
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["user"]["error"] == "no such thing here"
    assert "traceback" not in rows["user"]
    assert rows["bug"]["error"] == "ZeroDivisionError: division by zero"
    assert "ladder_test_rungs.py" in rows["bug"]["traceback"]
    assert rows["exit"]["error"] == "the process ended by itself with exit status 3"
    assert rows["kill"]["error"] == "the process was killed (SIGKILL), most likely because the memory ran out"
    assert (rows["fine"]["decode_tokens_per_second"], rows["fine"]["speedup"]) == (7.5, 1)
    assert all(gone(int(line.split()[-1])) for line in log.read_text().splitlines())


def test_rungs_that_do_not_fit_together_are_restarted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.measure.ladder.LIMITS_SETUP", "ladder_test_rungs:FakeLimits")
    rungs = [rung(log, "a", memory_bytes=1 << 50), rung(log, "b", speed=2)]
    report = Ladder(rounds=1, warmup=1, device="cpu").measure(rungs, kind="generate")
    assert events(log) == ["a set-up", "a measure", "a measure", "b set-up", "b measure", "b measure"]
    assert report["settings"]["interleaving"] == "processes restarted"
    assert [row["decode_tokens_per_second"] for row in report["rows"]] == [2, 4]


class Clock:
    """One that a rung's set-up moves on by 10 s, and its measurement by 5 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("hasten.measure.process.time", SimpleNamespace(monotonic=lambda: self.now))
        for name, seconds in (("start", 10.0), ("measure", 5.0)):
            monkeypatch.setattr(RungRun, name, self._moved_by(seconds, getattr(RungRun, name)))

    def _moved_by(self, seconds: float, method: Callable[..., None]) -> Callable[..., None]:
        def call(run: RungRun, **how: bool) -> None:
            method(run, **how)
            self.now += seconds

        return call


def test_rungs_that_exceed_the_time_budget_are_skipped_and_say_so(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    # Three rungs take 3 set-ups and warm-ups of 15 s, and 2 rounds of 15 s: 75 s. Two of them take 50 s.
    runs = run_interleaved([rung(log, name) for name in "abc"], rounds=2, warmup=1, seconds=70)
    assert [run.error for run in runs] == [
        None,
        None,
        "skipped: with the rungs before it, it would take longer than 70 s",
    ]
    assert [len(run.rounds) for run in runs] == [2, 2, 0]
    assert events(log)[:4] == ["a set-up", "a measure", "b set-up", "b measure"]


def test_restarted_rungs_keep_to_the_time_budget_too(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    # In each of 2 rounds a rung takes 15 s.
    runs = run_interleaved([rung(log, name) for name in "abc"], rounds=2, keep=False, seconds=70)
    assert [run.error is None for run in runs] == [True, True, False]
    assert events(log) == [f"{name} {what}" for name in "abab" for what in ("set-up", "measure")]


def test_rounds_that_exceed_the_time_budget_are_left_out(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    said: list[str] = []
    runs = run_interleaved([rung(log, "a")], rounds=9, seconds=23, tell=said.append)
    assert [len(run.rounds) for run in runs] == [2]
    assert said[-1] == "2 of 9 rounds, because more would take longer than 23 s"


def test_a_time_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--time-budget is 0; it must be above 0"):
        Ladder(time_budget=0)


def test_rungs_of_a_gpu_are_prepared_together_as_its_memory_allows(log: Path) -> None:
    """One that ran out of memory beside others is measured again alone."""
    gib = 1 << 30
    rungs = [rung(log, "a", memory_bytes=gib), rung(log, "b", memory_bytes=gib, fail="memory", at=2), rung(log, "c")]
    runs = run_interleaved(rungs, rounds=2, warmup=1, room=5 * gib)
    assert [len(run.rounds) for run in runs] == [2, 2, 2]
    assert [run.error for run in runs] == [None] * 3
    found = events(log)
    assert sorted(found[:4]) == ["a measure", "a set-up", "b measure", "b set-up"], "warmed up at once"
    assert found[4:] == ["a measure", "b measure", "a measure"] + [
        f"{name} {what}" for name in "bc" for what in ("set-up", "measure", "measure", "measure")
    ]


def test_a_child_that_hangs_is_given_up(log: Path) -> None:
    arguments = {"log": str(log), "name": "slow", "fail": "hang", "at": 1}
    run = RungRun(Rung("slow", (), "ladder_test_rungs:make", arguments), timeout=60)
    run.start()
    run.timeout = 0.2
    run.measure(counts=True)
    assert run.error is not None
    assert run.error.startswith("no answer within")
    assert gone(int(log.read_text().split()[-1]))


def test_ctrl_c_ends_the_children(log: Path, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import signal
            from hasten.measure.ladder import Ladder
            from hasten.measure.process import Rung
            if __name__ == "__main__":
                signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
                arguments = dict(log={str(log)!r}, name="slow", fail="hang", at=1)
                Ladder().measure([Rung("slow", (), "ladder_test_rungs:make", arguments)], kind="generate", dtypes=())
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, start_new_session=True, text=True)
    deadline = time.monotonic() + 60
    while "slow measure" not in (log.read_text() if log.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert errors.count("Traceback") <= 1, "only the parent speaks"
    assert "KeyboardInterrupt" in errors
    assert gone(int(log.read_text().split()[-1]))


def test_what_leaves_something_behind_is_set_up_twice(log: Path) -> None:
    twice = Rung("a", (), "ladder_test_rungs:make", {"log": str(log), "name": "a"}, twice=True)
    ladder = Ladder(rounds=2, warmup=0, limit_seconds=0.01, threads=1, device="cpu")
    report = ladder.measure([twice], kind="generate", dtypes=())
    assert events(log) == ["a set-up", "a set-up", "a measure", "a measure"]
    assert len({line.split()[-1] for line in log.read_text().splitlines()}) == 2, "two processes"
    assert report["rows"][0]["warm_setup_seconds"] > 0


def test_a_ladder_without_sense_is_refused() -> None:
    one = Rung("a", (), "x:y")
    with pytest.raises(ConfigError, match="names of their own"):
        Ladder().measure([one, one], kind="generate")
    with pytest.raises(ConfigError, match="--rounds is 0; it must be at least 1"):
        Ladder(rounds=0).measure([one], kind="generate")
    with pytest.raises(ConfigError, match="threads is 0"):
        Ladder(threads=0)
