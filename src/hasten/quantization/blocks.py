"""Work split into pieces of one thread each, whatever the number of threads, so that results are bit-identical.

On a GPU the calling thread starts one piece after the other: more threads would wait for each other there, and each
would cost 32 MB of workspace in cuBLAS.
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

# Elements of a block of rows. A thread holds about four float32 copies of it: smaller blocks spend their time in calls,
# larger ones do not fit into the caches.
BLOCK_ELEMENTS = 1 << 18
TILE = 512  # rows of a product that one thread computes at a time
GPU_STEPS = 4  # pieces are this many times larger on a GPU, where a call costs more than its work
CPU = torch.device("cpu")


def each_block(matrix: Tensor, work: Callable[[slice], Result]) -> list[Result]:
    """Call `work` with slices of a matrix's rows, so that float32 copies are small; returns its results."""
    return each_slice(matrix, max(1, BLOCK_ELEMENTS // matrix.shape[1]), work)


def each_slice(matrix: Tensor, step: int, work: Callable[[slice], Result]) -> list[Result]:
    """Call `work` with slices of `step` rows (more on a GPU) that cover a matrix; returns its results."""
    size = len(matrix)
    step *= 1 if matrix.device.type == "cpu" else GPU_STEPS
    slices = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    return list(in_order(slices, work, device=matrix.device))


def at_once(device: torch.device) -> int:
    """Number of pieces computed at the same time: one a thread, or one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def in_order(items: Sequence[Item], work: Callable[[Item], Result], *, device: torch.device = CPU) -> Iterator[Result]:
    """Yield `work(item)` for each item in order, without gradients; a CPU computes one item on each thread.

    An item is one thread's, because sums that threads share depend on their number. (Short steps are not worth sharing
    either: measured, five times slower with two threads on a busy machine.)
    """
    if device.type != "cpu":
        for item in items:
            with torch.no_grad():
                result = work(item)
            yield result
        return
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()  # like the number of threads, a setting of the thread

    def alone(item: Item) -> Result:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            return work(item)

    try:
        lanes = min(threads, len(items))
        # torch sets a new thread's count at its first operation, unless it was read before.
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
    """Add aᵀ·b to total (K, K), for a and b (T, K); if they are one tensor, to the lower half and the diagonal."""
    symmetric = a is b

    def work(rows: slice) -> None:
        columns = slice(0, rows.stop if symmetric else total.shape[1])
        total[rows, columns].addmm_(a[:, rows].T, b[:, columns])

    each_slice(total, TILE, work)


def on_one_thread(work: Callable[[], Result]) -> Result:
    """Call `work` on one thread: the bits of some factorisations of torch depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


def root_of_shares(sums: Sequence[tuple[float, float]]) -> float:
    """√(Σ wrong / Σ whole), from the sums of squares (wrong, whole) of slices; 0 if all are zero."""
    wrong, whole = (math.fsum(column) for column in zip(*sums, strict=True))
    return math.sqrt(wrong / whole) if whole else 0.0
