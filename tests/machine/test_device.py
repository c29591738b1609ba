import random

import pytest
import torch

from hasten.errors import ConfigError, ResourceError
from hasten.machine import configure, resolve_device, resolve_dtype


def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    assert resolve_device("auto") == torch.device("cpu") == resolve_device("cpu")
    one_gpu(monkeypatch)
    assert resolve_device("auto") == torch.device("cuda:0") == resolve_device("cuda") == resolve_device("cuda:0")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cpu:0", "", "mps"])
def test_an_unknown_device_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:<index>"):
        resolve_device(name)


def test_cuda_without_a_cuda_build_names_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ResourceError, match=rf"{torch.__version__.split('+')[0]}.* build without CUDA.*--device cpu"):
        resolve_device("cuda")


def test_cuda_without_a_driver_points_at_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ResourceError, match="nvidia-smi"):
        resolve_device("cuda:0")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch)
    with pytest.raises(ResourceError, match=r"'cuda:1'.*only cuda:0"):
        resolve_device("cuda:1")


def test_dtypes() -> None:
    assert resolve_dtype("bfloat16") is torch.bfloat16
    assert resolve_dtype(torch.float16) is torch.float16
    assert resolve_dtype("auto") is torch.float32
    assert resolve_dtype("auto", auto=torch.bfloat16) is torch.bfloat16
    for name in ("int8", "half", "manual_seed"):
        with pytest.raises(ConfigError, match="auto, float32, bfloat16, float16"):
            resolve_dtype(name)


def test_configure_sets_threads_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        configure(threads=1, seed=7)
        assert torch.get_num_threads() == 1
        first = torch.rand(3), random.random()
        configure(threads=1, seed=7)
        again = torch.rand(3), random.random()
        assert torch.equal(first[0], again[0])
        assert first[1] == again[1]
        configure()
        assert torch.get_num_threads() == 1, "None keeps the count"
    finally:
        torch.set_num_threads(before)


def test_configure_keeps_to_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.machine.processor import Cores

    before = torch.get_num_threads()
    monkeypatch.setattr("hasten.machine.processor.available_cores", lambda: Cores(physical=1, logical=1, quota=0.5))
    try:
        torch.set_num_threads(2)
        configure()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_configure_refuses_nonsense() -> None:
    with pytest.raises(ConfigError, match="threads is 0; it must be at least 1"):
        configure(threads=0)
    with pytest.raises(ConfigError, match="seed is -1"):
        configure(seed=-1)
