"""Work cut into pieces that do not depend on the number of threads, one thread a piece: so the bits do not either."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# Elements of a block of rows, of which a thread holds about four copies in float32. Smaller ones spend their time on
# calls, larger ones leave the caches.
BLOCK_ELEMENTS = 1 << 18
TILE = 512  # rows of a product that one thread computes at a time


def each_block(rows: int, columns: int, work: Callable[[slice], Result]) -> list[Result]:
    """What `work` returns for slices of rows that cover a matrix: float32 copies are small whatever the matrix is."""
    return each_slice(rows, max(1, BLOCK_ELEMENTS // columns), work)


def each_slice(size: int, step: int, work: Callable[[slice], Result]) -> list[Result]:
    """What `work` returns for slices of `step` that cover `size`.

    Each of torch's threads takes slices of its own: its steps are too short to be worth sharing one among threads
    (measured: five times slower with two threads on a busy machine).
    """
    slices = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()  # a mode of the thread, as the number of threads is

    def alone(part: slice) -> Result:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            return work(part)

    try:
        with ThreadPoolExecutor(min(threads, len(slices))) as pool:
            return list(pool.map(alone, slices))
    finally:
        torch.set_num_threads(threads)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (K, K) += aᵀ·b of a and b (T, K); where they are the same, only the lower half (and a little more)."""
    symmetric = a is b

    def work(rows: slice) -> None:
        columns = slice(0, rows.stop if symmetric else total.shape[1])
        total[rows, columns].addmm_(a[:, rows].T, b[:, columns])

    each_slice(len(total), TILE, work)


def on_one_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns, computed by one thread: some of torch's factorisations differ between one and several."""
    return each_slice(1, 1, lambda _: work())[0]


def root_of_shares(sums: Sequence[tuple[float, float]]) -> float:
    """√(Σ wrong / Σ whole) of sums of squares (wrong, whole), each of a slice; 0 where there is nothing."""
    wrong, whole = (math.fsum(column) for column in zip(*sums, strict=True))
    return math.sqrt(wrong / whole) if whole else 0.0
