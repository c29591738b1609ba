"""Keeping freed memory in the process: on the CPU, a step should not ask the system for the same pages every time.

glibc gives blocks above a threshold back to the system when they are freed, and every new one is mapped and zeroed page
by page again. A training step frees and allocates its gradients and activations each time. What keeping them gives is a
rung of `hasten bench train`. Source: mallopt(3).
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Take large blocks from the heap and do not shrink it, for the whole process; whether this C library can.

    The process then stays as large as its largest moment. Results do not change.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, musl for example
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
