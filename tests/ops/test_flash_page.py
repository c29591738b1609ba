"""The page that derives FlashAttention: its program runs, and its table is that of the code."""

import re
import subprocess
import sys
from pathlib import Path

from hasten.ops.attention.flash_tiles import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD

PAGE = Path(__file__).parents[2] / "docs" / "in-depth" / "flash-attention.md"


def test_the_program_runs():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "forward and backward agree\n", done.stderr


def test_the_table_of_tiles():
    for size, forward in FORWARD.items():
        tiles = (forward, BACKWARD_QUERIES[size], BACKWARD_KEYS[size])
        row = " | ".join(f"{one.queries} × {one.keys}" for one in tiles)
        assert f"| {size} | {row} |" in PAGE.read_text()


def test_the_picture_is_drawn(tmp_path):
    script = PAGE.parents[1] / "draw_flash.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "x.png")], check=True)
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
