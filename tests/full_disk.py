"""A stand-in for a full disk."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(limit):
    """Limit the size of files that this process writes: Python ignores the signal, and writing raises OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
