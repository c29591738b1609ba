"""The folder of a run: its files, the checkpoint to resume from, and the errors of writing there."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hasten.errors import CheckpointError, ConfigError, HastenError, ResourceError
from hasten.training.checkpoint_state import Checkpoint, find
from hasten.training.recipe import Recipe, differences

Resume = Literal["auto", "never", "must"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFolder:
    """Paths of a run's files. adapter: written instead of `model` with LoRA."""

    def __init__(self, *, path: Path) -> None:
        self.path = path
        self.last = path / "checkpoints" / "last"
        self.best = path / "checkpoints" / "best"
        self.lock = path / ".lock"
        self.journal = path / "train.jsonl"
        self.recipe = path / "recipe.json"
        self.picture = path / "loss.png"
        self.model = path / "model"
        self.adapter = path / "adapter"
        self.tensorboard = path / "tensorboard"


def find_start(folder: RunFolder, recipe: Recipe, resume: Resume) -> Checkpoint | None:
    """The checkpoint to resume from, or None to start over.

    Raises ConfigError if the folder's run has another recipe, or if resume is "must" and there is no checkpoint.
    """
    if resume == "never":
        return None
    stored = find(folder.last) or find(folder.best)
    if stored is None:
        if resume == "must":
            raise ConfigError(f"{folder.path} has no checkpoint to resume from; leave out --resume must to begin")
        return None
    changed = differences(stored.recipe, recipe)
    if changed:
        raise ConfigError(
            f"{folder.path} holds a run with another recipe, at step {stored.step} ({'; '.join(changed)}): give the "
            "same values to continue it, another --name for a new run, or --resume never to start over"
        )
    return stored


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an OSError inside the context into its typed error (`write_error`)."""
    try:
        yield
    except OSError as error:
        raise write_error(place, error) from None


def write_error(place: Path, error: OSError) -> HastenError:
    """The typed error for a write that failed: ResourceError if the disk is full, else CheckpointError."""
    text = error.strerror or str(error)
    if error.errno in _FULL:
        return ResourceError(f"{place} cannot be written: the disk is full ({text}); free some space and run again")
    return CheckpointError(f"{place} cannot be written: {text}")
