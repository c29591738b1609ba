"""Several processes that train one model together, on torch.distributed. See docs/distributed.md."""

import os


def launched() -> bool:
    """Whether this is a process of torchrun, or of whatever else sets its variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
