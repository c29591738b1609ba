"""Giving back the memory of file pages that have been read and will not be read again."""

import ctypes
import mmap
import sys

from torch import Tensor

MADV_DONTNEED = 4  # of Linux, on every architecture it runs torch on


def release_pages(tensor: Tensor) -> None:
    """Let go of the pages of a tensor that is a view of a mapped file and was never written to.

    They then no longer count as memory of this process; reading the tensor again would read the file again. Only whole
    pages are let go, only on Linux, and a refusal changes nothing: this is a matter of memory alone.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)
