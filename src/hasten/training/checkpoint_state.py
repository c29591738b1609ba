"""State that a checkpoint keeps, and its checkpoint.json: whatever is missing or wrong is one CheckpointError."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from hasten.checks import AT_LEAST_0, hints_of, unmet
from hasten.errors import CheckpointError, ConfigError
from hasten.training.recipe import Recipe
from hasten.training.schedules import DecayStart

FORMAT_VERSION = 1
INDEX = "checkpoint.json"
REMEDY = "start over with --resume never, or remove this folder to continue from another checkpoint"
KINDS = ("weights", "state")  # of tensor files
Count = Annotated[int, AT_LEAST_0]
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # torch's GradScaler


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Progress of a run: the values that change from step to step and that a checkpoint keeps.

    step: optimizer steps taken. total: steps of the whole run, None until the speed is known. seconds: wall time used.
    bend: (step, factor of the learning rate) where the total was last lowered because the machine became slower.
    tokens: trained so far, by all ranks. loss, validation_loss: the last ones (nats). best_loss, best_step: the lowest
    validation loss and its step. stretch: for each block, the factor on its periods of rounding (MoQ). recent_losses,
    spikes: the spike detector's losses and its count. skipped_in_row: consecutive steps skipped in float16.
    """

    step: Count = 0
    total: Count | None = None
    bend: DecayStart | None = None
    tokens: Count = 0
    seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    best_loss: float | None = None
    best_step: Count | None = None
    stretch: list[int] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)
    spikes: Count = 0
    skipped_in_row: Count = 0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @property
    def finished(self) -> bool:
        """Whether all steps were taken."""
        return self.total is not None and self.step >= self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """States of the random number generators, which make dropout continue exactly where it was.

    cpu, cuda: torch's, uint8 tensors (cuda: the model's device, or None). python: as `random.setstate` takes it.
    """

    cpu: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        """The states now; device: the model's."""
        return cls(
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            python=random.getstate(),
        )

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        random.setstate(self.python)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, its checkpoint.json checked.

    data: name of the folder with the tokens. scaler: state of float16's loss scaling. measured: times by which kernels
    were chosen (hasten.machine.measured). files: file names by kind, one a rank.
    """

    folder: Path
    progress: TrainingState
    recipe: Recipe
    data: str
    scaler: dict[str, Any]
    measured: dict[str, Any]
    python_random: tuple[Any, ...]
    files: dict[str, list[str]]

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step


def find(folder: Path) -> Checkpoint | None:
    """Read the checkpoint in a folder; None if there is none. Raises CheckpointError for a damaged one."""
    index = folder / INDEX
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read ({error}); {REMEDY}") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{index} has version {version!r:.60}, this hasten reads {FORMAT_VERSION}; {REMEDY}")
    try:
        stored = _checked(folder, values)
    except ConfigError as wrong:
        raise CheckpointError(f"{index} is damaged: {wrong}; {REMEDY}") from None
    missing = [name for name in file_names(stored.files) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}, which {INDEX} names; {REMEDY}")
    return stored


def _checked(folder: Path, values: dict[str, Any]) -> Checkpoint:
    values = {"measured": {}} | values  # missing in older checkpoints
    _require(values, {"data": str, "files": dict, "progress": dict, "recipe": dict, "scaler": dict})
    _require(values, {"measured": dict, "python_random": list})
    _require(values["files"], dict.fromkeys(KINDS, str | list[str]), "files.")
    if values["scaler"] and any(unmet(values["scaler"].get(name), float) for name in _SCALER):
        raise ConfigError(f"scaler is {values['scaler']!r:.60}")
    return Checkpoint(
        folder=folder,
        progress=_progress(values["progress"]),
        recipe=Recipe.from_json(values["recipe"]),
        data=values["data"],
        scaler=values["scaler"],
        measured=values["measured"],
        python_random=_python_random(values["python_random"]),
        # Only the last part of a name counts: a checkpoint never reaches outside its folder.
        files={kind: [Path(name).name for name in file_names({kind: values["files"][kind]})] for kind in KINDS},
    )


def _require(values: dict[str, Any], kinds: Mapping[str, Any], owner: str = "") -> None:
    """Raise ConfigError for a value that is missing or has another type."""
    for name, kind in kinds.items():
        if name not in values:
            raise ConfigError(f"{owner}{name} is missing")
        wanted = unmet(values[name], kind)
        if wanted:
            raise ConfigError(f"{owner}{name} is {values[name]!r:.60}; it must be {wanted}")


def file_names(files: Mapping[str, Any]) -> list[str]:
    """All names that a checkpoint.json has under `files`, where each kind has one name or a list."""
    return [name for kept in files.values() for name in ([kept] if isinstance(kept, str) else kept)]


def _progress(values: dict[str, Any]) -> TrainingState:
    kinds = hints_of(TrainingState)
    values = {"stretch": []} | values  # missing in checkpoints of earlier versions
    _require(values, kinds, "progress.")
    unknown = values.keys() - kinds.keys()
    if unknown:
        raise ConfigError(f"progress.{min(unknown):.60} is not known to this version of hasten")
    bend = values["bend"]
    return TrainingState(**values | {"bend": None if bend is None else tuple(bend)})


def _python_random(values: list[Any]) -> tuple[Any, ...]:
    try:
        version, numbers, gauss = values
        state = (version, tuple(numbers), gauss)
        random.Random().setstate(state)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError("python_random is no state of Python's generator") from None
    return state
