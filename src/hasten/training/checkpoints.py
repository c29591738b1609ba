"""Training checkpoints: everything a run needs to go on exactly, in safetensors and JSON, never half written.

A checkpoint is a folder with `checkpoint.json`, which names the two tensor files it belongs to. Those are written
first, under names with the step in them, and `checkpoint.json` is renamed into place last: until then the folder is the
old checkpoint, from then on the new one, with no moment between. Files that no `checkpoint.json` names are removed by
the next save.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hasten.errors import CheckpointError, HastenError, ResourceError
from hasten.machine.files import replacing, save_json, write_atomically
from hasten.training.checkpoint_state import FORMAT_VERSION, INDEX, REMEDY, Checkpoint, find
from hasten.training.random_state import RandomState

__all__ = ["Checkpoint", "find", "link", "load", "load_weights", "read_tensors", "save", "write_error", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    random: RandomState,
    values: Mapping[str, Any],
) -> None:
    """Write a checkpoint over the one that is there. values: `progress`, `recipe`, `data` and `scaler` of Checkpoint.

    Raises ResourceError for a full disk and CheckpointError for another failure; the one that was there stays whole.
    """
    step = values["progress"]["step"]
    weights: dict[str, Tensor] = dict(trained(model))
    moments = dict(_named_moments(model, optimizer)) | {"random.cpu": random.cpu}
    if random.cuda is not None:
        moments["random.cuda"] = random.cuda
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for kind, tensors in (("weights", weights), ("state", moments)):
            files[kind] = f"{kind}-{step:08d}.safetensors"
            with replacing(folder / files[kind]) as temporary:
                save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, temporary)
        document = {"version": FORMAT_VERSION, **values, "python_random": random.python, "files": files}
        save_json(folder / INDEX, document, indent=1)
        _remove_others(folder, files.values())


def link(source: Path, target: Path) -> None:
    """Make `target` the same checkpoint as `source`, without a second copy where the file system can."""
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        text = (source / INDEX).read_text(encoding="utf-8")
        files = json.loads(text)["files"].values()
        for name in files:
            _link_file(source / name, target / name)
        write_atomically(target / INDEX, text)
        _remove_others(target, files)


def load(stored: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put weights, optimizer state and random states back. Raises CheckpointError where they do not fit the model."""
    load_weights(stored, model)
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    random: dict[str, Tensor] = {}
    for name, tensor in read_tensors(stored, "state"):
        owner, _, key = name.rpartition(".")
        if owner == "random":
            random[key] = tensor
        elif owner in parameters:
            if tensor.dim() and tensor.shape != parameters[owner].shape:
                raise CheckpointError(f"{stored.folder}: {name} is {_describe(tensor)}, unlike its weight; {REMEDY}")
            # AdamW keeps its step count on the device only because the kernel is fused.
            states.setdefault(owner, {})[key] = tensor.to(device)
        else:
            raise CheckpointError(f"{stored.folder}: optimizer state for {owner!r}, which the model lacks; {REMEDY}")
    for name, state in states.items():
        optimizer.state[parameters[name]] = state
    try:
        RandomState(cpu=random["cpu"], cuda=random.get("cuda"), python=stored.python_random).restore(device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{stored.folder}: the random state is damaged ({error}); {REMEDY}") from None


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a checkpoint holds, tied ones once: frozen ones are read from where they came from."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def load_weights(stored: Checkpoint, model: nn.Module) -> None:
    """Put the weights back, in place. Raises CheckpointError where they do not fit the model."""
    wanted = dict(trained(model))
    found = dict(read_tensors(stored, "weights"))
    for name in wanted.keys() | found.keys():
        ours, theirs = wanted.get(name), found.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            raise CheckpointError(
                f"{stored.folder}: {name} is {_describe(theirs)} in the checkpoint and {_describe(ours)} in the model; "
                f"{REMEDY}"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn a failed write into its typed error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise write_error(place, error) from None


def write_error(place: Path, error: Exception) -> HastenError:
    """The typed error for a write that failed: ResourceError if the disk is full, else CheckpointError."""
    text = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) in _FULL or any(f"os error {n}" in text for n in _FULL):
        return ResourceError(f"{place} cannot be written: the disk is full ({text}); free some space and run again")
    return CheckpointError(f"{place} cannot be written: {text}")


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}.{key}", value


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


def read_tensors(stored: Checkpoint, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name. kind: "weights", or "state" (optimizer and random states)."""
    path = stored.folder / stored.files[kind]
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {REMEDY}") from None


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"of shape {list(tensor.shape)}"
