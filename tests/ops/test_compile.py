"""What is said while kernels compile: a true estimate, as a bar or in plain lines."""

import os
import pty
import subprocess
import sys

import pytest

from hasten.machine import find_compiler
from hasten.ops.build import SOURCES
from hasten.ops.compile import COMPILE_SECONDS, Estimate

COMPILE = """
import sys
from pathlib import Path
from hasten.ops.compile import compile_library
place = Path(sys.argv[1])
compile_library([sys.argv[2], "-fPIC"], [], sources=place, names=["one.cpp"], place=place, log=place / "log", title="x")
"""


def test_the_estimate_gives_each_source_to_the_first_free_worker():
    estimate = Estimate({"a": 5, "b": 4, "c": 3, "d": 2}, workers=2)
    assert estimate.left(now=0) == 7  # a + d beside b + c
    estimate.began.update(a=0, b=0)
    assert estimate.left(now=1) == 6


def test_the_estimate_learns_from_what_is_done_and_from_what_takes_longer():
    estimate = Estimate({"a": 5, "b": 4, "c": 3, "d": 2}, workers=2)
    estimate.began.update(a=0, b=0)
    assert estimate.left(now=10) == 7.5  # b says 2.5 times as slow as thought: 2.5 s of a and 5 of d beside 7.5 of c
    estimate.took["b"] = 12
    estimate.began["c"] = 12
    assert estimate.slowness(now=12) == 3
    assert estimate.left(now=12) == 9  # c alone, beside what is left of a (3) and d (6)
    estimate.took.update(a=15, c=9, d=6)
    estimate.began["d"] = 15
    assert estimate.left(now=21) == 0


def test_every_source_has_its_share():
    assert set(COMPILE_SECONDS) == {path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cpp")}


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_plain_lines_elsewhere(tmp_path, terminal):
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    ours, theirs = pty.openpty() if terminal else os.pipe()
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path), find_compiler().command],
        env={**environment, "TERM": "xterm", "COLUMNS": "120"},
        stderr=theirs,
        check=True,
        timeout=60,
    )
    said = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert "compiling x" in said
    assert ("left" in said) == ("\x1b[" in said) == terminal
    assert ("done in" in said) == (not terminal)
    assert (tmp_path / "library.so").is_file()
