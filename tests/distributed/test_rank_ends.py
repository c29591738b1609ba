"""However a server of two ranks is ended, nothing of it stays: by its launcher's death, by its first rank's."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

SOON = 15  # seconds; a rank that waits for another's reason would wait for 20


@pytest.fixture
def server(tiny_folder):
    """The launcher of a server of two ranks that listens, and the ranks."""
    command = [sys.executable, "-m", "hasten", "serve", str(tiny_folder), "--port", "0", "--tensor-parallel", "2"]
    process = subprocess.Popen(
        [*command, "--cache-gib", "0.02"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = process.stdout.readline()
        assert "is served at" in line, process.stderr.read()
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = {one.environ()["RANK"]: one for one in children if "RANK" in one.environ()}
        yield process, ranks
    finally:
        process.kill()
        for one in psutil.process_iter():
            if one.pid in {rank.pid for rank in ranks.values()}:
                one.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_ranks_do_not_outlive_their_launcher(server):
    process, ranks = server
    assert len(ranks) == 2
    process.kill()
    _, alive = psutil.wait_procs(ranks.values(), timeout=SOON)
    assert not alive


def test_a_first_rank_that_is_killed_ends_all_with_its_name(server):
    process, ranks = server
    ranks["0"].send_signal(signal.SIGKILL)
    assert process.wait(SOON) == 2
    assert "rank 0 was ended by SIGKILL" in process.stderr.read()
    _, alive = psutil.wait_procs(ranks.values(), timeout=SOON)
    assert not alive
