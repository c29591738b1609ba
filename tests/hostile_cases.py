"""What the tests of damaged and hostile checkpoints share."""

import time
from contextlib import contextmanager

import pytest

from hasten.errors import CheckpointError
from peak_memory import PeakMemory

CPU_SECONDS = 2.0
BYTES = 50_000_000


@contextmanager
def refused(*words, kind=CheckpointError):
    """The block raises one typed error that says all these words, cheaply."""
    start = time.process_time()
    with PeakMemory() as peak, pytest.raises(kind) as caught:
        yield
    assert time.process_time() - start < CPU_SECONDS
    assert peak.bytes < BYTES
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    for word in words:
        assert str(word) in message, message
