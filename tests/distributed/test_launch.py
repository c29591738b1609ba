"""What a rank says when it cannot start, or when another one's connection breaks."""

import re

import pytest
import torch
from torch import distributed as dist

from hasten.distributed import launch
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes, but GPUs: 1"), launch.joined():
        pass


@pytest.mark.parametrize(
    ("present", "message"),
    [([1, 2], "all ranks are alive, but .* broke: gloo: reset$"), ([2], "rank 1 ended without an error")],
)
def test_a_broken_connection_names_who_ended_or_that_nobody_did(monkeypatch, present, message):
    monkeypatch.setattr(launch, "ROLL_CALL", 0)
    monkeypatch.delenv(launch.BY_US, raising=False)
    watch = object.__new__(launch._Watch)
    watch.ranks, watch.store = Ranks(rank=0, size=3, joined=True), dist.HashStore()
    for rank in present:
        watch.store.set(f"here/{rank}", "")
    assert re.match(message, str(watch._named(RuntimeError("gloo: reset\nand a trace"))))
