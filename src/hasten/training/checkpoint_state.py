"""What a checkpoint.json says, as typed values: whatever it lacks or has wrong is one CheckpointError."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hasten.checks import AT_LEAST_0, hints_of, unmet
from hasten.errors import CheckpointError, ConfigError
from hasten.training.recipe import Recipe
from hasten.training.schedules import DecayStart

FORMAT_VERSION = 1
INDEX = "checkpoint.json"
REMEDY = "start over with --resume never, or remove this folder to go on from another checkpoint"
KINDS = ("weights", "state")  # of its tensor files
Count = Annotated[int, AT_LEAST_0]
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # torch's GradScaler


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """How far a run has come: the numbers that change from step to step and that a checkpoint keeps.

    step: optimizer steps taken. total: of the whole run, None until the speed is known. seconds: wall time used.
    bend: (step, factor of the learning rate) where the total was last lowered because the machine became slower.
    stretch: how many times as long a block's periods of rounding are (MoQ).
    recent_losses and spikes belong to the spike detector, skipped_in_row to float16's skipped steps.
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
        return asdict(self)

    @property
    def finished(self) -> bool:
        return self.total is not None and self.step >= self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, its checkpoint.json checked.

    data: the folder of the tokens. scaler: the state of float16's loss scaling. measured: the times by which kernels
    were chosen (hasten.machine.measured). files: names by kind, one a rank.
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
        """Steps that were taken."""
        return self.progress.step


def find(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None where there is none. Raises CheckpointError for a damaged one."""
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
    values = {"measured": {}} | values  # older checkpoints have none
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
        # Only the names count: a checkpoint never reaches outside its folder.
        files={kind: [Path(name).name for name in file_names({kind: values["files"][kind]})] for kind in KINDS},
    )


def _require(values: dict[str, Any], kinds: Mapping[str, Any], owner: str = "") -> None:
    """Raise ConfigError for what is missing, or is not of its kind."""
    for name, kind in kinds.items():
        if name not in values:
            raise ConfigError(f"{owner}{name} is missing")
        if wanted := unmet(values[name], kind):
            raise ConfigError(f"{owner}{name} is {values[name]!r:.60}; it must be {wanted}")


def file_names(files: Mapping[str, Any]) -> list[str]:
    """All names that a checkpoint.json has under `files`: of a kind one, or a list."""
    return [name for kept in files.values() for name in ([kept] if isinstance(kept, str) else kept)]


def _progress(values: dict[str, Any]) -> TrainingState:
    kinds = hints_of(TrainingState)
    values = {"stretch": []} | values  # which earlier versions did not have
    _require(values, kinds, "progress.")
    if unknown := values.keys() - kinds.keys():
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
