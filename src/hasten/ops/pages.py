"""Memory pages: those of 2 MB for what a decode step reads (weights, cached keys and values), and giving pages back.

With pages of 4 kB a core's prefetcher stops at every page's end, and two cores streamed 60 of 85 GB/s; rows of a cache
that lie apart cost a walk through the page tables each, and attention over 2,048 tokens took three times as long.
"""

import contextlib
import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hasten.errors import ResourceError
from hasten.machine.memory import available_memory

LARGE_PAGE = 2 << 20
MADV_DONTNEED = 4  # of Linux, on every architecture it runs torch on


def in_large_pages(tensor: Tensor, *, taken: bool = False) -> Tensor:
    """The same values in memory that begins at a large page, of large pages if the system has them to give.

    Returns the tensor itself where it is there already, and where that means nothing: on another device, on another
    system, below 2 MB. taken: nobody reads the tensor any more, whose memory goes back piece by piece, so that it is
    never there twice.
    """
    if tensor.device.type != "cpu" or not _worthwhile(tensor.nbytes) or tensor.data_ptr() % LARGE_PAGE == 0:
        return tensor
    moved = _empty(tensor.shape, tensor.dtype)
    if not (taken and tensor.is_contiguous()):
        return moved.copy_(tensor)
    for place, piece in zip(*(one.view(-1).split(LARGE_PAGE) for one in (moved, tensor)), strict=True):
        place.copy_(piece)
        release_pages(piece)
    return moved


def joined_in_large_pages(parts: Iterable[Tensor], count: int) -> Tensor:
    """Tensors of the CPU joined along their first dimension, `count` in all, each made when it is its turn.

    The whole is never there twice, and a part may find its memory in the processor's cache.
    """
    rest = iter(parts)
    first = next(rest)
    joined = empty_in_large_pages((count, *first.shape[1:]), dtype=first.dtype)
    start = 0
    for part in itertools.chain([first], rest):
        joined[start : start + len(part)] = part
        start += len(part)
    return joined


def empty_in_large_pages(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """`torch.empty` on the CPU, in large pages where that means something (see `in_large_pages`)."""
    large = _worthwhile(math.prod(shape) * dtype.itemsize)
    return _empty(shape, dtype) if large else torch.empty(shape, dtype=dtype)


def zeros_in_large_pages(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`torch.zeros`, in large pages where that means something (see `in_large_pages`).

    The system hands out such memory as zeros when it is first touched: a cache that could hold many gigabytes is there
    at once, and takes what is used of it.
    """
    if torch.device(device).type != "cpu" or not _worthwhile(math.prod(shape) * dtype.itemsize):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _empty(shape, dtype)


def return_freed_memory() -> None:
    """Give back to the system what the C library keeps of freed memory (glibc; elsewhere nothing happens).

    Packing frees one matrix after another, and glibc keeps such holes: twice the size of an int4 model.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def release_pages(tensor: Tensor) -> None:
    """Let go of the pages of a tensor that is a view of a mapped file and was never written to, or is read by nobody.

    They then no longer count as memory of this process; reading the tensor again would read the file again, or zeros.
    Only whole pages are let go, only on Linux, and a refusal changes nothing: this is a matter of memory alone.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)


def _worthwhile(size: int) -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE") and size >= LARGE_PAGE


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    # A mapping of its own, which goes back to the system when the tensor dies, and not into a heap full of holes. What
    # lies before the first large page is never touched and takes no memory.
    size = count * dtype.itemsize + LARGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"the system does not give {size:,} bytes of memory in one piece ({error}); {available_memory():,} bytes "
            "are free: ask for less (a smaller cache, shorter texts, a smaller model)"
        ) from error
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without transparent large pages: the small ones do
        memory.madvise(mmap.MADV_HUGEPAGE, start, count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
