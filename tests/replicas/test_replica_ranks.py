"""A replica of several ranks, without Ray: it answers as one process does, and no rank outlives another."""

import json
import subprocess
import sys
import time

import psutil
import pytest

import hasten

PROMPT = [7 * number % 250 + 1 for number in range(40)]

REPLICA = """
import asyncio, json, sys
from hasten.cli.serve import Serve
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.replicas import ranks
from hasten.replicas.replica import Replica
from hasten.replicas.routing import Ask
from hasten.replicas.settings import ReplicaSettings

async def answer(replica, prompt):
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    request = Request(id="a", prompt=tuple(prompt), params=params)
    return [token async for found in replica.generate(request, ask=Ask(40)) for one in found for token in one.tokens]

if __name__ == "__main__":
    like = {"dtype": "float32", "tensor_parallel": 3, "threads": 3, "cache_gib": 0.01}
    command = Serve(model=sys.argv[1], fleet=ReplicaSettings(replicas=2), **like)
    replica = Replica(command._one_replica().replica_engine, b"of both")
    said = {"tokens": asyncio.run(answer(replica, json.loads(sys.argv[2])))}
    replica.check_health()
    ranks._processes[0].kill()
    ranks._processes[0].join()
    try:
        replica.check_health()
    except RuntimeError as error:
        said["ended"] = str(error)
    said["left"] = ranks._processes[1].pid
    print(json.dumps(said), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow  # three processes that import torch
def test_a_replica_of_ranks(tiny_folder, tmp_path):
    (tmp_path / "replica.py").write_text(REPLICA)
    command = [sys.executable, str(tmp_path / "replica.py"), str(tiny_folder), json.dumps(PROMPT)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        said = json.loads(process.stdout.readline())
    finally:
        process.kill()
    model = hasten.load(tiny_folder, dtype="float32")
    alone = hasten.generate(model, PROMPT, temperature=0, max_new_tokens=8, ignore_eos=True)[0]
    assert said["tokens"] == alone.tokens
    assert said["ended"] == "rank 1 of the replica has ended"
    assert_ends(said["left"])


LEADER = """
import functools, sys, threading, time
from hasten.replicas import ranks

def started():
    print(ranks._processes[0].pid, flush=True)

if __name__ == "__main__":
    follow = functools.partial(time.sleep, 600)  # a rank that exchanges nothing notices nothing
    thread = threading.Thread(target=ranks.lead, args=(started,), kwargs={"follow": follow, "ranks": 2})
    thread.start()
    thread.join()
    time.sleep(0.5)
    print(ranks.dead_ranks(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow  # two processes that import torch
def test_the_other_ranks_end_with_the_first_one_and_not_with_its_thread(tmp_path):
    (tmp_path / "leader.py").write_text(LEADER)
    command = [sys.executable, str(tmp_path / "leader.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        other, dead = int(process.stdout.readline()), process.stdout.readline()
    finally:
        process.kill()
    assert dead == "[]\n"
    assert_ends(other)


def assert_ends(pid):
    """Wait until a process has ended."""
    end = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "a rank outlives the first one"
        time.sleep(0.1)
