"""Several processes with one model: training (docs/distributed.md) and inference (docs/parallel-inference.md)."""

import os


def launched() -> bool:
    """Whether this is a process of torchrun, or of whatever else sets its variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
