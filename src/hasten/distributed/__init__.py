"""Several processes with one model: training (docs/distributed.md) and inference (docs/parallel-inference.md)."""

import os


def launched() -> bool:
    """Whether torchrun started this process, or another launcher that sets its variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
