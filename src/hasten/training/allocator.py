"""Keeping freed memory in the process: on the CPU, a step should not ask the system for the same pages every time.

glibc gives blocks above a threshold back to the system when they are freed, and every new one is mapped and zeroed page
by page again. A training step frees and allocates its gradients and activations each time. Kept memory can also consist
of pages of 2 MB, so that matrix products, which walk through it in strides, wait less for the address of the next page.
What both give is a rung of `hasten bench train`. Sources: mallopt(3), madvise(2).
"""

import ctypes
import sys

from hasten.machine import available_memory
from hasten.ops.pages import LARGE_PAGE

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1  # as a size: the largest there is
_MADV_HUGEPAGE = 14  # Python's mmap lacks it where it was built with older headers
SMALLEST = 64 << 20


def keep_freed_memory() -> bool:
    """Take large blocks from the heap and do not shrink it, for the whole process; whether this C library can.

    The process then stays as large as its largest moment. Results do not change.
    """
    # musl has no mallopt.
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    mallopt = library.mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    if not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER)):
        return False
    _large_pages(library, min(available_memory(), _allowed()) // 2)
    return True


def _large_pages(library: ctypes.CDLL, count: int) -> int:
    """Have the heap's next `count` bytes (or fewer) consist of large pages, where the system has such; how many.

    The heap is made longer by a block that is freed again at once: an address range, no memory, until it is written.
    """
    library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while count >= SMALLEST:
        block = library.malloc(count)
        if block:
            first = -(-block // LARGE_PAGE) * LARGE_PAGE
            length = (block + count - first) // LARGE_PAGE * LARGE_PAGE
            # Advice: where it is refused (a kernel without transparent large pages), small ones do.
            library.madvise(first, length, _MADV_HUGEPAGE)
            library.free(block)
            return int(length)
        count //= 2  # the process may be allowed less
    return 0


def _allowed() -> int:
    """Bytes that the process's own limits let it take."""
    import resource

    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=sys.maxsize)
