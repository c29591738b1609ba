"""--pin and --threads of a command that runs a model, seen from within its process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.errors import HastenWarning
from hasten.machine import available_cores, processor
from hasten.machine.threads import PINNING, pin_threads, share_of_cores

SEEN = """
import json, os, sys
from hasten.cli.main import main
main(sys.argv[1:])
import torch
print(json.dumps([len(os.sched_getaffinity(0)), torch.get_num_threads()]))
"""


def seen(folder: Path, *options: str, **environment: str) -> list[int]:
    """Cores that the first thread may use, and the number of torch's threads, after a command."""
    command = [sys.executable, "-c", SEEN, "generate", str(folder), "--prompt-ids", "1", "--max-new-tokens", "2"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=plain | environment, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity masks on this system")
def test_threads_and_pinning_reach_torch(tiny_folder: Path) -> None:
    cores, physical = len(os.sched_getaffinity(0)), available_cores().physical
    assert seen(tiny_folder) == [cores, physical]
    assert seen(tiny_folder, "--threads", "1") == [cores, 1]
    assert seen(tiny_folder, "--pin", "--threads", "auto") == [1, physical]
    assert seen(tiny_folder, "--pin", OMP_PROC_BIND="false") == [cores, physical], "the user's own word counts"


def test_where_torch_is_loaded_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PINNING:
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(HastenWarning, match="stay unpinned"):
        pin_threads()
    assert not set(PINNING) & set(os.environ)


@pytest.mark.parametrize(
    ("parts", "expected"), [(2, [{0, 1, 4, 5}, {2, 3, 6, 7}]), (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}])]
)
def test_a_cores_hardware_threads_go_to_one_part(
    parts: int, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[int]] = []  # four cores of two threads each, numbered as Linux does: 0 and 4 are one core's
    monkeypatch.setattr(processor, "_core_place", lambda number: ("0", str(number % 4)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(set(cores)), raising=False)
    for part in range(parts):
        with share_of_cores(part, parts):
            pass
    assert kept[::2] == expected
