"""Sums and gathers through shared memory: the bits of torch.distributed's, and an error where a rank is gone."""

import os
import time

import pytest

import ranks
from hasten.ops.native import library

START = """
import os, signal, sys
import torch
from hasten.distributed.launch import joined
from hasten.distributed.tensor_parallel import tensor_parallel
from hasten.ops.collective import RankGroup
torch.set_num_threads(1)
"""
SUMS = """
with joined() as ranks, tensor_parallel(ranks) as group:
    shared, reference = group, RankGroup(group.rank, group.size)
    print(shared.segment is not None)
    for count in (1, 7, 2048, 32768, 65537):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(count, generator=torch.Generator().manual_seed(count + ranks.rank)).to(dtype)
            before = x.clone()
            assert torch.equal(shared.sum(x), reference.sum(x)), (count, dtype)
            assert torch.equal(x, before)
    strided = torch.randn(6, 10)[:, ::2]
    assert torch.equal(shared.sum(strided), reference.sum(strided))
    for sizes in ([3, 5, 2, 1, 7, 4, 9, 6][: ranks.size], [40_000, 1, 9, 2, 3, 8, 33_000, 5][: ranks.size]):
        x = torch.randn(2, 2, sizes[ranks.rank])
        found = shared.gather(x, sizes)
        assert torch.equal(found, reference.gather(x, sizes))
        start = sum(sizes[: ranks.rank])
        assert torch.equal(found[..., start : start + sizes[ranks.rank]], x)
"""
GONE = """
with joined() as ranks, tensor_parallel(ranks) as group:
    x = torch.ones(100)
    for step in range(10):
        if ranks.rank == 1 and step == 5:
            HOW
        group.sum(x)
"""
OTHER = """
import hasten.distributed.tensor_parallel as module
with joined() as ranks:
    if ranks.rank == 1:
        module.__version__ = "0.0.0"
    with tensor_parallel(ranks):
        print("they went on")
"""
needs_sharing = pytest.mark.skipif("library() is None", reason="ranks share memory with the native operators only")


@pytest.mark.parametrize("count", [2, 3, 8])
def test_ranks_sum_and_gather_as_torch_does(count):
    found = ranks.run(START + SUMS, ranks=count)
    assert [status for status, _, _ in found] == [0] * count, found
    assert {said for _, said, _ in found} == {f"{library() is not None}\n"}


@needs_sharing
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 ended without an error"),
        ("raise ValueError('a mistake')", "rank 1: a mistake"),
    ],
    ids=["killed", "raised"],
)
def test_a_rank_that_is_gone_is_an_error_and_no_hang(how, told):
    before = time.monotonic()
    (status, _, errors), (other, _, _) = ranks.run(START + GONE.replace("HOW", how), ranks=2, timeout=100)
    assert status != 0
    assert other != 0
    assert told in errors
    assert time.monotonic() - before < 90


def test_ranks_keep_to_cores_of_their_own():
    code = START + "with joined() as ranks:\n    before = os.sched_getaffinity(0)\n"
    code += "    with tensor_parallel(ranks):\n        print(*sorted(os.sched_getaffinity(0)))\n"
    code += "    assert os.sched_getaffinity(0) == before\n"
    found = ranks.run(code, ranks=2)
    assert [status for status, _, _ in found] == [0, 0], found
    first, second = (set(said.split()) for _, said, _ in found)
    cores = {str(core) for core in os.sched_getaffinity(0)}
    assert first | second == cores
    assert len(cores) == 1 or not first & second


def test_ranks_of_different_versions_are_one_error():
    (status, said, errors), (other, _, silent) = ranks.run(START + OTHER, ranks=2, timeout=100)
    assert status == 1  # uncaught here; the command line makes a line and status 2 of it
    assert other != 0
    assert "rank 1 has another version of hasten than rank 0 (0.0.0, not " in errors
    assert "they went on" not in said + silent
