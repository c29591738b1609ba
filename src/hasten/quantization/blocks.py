"""Work cut into pieces that do not depend on the number of threads, one thread a piece: so the bits do not either.

On a GPU the caller's thread starts one piece after the other. There further threads would only wait for each other, and
cost memory: cuBLAS has a workspace of 32 MB for each.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")

# Elements of a block of rows, of which a thread holds about four copies in float32. Smaller ones spend their time on
# calls, larger ones leave the caches.
BLOCK_ELEMENTS = 1 << 18
TILE = 512  # rows of a product that one thread computes at a time
GPU_STEPS = 4  # a piece on a GPU is this many times a CPU's: there a call costs more than its work
CPU = torch.device("cpu")


def each_block(matrix: Tensor, work: Callable[[slice], Result]) -> list[Result]:
    """What `work` returns for slices of a matrix's rows: float32 copies are small whatever the matrix is."""
    return each_slice(matrix, max(1, BLOCK_ELEMENTS // matrix.shape[1]), work)


def each_slice(matrix: Tensor, step: int, work: Callable[[slice], Result]) -> list[Result]:
    """What `work` returns for slices of `step` rows (on a GPU: more) that cover a matrix, where the matrix is."""
    size = len(matrix)
    step *= 1 if matrix.device.type == "cpu" else GPU_STEPS
    slices = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    return list(in_order(slices, work, device=matrix.device))


def at_once(device: torch.device) -> int:
    """The pieces at work at a time: one on each thread, and one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def in_order(items: Sequence[Item], work: Callable[[Item], Result], *, device: torch.device = CPU) -> Iterator[Result]:
    """What `work` returns for each item, in their order and without gradients: on a CPU as many at a time as threads.

    Each thread takes items of its own: sums that several threads share have other bits for each number of them. (Short
    steps are not worth sharing anyway: measured, five times slower with two threads on a busy machine.)
    """
    if device.type != "cpu":
        for item in items:
            with torch.no_grad():
                result = work(item)
            yield result
        return
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()  # a mode of the thread, as the number of threads is

    def alone(item: Item) -> Result:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            return work(item)

    try:
        lanes = min(threads, len(items))
        # Torch sets a new thread's count at its first step, unless it was asked for before.
        with ThreadPoolExecutor(max(1, lanes), initializer=torch.get_num_threads) as pool:
            waiting: deque[Future[Result]] = deque()
            for item in items:
                waiting.append(pool.submit(alone, item))
                if len(waiting) == lanes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(threads)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (K, K) += aᵀ·b of a and b (T, K); where they are the same, only the lower half (and a little more)."""
    symmetric = a is b

    def work(rows: slice) -> None:
        columns = slice(0, rows.stop if symmetric else total.shape[1])
        total[rows, columns].addmm_(a[:, rows].T, b[:, columns])

    each_slice(total, TILE, work)


def on_one_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns, computed by one thread: some of torch's factorisations differ between one and several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


def root_of_shares(sums: Sequence[tuple[float, float]]) -> float:
    """√(Σ wrong / Σ whole) of sums of squares (wrong, whole), each of a slice; 0 where there is nothing."""
    wrong, whole = (math.fsum(column) for column in zip(*sums, strict=True))
    return math.sqrt(wrong / whole) if whole else 0.0
