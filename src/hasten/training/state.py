"""How far a run has come: the numbers that change from step to step and that a checkpoint keeps."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hasten.errors import CheckpointError, ConfigError
from hasten.training import checkpoints
from hasten.training.recipe import Recipe, differences
from hasten.training.schedules import Bend

Resume = Literal["auto", "never", "must"]


@dataclass(slots=True, kw_only=True)
class State:
    """step: optimizer steps taken. total: of the whole run, None until the speed is known. seconds: wall time used.

    bend: (step, factor of the learning rate) where the total was last lowered because the machine became slower.
    recent_losses and spikes belong to the spike detector, skipped_in_row to float16's skipped steps.
    """

    step: int = 0
    total: int | None = None
    bend: Bend | None = None
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    recent_losses: list[float] = field(default_factory=list)
    spikes: int = 0
    skipped_in_row: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], where: Path) -> "State":
        try:
            state = cls(**values)
            state.bend = None if state.bend is None else (state.bend[0], state.bend[1])
            return state
        except TypeError as error:
            raise CheckpointError(f"{where} is from another version of hasten ({error}); start over") from None

    @property
    def finished(self) -> bool:
        return self.total is not None and self.step >= self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def last(self) -> Path:
        return self.path / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        return self.path / "checkpoints" / "best"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def journal(self) -> Path:
        return self.path / "train.jsonl"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"


def find_start(folder: RunFolder, recipe: Recipe, resume: Resume) -> checkpoints.Stored | None:
    """The checkpoint to go on from, or None to begin.

    Raises ConfigError where the run that is there has another recipe, or where one must be there and is not.
    """
    if resume == "never":
        return None
    stored = checkpoints.find(folder.last) or checkpoints.find(folder.best)
    if stored is None:
        if resume == "must":
            raise ConfigError(f"{folder.path} has no checkpoint to resume from; leave --resume must away to begin")
        return None
    changed = differences(Recipe.from_json(stored.values["recipe"]), recipe)
    if changed:
        raise ConfigError(
            f"{folder.path} holds a run with another recipe, at step {stored.step} ({'; '.join(changed)}): give the "
            "same values to go on with it, another --name for a new run, or --resume never to start over"
        )
    return stored
