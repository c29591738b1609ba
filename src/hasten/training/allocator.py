"""What becomes of memory that a step on a CPU frees: kept in the process, or returned to the system at once.

glibc returns freed blocks above a threshold to the system, and every new one is mapped and zeroed page by page again. A
training step frees and allocates its gradients and activations each time. Kept memory serves it again, and can consist
of 2 MB pages, so that matrix products, which access it in strides, miss the TLB less often. `hasten bench train`
measures both.
Sources: mallopt(3), madvise(2).
"""

import ctypes
import sys

from hasten.machine import available_memory
from hasten.machine.pages import LARGE_PAGE

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = -1  # as a size_t: the largest one
_MADV_HUGEPAGE = 14  # Python's mmap lacks it where it was built with older headers
SMALLEST = 64 << 20
MAPPED = 1 << 20  # bytes of the smallest block that is returned at once


def keep_freed_memory() -> bool:
    """Allocate large blocks from the heap and never shrink it, for the whole process; returns whether that is possible.

    The process then stays as large as its peak. Results do not change.
    """
    if not (_set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, _NEVER)):
        return False
    _large_pages(ctypes.CDLL(None), min(available_memory(), _allowed()) // 2)
    return True


def return_large_blocks() -> bool:
    """Return freed blocks of `MAPPED` bytes or more to the system, for the whole process; whether that is possible.

    glibc raises this threshold, up to 32 MB, each time such a block is freed. The weights that a rank gathers and frees
    for each block then fragment the heap: in one run on four ranks a third of it was holes.
    """
    return _set(_M_MMAP_THRESHOLD, MAPPED)


def _set(option: int, value: int) -> bool:
    """Set an option of the C library's allocator; returns whether it has it."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "mallopt"):  # musl
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(library.mallopt(option, value))


def _large_pages(library: ctypes.CDLL, count: int) -> int:
    """Advise large pages for the heap's next `count` bytes; returns for how many, fewer if the process may not grow so.

    The heap is extended by a block that is freed at once: an address range that uses no memory until it is written.
    """
    library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while count >= SMALLEST:
        block = library.malloc(count)
        if block:
            first = -(-block // LARGE_PAGE) * LARGE_PAGE
            length = (block + count - first) // LARGE_PAGE * LARGE_PAGE
            # Only advice: if it is refused (a kernel without transparent large pages), the pages are small.
            library.madvise(first, length, _MADV_HUGEPAGE)
            library.free(block)
            return int(length)
        count //= 2
    return 0


def _allowed() -> int:
    """Bytes that the process's resource limits allow."""
    import resource

    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=sys.maxsize)
