"""Memory pages: 2 MB pages for data that a decode step reads (weights, KV cache), and releasing pages.

With pages of 4 kB a core's prefetcher stops at the end of every page, and two cores streamed 60 of 85 GB/s. Each cache
row that is not adjacent costs a page table walk, and attention over 2,048 tokens took three times as long.
"""

import contextlib
import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hasten.errors import ResourceError
from hasten.machine.files import system_file
from hasten.machine.memory import available_memory

LARGE_PAGE = 2 << 20
SHARED_PAGES = 32 << 20  # most bytes that small tensors share
CACHE_LINE = 64
MADV_DONTNEED = 4  # of Linux, on every architecture it runs torch on


def in_large_pages(tensor: Tensor, *, taken: bool = False) -> Tensor:
    """Move a tensor to memory that begins at a large page, and request large pages for it.

    Returns the tensor itself if it is there already or large pages do not apply (another device or system, below 2 MB).
    taken: the tensor is not used any more; its memory is released piece by piece, so the data never exists twice.
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


class SharedPages:
    """Large pages for tensors that are too small for pages of their own, one behind the other as they are moved there.

    Such memory goes back to the system when the last tensor in it dies; copy.deepcopy and pickle of one tensor copy it
    all.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def move(self, tensor: Tensor, *, taken: bool = False) -> Tensor:
        """Move a tensor of any size as `in_large_pages` moves large ones."""
        if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or _worthwhile(tensor.nbytes):
            return in_large_pages(tensor, taken=taken)
        size = -(-tensor.nbytes // CACHE_LINE) * CACHE_LINE
        if size > len(self._rest):  # no more than there is already, so that a small model takes little
            self._rest = _empty((min(max(LARGE_PAGE, self._taken), SHARED_PAGES),), torch.uint8)
        self._taken += size
        place, self._rest = self._rest[: tensor.nbytes], self._rest[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def joined_in_large_pages(parts: Iterable[Tensor], count: int) -> Tensor:
    """Concatenate `count` CPU tensors along their first dimension; each is created when it is its turn.

    So the data never exists twice, and a part may still be in the processor's cache.
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
    """`torch.zeros` in large pages, if they apply (see `in_large_pages`).

    The system zeroes such memory when it is first touched, so a cache of many gigabytes is created at once and occupies
    only what is used.
    """
    if torch.device(device).type != "cpu" or not _worthwhile(math.prod(shape) * dtype.itemsize):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _empty(shape, dtype)


def return_freed_memory() -> None:
    """Return freed memory that the C library keeps to the system (glibc only).

    Packing frees one matrix after another, and glibc would keep twice the size of an int4 model.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def release_pages(tensor: Tensor) -> None:
    """Release the pages of a tensor that is an unmodified view of a mapped file, or is not used any more.

    They no longer count as memory of this process; reading the tensor again reads the file again, or zeros. Only whole
    pages are released, only on Linux, and errors are ignored: nothing but memory use depends on it.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)


def mapped_files() -> list[range]:
    """The addresses at which this process has mapped files (on Linux)."""
    found = []
    for line in (system_file(Path("/proc/self/maps")) or "").splitlines():
        addresses, _, _, _, inode = line.split()[:5]
        if inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(range(start, end))
    return found


def release_file_pages(tensors: list[Tensor], mapped: Sequence[range]) -> None:
    """Empty a list of tensors, releasing the pages of those in `mapped` that nobody else refers to.

    A file stays mapped, and its pages stay memory of this process, as long as any of its tensors is used.
    """
    probes = [object()]
    probe = probes.pop()
    alone = sys.getrefcount(probe)  # of what only a local name refers to, in this version of Python
    while tensors:
        tensor = tensors.pop()
        storage = tensor.untyped_storage()
        # The memory is known to the tensor and to its name here.
        unused = sys.getrefcount(tensor) == alone and torch._C._storage_Use_Count(storage._cdata) == 2
        if unused and any(storage.data_ptr() in one for one in mapped):
            release_pages(torch.empty(0, dtype=torch.uint8).set_(storage))


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
