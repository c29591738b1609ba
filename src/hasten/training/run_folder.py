"""Where everything of a run lies, and which checkpoint it goes on from."""

from pathlib import Path
from typing import Literal

from hasten.errors import ConfigError
from hasten.training.checkpoint_state import Checkpoint, find
from hasten.training.recipe import Recipe, differences

Resume = Literal["auto", "never", "must"]


class RunFolder:
    """Where everything of a run lies."""

    def __init__(self, *, path: Path) -> None:
        self.path = path
        self.last = path / "checkpoints" / "last"
        self.best = path / "checkpoints" / "best"
        self.lock = path / ".lock"
        self.journal = path / "train.jsonl"
        self.recipe = path / "recipe.json"
        self.picture = path / "loss.png"
        self.model = path / "model"
        self.adapter = path / "adapter"  # instead of a model, under LoRA
        self.tensorboard = path / "tensorboard"


def find_start(folder: RunFolder, recipe: Recipe, resume: Resume) -> Checkpoint | None:
    """The checkpoint to go on from, or None to begin.

    Raises ConfigError where the run that is there has another recipe, or where one must be there and is not.
    """
    if resume == "never":
        return None
    stored = find(folder.last) or find(folder.best)
    if stored is None:
        if resume == "must":
            raise ConfigError(f"{folder.path} has no checkpoint to resume from; leave --resume must away to begin")
        return None
    changed = differences(stored.recipe, recipe)
    if changed:
        raise ConfigError(
            f"{folder.path} holds a run with another recipe, at step {stored.step} ({'; '.join(changed)}): give the "
            "same values to go on with it, another --name for a new run, or --resume never to start over"
        )
    return stored
