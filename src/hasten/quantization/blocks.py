"""Working through a matrix in blocks of rows, one thread a block."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Elements of a block of rows, of which a thread holds about four copies in float32. Smaller ones spend their time on
# calls, larger ones leave the caches.
BLOCK_ELEMENTS = 1 << 18


def each_block(rows: int, columns: int, work: Callable[[slice], None]) -> None:
    """Call `work` for slices of rows that cover the matrix, so that float32 copies are small whatever the matrix is.

    Each of torch's threads takes blocks of its own: its steps are too short to be worth sharing one among threads
    (measured: five times slower with two threads on a busy machine).
    """
    step = max(1, BLOCK_ELEMENTS // columns)
    blocks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    threads = torch.get_num_threads()
    workers = min(threads, len(blocks))

    inference = torch.is_inference_mode_enabled()  # a mode of the thread, as the number of threads is

    def alone(block: slice) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            work(block)

    try:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(alone, blocks):
                pass
    finally:
        torch.set_num_threads(threads)
