"""What is said while kernels compile: a bar, or plain lines."""

import os
import pty
import subprocess
import sys

import pytest

from hasten.machine import find_compiler

COMPILE = """
import sys
from pathlib import Path
from hasten.ops.compile import compile_library
place = Path(sys.argv[1])
compile_library([sys.argv[2], "-fPIC"], [], sources=place, names=["one.cpp"], place=place, log=place / "log", title="x")
"""


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
