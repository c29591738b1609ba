"""Training checkpoints: everything a run needs to resume exactly, in safetensors and JSON, never half written.

A checkpoint is a folder with `checkpoint.json`, which names its tensor files. Those are written first, under names with
the step in them, and `checkpoint.json` is renamed into place last: until then the folder is the old checkpoint, and
from then on the new one. The next save removes files that `checkpoint.json` does not name.
"""

import json
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten.distributed.parts import Part, write
from hasten.distributed.placement import Placement
from hasten.distributed.ranks import Ranks
from hasten.errors import CheckpointError, ResourceError
from hasten.machine.files import replacing, save_json, write_atomically
from hasten.training.checkpoint_state import (
    FORMAT_VERSION,
    INDEX,
    KINDS,
    REMEDY,
    Checkpoint,
    RandomState,
    file_names,
    find,
)
from hasten.training.run_folder import writing

if TYPE_CHECKING:
    from hasten.distributed.storage import StoredFile

__all__ = ["Checkpoint", "Pending", "find", "link", "load", "load_weights", "save"]

MASTER = "master"  # suffix of the float32 master of a 16-bit weight, stored with the optimizer's state


class Pending:
    """A checkpoint that is being written beside the folder's current one; `finish` replaces that one.

    files: this rank's parts by file name. values: of checkpoint.json. background: copy the tensors and write them in a
    thread while training continues. also: a folder that then becomes the same checkpoint, None for none.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, list[Part]],
        values: dict[str, Any],
        *,
        ranks: Ranks,
        background: bool,
        also: Path | None,
    ) -> None:
        self.folder, self.files, self.values, self.ranks, self.also = folder, files, values, ranks, also
        self.error: Exception | None = None
        if background:  # copy, because training changes the tensors
            self.files = {
                name: [replace(p, data=p.data.detach().to("cpu", copy=True)) for p in parts]
                for name, parts in files.items()
            }
        self.thread = threading.Thread(target=self._write)
        self.thread.start()
        if not background:
            self.thread.join()

    def _write(self) -> None:
        try:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                for name, parts in self.files.items():
                    with replacing(self.folder / name) as temporary:
                        write(temporary, parts)
        except Exception as error:
            self.error = error
        self.files = {}

    def written(self) -> bool:
        """Whether every rank has written its part. Called on all ranks at once."""
        return not self.ranks.any(self.thread.is_alive())

    def finish(self) -> None:
        """Wait for every rank, then replace the current checkpoint. Raises ResourceError or CheckpointError."""
        self.thread.join()
        if self.error is not None and self.ranks.size == 1:
            raise self.error
        failed = "" if self.error is None else str(self.error) or repr(self.error)
        for rank, text in enumerate(self.ranks.texts(failed)):
            if text:
                raise ResourceError(f"rank {rank}: {text}")
        if not self.ranks.first:
            return
        names = file_names(self.values["files"])
        with writing(self.folder):
            lost = [name for name in names if not (self.folder / name).is_file()]
            if lost:
                raise CheckpointError(
                    f"{self.folder} lacks {lost[0]}: all machines must have the run's folder in common"
                )
            save_json(self.folder / INDEX, self.values, indent=1)
            _remove_others(self.folder, names)
        if self.also is not None:
            link(self.folder, self.also)


def save(
    folder: Path,
    *,
    placement: Placement,
    optimizer: torch.optim.Optimizer,
    random: RandomState,
    values: Mapping[str, Any],
    background: bool = False,
    also: Path | None = None,
) -> Pending | None:
    """Write a checkpoint in place of the folder's current one.

    Each rank writes its part. values: the other fields of checkpoint.json (`progress`, `recipe`, `data`, `scaler`, …).
    background: return a Pending at once, for the caller to `finish`. also: a folder that then becomes the same
    checkpoint. Raises ResourceError for a full disk and CheckpointError for another failure; the current checkpoint
    then stays intact.
    """
    ranks = placement.ranks
    # Tied weights are one parameter, and are written once.
    tensors: dict[str, Tensor] = {f"weights/{name}": one for name, one in placement.parameters.items()}
    tensors |= {f"state/{name}": tensor for name, tensor in _state(placement, optimizer)}
    mine = {"cpu": random.cpu} | ({} if random.cuda is None else {"cuda": random.cuda}) | placement.rank_state()
    tensors |= {f"state/{_random(ranks.rank)}.{name}": tensor for name, tensor in mine.items()}
    now = int(ranks.broadcast_from_rank0(time.time() * 1000))
    ending = f"{values['progress']['step']:08d}-{now:x}"  # never a name that the current checkpoint has
    if ranks.joined:
        from hasten.distributed.storage import own_parts

        parts = own_parts(tensors)
        endings = [f"{ending}-{rank}" for rank in range(ranks.size)]
    else:
        parts, endings = [Part.whole(name, tensor) for name, tensor in tensors.items()], [ending]
    files: dict[str, list[Part]] = {}
    for kind in KINDS:
        own = [replace(p, name=p.name.partition("/")[2]) for p in parts if p.name.startswith(f"{kind}/")]
        files[f"{kind}-{endings[ranks.rank]}.safetensors"] = own
    names = {kind: [f"{kind}-{one}.safetensors" for one in endings] for kind in KINDS}
    document = {"version": FORMAT_VERSION, **values, "python_random": random.python}
    document["files"] = names if ranks.joined else {kind: names[kind][0] for kind in KINDS}
    pending = Pending(folder, files, document, ranks=ranks, background=background, also=also)
    if background:
        return pending
    pending.finish()
    return None


def _random(rank: int) -> str:
    return "random" if rank == 0 else f"random.{rank}"


def _state(placement: Placement, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors as ("weight.key", tensor), float32 masters of 16-bit weights included."""
    for name, worked in placement.optimizer_params.items():
        for key, value in optimizer.state.get(worked, {}).items():
            yield f"{name}.{key}", placement.placed(name, value) if value.dim() else value
        if worked.dtype != placement.parameters[name].dtype:
            yield f"{name}.{MASTER}", placement.placed(name, worked.detach())


