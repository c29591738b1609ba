"""What a checkpoint.json says, as typed values: whatever it lacks or has wrong is one CheckpointError."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from hasten.errors import CheckpointError, ConfigError
from hasten.training.recipe import Recipe
from hasten.training.schedules import DecayStart

FORMAT_VERSION = 1
INDEX = "checkpoint.json"
REMEDY = "start over with --resume never, or remove this folder to go on from another checkpoint"
KINDS = ("weights", "state")  # of its tensor files
_NAMES = {"decay_start": "bend"}  # of fields that have another one in the file
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # torch's GradScaler


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """How far a run has come: the numbers that change from step to step and that a checkpoint keeps.

    step: optimizer steps taken. total: of the whole run, None until the speed is known. seconds: wall time used.
    decay_start: (step, factor of the learning rate) where the total was last lowered because the machine became slower.
    recent_losses and spikes belong to the spike detector, skipped_in_row to float16's skipped steps.
    """

    step: int = 0
    total: int | None = None
    decay_start: DecayStart | None = None
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
        return {_NAMES.get(name, name): value for name, value in asdict(self).items()}

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
    except (_Wrong, ConfigError) as wrong:
        raise CheckpointError(f"{index} is damaged: {wrong}; {REMEDY}") from None
    missing = [name for name in file_names(stored.files) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}, which {INDEX} names; {REMEDY}")
    return stored


class _Wrong(Exception):
    """What is wrong, in words."""


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of a field's type. Whole numbers are counts, from 0."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return isinstance(value, list) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if kind is int:
        return type(value) is int and value >= 0
    return type(value) in ((int, float) if kind is float else (kind,))


def _checked(folder: Path, values: dict[str, Any]) -> Checkpoint:
    data = _field(values, "data", str)
    files = _field(values, "files", dict)
    return Checkpoint(
        folder=folder,
        progress=_progress(_field(values, "progress", dict)),
        recipe=Recipe.from_json(_field(values, "recipe", dict)),
        data=data,
        scaler=_scaler(_field(values, "scaler", dict)),
        measured=_field({"measured": {}} | values, "measured", dict),  # older checkpoints have none
        python_random=_python_random(_field(values, "python_random", list)),
        # Only the names count: a checkpoint never reaches outside its folder.
        files={kind: [Path(name).name for name in _names(files, kind)] for kind in KINDS},
    )


def _field(values: dict[str, Any], name: str, kind: Any, owner: str = "") -> Any:
    if name not in values:
        raise _Wrong(f"{owner}{name} is missing")
    if not _fits(values[name], kind):
        raise _Wrong(f"{owner}{name} is {values[name]!r:.60}")
    return values[name]


def _names(files: dict[str, Any], kind: str) -> list[str]:
    names: str | list[str] = _field(files, kind, str | list[str], "files.")
    return [names] if isinstance(names, str) else names


def file_names(files: Mapping[str, Any]) -> list[str]:
    """All names that a checkpoint.json has under `files`: of a kind one, or a list."""
    return [name for kept in files.values() for name in ([kept] if isinstance(kept, str) else kept)]


def _progress(values: dict[str, Any]) -> TrainingState:
    kinds = {_NAMES.get(one.name, one.name): one.type for one in fields(TrainingState)}
    found = {name: _field(values, name, kind, "progress.") for name, kind in kinds.items()}
    unknown = values.keys() - kinds.keys()
    if unknown:
        raise _Wrong(f"progress.{min(unknown):.60} is not known to this version of hasten")
    start = found.pop("bend")
    return TrainingState(**found, decay_start=None if start is None else (start[0], start[1]))


def _scaler(values: dict[str, Any]) -> dict[str, Any]:
    if values and not all(_fits(values.get(name), float) for name in _SCALER):
        raise _Wrong(f"scaler is {values!r:.60}")
    return values


def _python_random(values: list[Any]) -> tuple[Any, ...]:
    try:
        version, numbers, gauss = values
        state = (version, tuple(numbers), gauss)
        random.Random().setstate(state)
    except (TypeError, ValueError, OverflowError):
        raise _Wrong("python_random is no state of Python's generator") from None
    return state
