import math
from collections.abc import Sequence

import pytest
import torch

from hasten.errors import ConfigError, ResourceError
from hasten.machine import MATRIX_DTYPES, matrix_rate, measure_limits, product_limits, vendor_limits
from hasten.machine.measure import limited_threads, read_bandwidth
from hasten.machine.pages import empty_in_large_pages

MIB = 1 << 20


def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB free and small shapes: the figures are wrong, the way to them is the same."""
    monkeypatch.setattr("hasten.machine.measure.available_memory", lambda device: 64 * MIB)
    monkeypatch.setattr("hasten.machine.measure.CPU_SHAPES", ((16, 32, 64), (32, 64, 64)))


def test_bandwidth_keeps_to_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads large pages, as weights are: with small ones a fast memory looks half as fast."""
    small_machine(monkeypatch)
    sizes = []

    def large(shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(math.prod(shape) * dtype.itemsize)
        return empty_in_large_pages(shape, dtype=dtype)

    monkeypatch.setattr("hasten.machine.pages.empty_in_large_pages", large)
    before = torch.get_num_threads()
    with limited_threads(1):
        assert 1e6 < read_bandwidth(seconds=0.01) < 1e14
    assert sizes == [16 * MIB]
    assert torch.get_num_threads() == before


def test_bandwidth_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.machine.measure.available_memory", lambda device: 1000)
    with pytest.raises(ResourceError, match="1000 bytes are free"):
        read_bandwidth(seconds=0.01)


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
def test_every_dtype_has_a_rate(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch)
    assert 1e3 < matrix_rate(dtype, seconds=0.01) < 1e18


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, int8"):
        matrix_rate("float64")


def test_limits_leave_out_what_cannot_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch)

    def refuse(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not here")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    limits = measure_limits("cpu", ("float32", torch.bfloat16, "int8"), seconds=0.01)
    assert set(limits.rates) == {"float32", "bfloat16"}
    assert limits.bandwidth > 0


def test_products_of_int8_are_held_to_the_rate_of_float32_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"float32": 5.0, "int8": 2.0}
    monkeypatch.setattr("hasten.machine.measure.matrix_rate", lambda dtype, **_: rates[dtype])
    monkeypatch.setattr("hasten.machine.measure.read_bandwidth", lambda **_: 1.0)
    assert product_limits("cpu", ("int8",)).rates == {"int8": 5.0}
    assert product_limits("cpu", ("float32", "int8")).rates == {"float32": 5.0, "int8": 5.0}
    rates["int8"] = 9.0
    assert product_limits("cpu", ("int8",)).rates == {"int8": 9.0}
    assert product_limits("cpu", ("float32",)).rates == {"float32": 5.0}


def test_vendor_figures_are_matched_by_whole_words() -> None:
    h200 = vendor_limits("NVIDIA H200")
    assert h200 is not None
    assert (h200.bandwidth, h200.rates["bfloat16"]) == (4.8e12, 989e12)
    nvl = vendor_limits("NVIDIA H200 NVL")
    assert nvl is not None
    assert nvl.rates["bfloat16"] == 835e12
    for name in ("NVIDIA GH200 480GB", "NVIDIA L40", "Some GPU"):
        assert vendor_limits(name) is None


def test_a_dtype_that_is_emulated_is_not_multiplied_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch)
    threads = []

    def times(product: object, *, seconds: float, **_: object) -> list[float]:
        threads.append(torch.get_num_threads())
        return [2.0, 2.0, fastest]

    monkeypatch.setattr("hasten.machine.measure._times", times)
    fastest = 2.0
    assert matrix_rate("float32", seconds=0.5) == 2 * 16 * 32 * 64 / 2
    assert threads == [1], "the second shape would take longer than there is time"
    fastest = 1e-9
    matrix_rate("float32", seconds=0.5)
    assert threads == [1, 1, torch.get_num_threads()], "slow passes and a fast one: the machine is busy, not slow"
