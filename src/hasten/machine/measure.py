"""The two rates that bound every speed we print: bytes read per second and multiply-adds per second.

Decoding one token reads every weight once, so its limit is bytes over the read bandwidth; prefill and training are
matrix products, so theirs is FLOPs over the rate of the best product. Both are measured on this machine, a moment
before or after the thing they are compared with: a shared machine changes its speed two-fold within minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import TYPE_CHECKING

from hasten.checks import whole
from hasten.errors import ConfigError, ResourceError
from hasten.machine.limits import Limits
from hasten.machine.memory import available_memory
from hasten.machine.processor import last_level_cache_bytes

if TYPE_CHECKING:
    import torch

SMALLEST_BUFFER = 512 << 20  # bytes; far above the caches of one socket
MATRIX_DTYPES = ("float32", "bfloat16", "float16", "int8")

# (rows, outputs, inputs), smallest first. The first is a probe: on a processor that emulates a dtype one large product
# would take minutes. 512 rows by a feed-forward matrix is the shape prefill sees; the cubes are for wide devices.
CPU_SHAPES = ((128, 512, 512), (512, 5632, 2048), (2048, 2048, 2048))
CUDA_SHAPES = ((512, 512, 512), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))


def read_bandwidth(*, device: str | torch.device = "cpu", seconds: float = 0.5) -> float:
    """Memory bandwidth in bytes/s: the median of as many passes as fit in `seconds` (at least 3).

    CPU: summing a float32 buffer of at least 512 MiB and 4 times the last-level caches, but at most a quarter of the
    free memory (with fewer threads: under `limited_threads`), in large pages, as weights are. CUDA: copying
    within the device, the read and the write both counted.
    """
    import torch

    from hasten.machine.pages import empty_in_large_pages

    size = min(max(SMALLEST_BUFFER, 4 * last_level_cache_bytes()), available_memory(device) // 4)
    if str(device) != "cpu":
        # Two buffers; 1 GiB each keeps launches and the device's L2 cache out of the figure.
        size = min(1 << 30, available_memory(device) // 4)
    if size < 1 << 20:
        raise ResourceError(f"{available_memory(device)} bytes are free on {device}: too few to measure the bandwidth")
    if str(device) == "cpu":
        source = empty_in_large_pages((size // 4,), dtype=torch.float32).fill_(1)  # written, so that every page exists
        return size / median(_times(source.sum, device=device, seconds=seconds))
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(_times(lambda: target.copy_(source), device=device, seconds=seconds))


def matrix_rate(dtype: str | torch.dtype, *, device: str | torch.device = "cpu", seconds: float = 0.5) -> float:
    """FLOP/s (OP/s for int8) of the fastest matrix product among a few shapes: the median time of each, the best shape.

    `dtype` is one of MATRIX_DTYPES; int8 multiplies into int32 (torch._int_mm). A shape that would not fit in the time
    left is left out. Raises ConfigError for another dtype, ResourceError where this torch cannot multiply it there.
    """
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in MATRIX_DTYPES:
        raise ConfigError(f"no matrix rate for dtype {name!r}; use one of {', '.join(MATRIX_DTYPES)}")
    on_cpu = str(device) == "cpu"
    shapes = CPU_SHAPES if on_cpu else CUDA_SHAPES
    best, expected = 0.0, 0.0
    for rows, outputs, inputs in shapes:
        operations = 2 * rows * outputs * inputs
        probing = not expected
        if not probing and operations / expected > seconds:
            break
        try:
            call = product(name, rows, outputs, inputs, device)
            call()
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError) and best:
                break
            raise ResourceError(f"torch {torch.__version__} cannot multiply {name} on {device}: {error}") from error
        if probing and on_cpu:
            # On one thread: where other programs run, a small product on several threads waits whole time slices for
            # its last thread and looks a hundred times as slow as a large one.
            with limited_threads(1):
                fastest = operations / min(_times(call, device=device, seconds=seconds / 20))
            best, expected = fastest, fastest * torch.get_num_threads()
            continue
        times = _times(call, device=device, seconds=seconds / (len(shapes) - 1))
        best, expected = max(best, operations / median(times)), max(expected, operations / min(times))
    return best


def measure_limits(
    device: str | torch.device = "cpu",
    dtypes: Sequence[str | torch.dtype] = ("float32", "bfloat16"),
    *,
    seconds: float = 0.5,
    tell: Callable[[str], None] = lambda what: None,
) -> Limits:
    """Bandwidth and the matrix rates of `dtypes` now, `seconds` each; a dtype that cannot be multiplied is left out.

    tell: called with the name of the next measurement.
    """
    rates: dict[str, float] = {}
    for dtype in dtypes:
        tell(f"{dtype} products")
        with suppress(ResourceError):
            rates[str(dtype).removeprefix("torch.")] = matrix_rate(dtype, device=device, seconds=seconds)
    tell("memory bandwidth")
    return Limits(bandwidth=read_bandwidth(device=device, seconds=seconds), rates=rates)


def product_limits(
    device: str | torch.device = "cpu", dtypes: Sequence[str | torch.dtype] = ("float32",), *, seconds: float = 0.5
) -> Limits:
    """`measure_limits` to hold products against: on a CPU those of int8 have at least the rate of float32.

    Integers of 8 bits may be multiplied in float32; torch's own int8 product is a hundred times slower without VNNI.
    """
    found = measure_limits(device, dtypes, seconds=seconds)
    if "int8" not in found.rates or str(device).partition(":")[0] != "cpu":
        return found
    rate = found.rates.get("float32") or matrix_rate("float32", device=device, seconds=seconds)
    return Limits(found.bandwidth, found.rates | {"int8": max(rate, found.rates["int8"])})


def product(dtype: str, rows: int, outputs: int, inputs: int, device: str | torch.device) -> Callable[[], object]:
    """A call that multiplies (rows, inputs) by the transpose of (outputs, inputs), as a linear layer does.

    dtype: one of MATRIX_DTYPES. The values are drawn from torch's own generator.
    """
    import torch

    if dtype == "int8":
        left = torch.randint(-127, 127, (rows, inputs), dtype=torch.int8, device=device)
        right = torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8, device=device).t()
        return lambda: torch._int_mm(left, right)
    # Random values, never zeros: a GPU draws less power on zeros and then runs faster than it ever does on real data.
    kind = getattr(torch, dtype)
    left = torch.randn(rows, inputs, device=device).to(kind)
    right = torch.randn(outputs, inputs, device=device).to(kind)
    return lambda: torch.nn.functional.linear(left, right)


def _times(call: Callable[[], object], *, device: str | torch.device, seconds: float) -> list[float]:
    """Wall times of calls, at least 3; on CUDA of synchronised calls that are long against their launch."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        call()
        if str(device) != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    with torch.no_grad():
        timed()  # warm-up: first touch, thread start, kernel choice
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
            times.append(timed())
    return times


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Limit torch to `threads` threads during the block. Raises ConfigError for less than one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(whole("threads", count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
