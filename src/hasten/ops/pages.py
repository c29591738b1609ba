"""Memory pages of 2 MB for what a decode step reads: weights and cached keys and values.

With pages of 4 kB a core's prefetcher stops at every page's end, and two cores streamed 60 of 85 GB/s; rows of a cache
that lie apart cost a walk through the page tables each, and attention over 2,048 tokens took three times as long.
"""

import ctypes
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # Linux, <sys/mman.h>


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same values in memory that begins at a large page, of large pages if the system has them to give.

    Returns the tensor itself where that means nothing: on another device, on another system, below 2 MB.
    """
    if tensor.device.type != "cpu" or not _worthwhile(tensor.nbytes):
        return tensor
    return _empty(tensor.shape, tensor.dtype).copy_(tensor)


def zeros_in_large_pages(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`torch.zeros`, in large pages where that means something (see `in_large_pages`)."""
    if torch.device(device).type != "cpu" or not _worthwhile(math.prod(shape) * dtype.itemsize):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _empty(shape, dtype).zero_()


def _worthwhile(size: int) -> bool:
    return sys.platform == "linux" and size >= LARGE_PAGE


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    memory = torch.empty(count + LARGE_PAGE // dtype.itemsize, dtype=dtype)  # what is never touched takes no memory
    start = -memory.data_ptr() % LARGE_PAGE
    # Advice: where it is refused (a kernel without transparent huge pages), the small pages do.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(count * dtype.itemsize), _MADV_HUGEPAGE
    )
    return memory[start // dtype.itemsize :][:count].view(shape)