def link(source: Path, target: Path) -> None:
    """Make `target` the same checkpoint as `source`, by hard links if the file system has them, else by copies."""
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        text = (source / INDEX).read_text(encoding="utf-8")
        files = file_names(json.loads(text)["files"])
        for name in files:
            _link_file(source / name, target / name)
        write_atomically(target / INDEX, text)
        _remove_others(target, files)


def load(stored: Checkpoint, *, placement: Placement, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Restore weights, optimizer state and random states, written by any number of ranks.

    Each rank reads its own part. Raises CheckpointError if they do not fit the model.
    """
    from hasten.distributed.storage import read

    load_weights(stored, placement)
    placement.copy_from_model()
    files = _files(stored, "state")
    table = {name: (shape, file.dtypes[name]) for file in files for name, (shape, _) in file.parts.items()}
    there = placement.ranks.rank < len(files)  # other ranks take the first one's state, without its random numbers
    own = _random(placement.ranks.rank if there else 0)
    wanted, states, random = {}, defaultdict[str, dict[str, Tensor]](dict), {}
    for name, (shape, dtype) in table.items():
        owner, _, key = name.rpartition(".")
        if owner == own:
            wanted[name] = random[key] = torch.empty(shape, dtype=dtype)
        if owner.partition(".")[0] == "random":
            continue  # of a rank, not of a weight
        worked = placement.optimizer_params.get(owner)
        if worked is None and owner in placement.everywhere:
            continue  # of an expert that another rank has
        if worked is None:
            raise CheckpointError(f"{stored.folder}: optimizer state for {owner!r}, which the model lacks; {REMEDY}")
        if shape and shape != placement.parameters[owner].shape:
            raise CheckpointError(f"{stored.folder}: {name} is of shape {list(shape)}, unlike its weight; {REMEDY}")
        # AdamW keeps its step count on the device only if its kernel is fused.
        held = torch.zeros_like(worked, dtype=dtype) if shape else torch.zeros((), dtype=dtype, device=worked.device)
        if key == MASTER:
            held = worked.detach()
        else:
            states[owner][key] = held
        wanted[name] = placement.placed(owner, held) if shape else held
    read(files, wanted)
    for name, state in states.items():
        optimizer.state[placement.optimizer_params[name]] = state
    try:
        generators = RandomState(cpu=random.pop("cpu"), cuda=random.pop("cuda", None), python=stored.python_random)
        if there:
            generators.restore(device)
        placement.load_rank_state(random)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{stored.folder}: the random state is damaged ({error}); {REMEDY}") from None


def load_weights(stored: Checkpoint, placement: Placement) -> None:
    """Restore the weights, in place. Raises CheckpointError if they do not fit the model."""
    from hasten.distributed.storage import read

    read(_weights(stored, placement.everywhere), placement.parameters)


def reader_of_weights(stored: Checkpoint, parameters: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """What reads a whole weight by its name. Raises CheckpointError if they do not fit the model's parameters."""
    from hasten.distributed.storage import reader_of_whole

    return reader_of_whole(_weights(stored, parameters))


def _weights(stored: Checkpoint, wanted: Mapping[str, Tensor]) -> list["StoredFile"]:
    """The files of the weights. Raises CheckpointError if they do not fit the model's parameters."""
    files = _files(stored, "weights")
    found = {name: shape for file in files for name, (shape, _) in file.parts.items()}
    for name in wanted.keys() | found.keys():
        ours, theirs = wanted[name].shape if name in wanted else None, found.get(name)
        if ours != theirs:
            raise CheckpointError(
                f"{stored.folder}: {name} is {_describe(theirs)} in the checkpoint and {_describe(ours)} in the model; "
                f"{REMEDY}"
            )
    return files


def _link_file(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)


def _remove_others(folder: Path, kept: Any) -> None:
    names = {INDEX, *kept}
    for path in folder.iterdir():
        if path.name not in names and (path.suffix in (".safetensors", ".partial") or path.name.startswith(".")):
            path.unlink(missing_ok=True)


def _files(stored: Checkpoint, kind: str) -> list["StoredFile"]:
    from hasten.distributed.storage import StoredFile

    try:
        return [StoredFile(stored.folder / name) for name in stored.files[kind]]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {REMEDY}") from None


def _describe(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"
