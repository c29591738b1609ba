"""The calibration samples on their way through a model: what a layer is given, one block in memory at a time."""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.context import training_context
from hasten.model.transformer import Transformer

BATCH_TOKENS = 2048  # of a pass: enough for products at the machine's rate

Call = Callable[[nn.Module], Tensor]  # runs a module, a block or an expert, on some of the calibration inputs
Run = Callable[..., Tensor]  # run(block, samples=…): on those samples, by their numbers


class CalibrationWalk:
    """The states (samples, length, C) between two blocks. They begin as embeddings; `advance` takes them on.

    spill: a file that holds them, mapped, instead of memory. It may be there already, and is not removed.
    """

    def __init__(self, model: Transformer, tokens: Tensor, *, spill: Path | None = None) -> None:
        self.model = model
        length = tokens.shape[1]
        positions = torch.arange(length, device=model.device).unsqueeze(0)
        self._ropes = [table(positions) for table in model.ropes]
        self._context = training_context(model, length)
        self.step = max(1, BATCH_TOKENS // length)
        parts = (model.embed(part.to(model.device), positions) for part in tokens.split(self.step))
        if spill is None:
            self.states = torch.cat(list(parts))
            return
        self.states = _mapped(spill, (*tokens.shape, model.config.hidden_size), model.compute_dtype)
        for room, part in zip(self.states.split(self.step), parts, strict=True):
            room.copy_(part)

    def run(self, index: int) -> Run:
        """What runs a block on some of the samples."""
        layer = self.model.config.layers[index]
        rope = self._ropes[layer.rope] if self._ropes else None
        own = self._context.layers[index]
        return lambda block, samples: block(self.states[samples].to(self.model.device), rope, own)

    def calls(self, index: int) -> list[Call]:
        """A block's calls, on a few samples each."""
        parts = [slice(start, start + self.step) for start in range(0, len(self.states), self.step)]
        return [partial(self.run(index), samples=part) for part in parts]

    def advance(self, index: int, block: nn.Module) -> None:
        """Replace the states by what the block makes of them."""
        for part, call in zip(self.states.split(self.step), self.calls(index), strict=True):
            part.copy_(call(block))

    def whole_calls(self) -> list[Call]:
        """The calls of what comes behind the last block: of norm and head."""

        def call(part: Tensor) -> Call:
            return lambda module: module(part.to(self.model.device))

        return [call(part) for part in self.states.split(self.step)]


def _mapped(file: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is a file. OSError where the disk has no room: later a write would end the process."""
    count = torch.Size(shape).numel()
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, count * dtype.itemsize)
    finally:
        os.close(handle)
    return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)


def rows_calls(parts: Sequence[Tensor]) -> list[Call]:
    """The calls of a module that takes rows (T, K), as an expert does."""
    return [partial(_call, part) for rows in parts for part in rows.split(BATCH_TOKENS)]


def _call(x: Tensor, module: nn.Module) -> Tensor:
    return module(x)


def shared_copy(module: nn.Module) -> Any:
    """A module whose submodules can be replaced without changing the original; parameters and buffers are shared."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


@contextmanager
def _before(module: nn.Module, names: Sequence[str], look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """For the while, `look` is called with the name and the input of each of these submodules before it runs."""

    def hook_of(name: str) -> Callable:
        return lambda _, inputs: look(name, inputs[0])

    hooks = [module.get_submodule(name).register_forward_pre_hook(hook_of(name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stages(module: nn.Module, names: Sequence[str], call: Call) -> list[list[str]]:
    """The linear layers `names` of a module in the order in which it calls them; together, where they get one input."""
    found: list[tuple[Tensor, list[str]]] = []

    def note(name: str, x: Tensor) -> None:
        if found and found[-1][0] is x:
            found[-1][1].append(name)
        else:
            found.append((x, [name]))

    with _before(module, names, note):
        call(module)
    return [together for _, together in found]


def inputs_of(module: nn.Module, name: str, calls: Sequence[Call]) -> Iterator[Tensor]:
    """What the submodule `name` is given, (T, K) for each call; nothing behind it is computed."""

    def stop(_: str, x: Tensor) -> None:
        raise _ReachedError(x)

    for call in calls:
        try:
            with _before(module, [name], stop):  # for each call: who stops asking must leave no hook behind
                call(module)
        except _ReachedError as reached:
            found = reached.inputs.flatten(0, -2)
        yield found


def inputs_of_each(module: nn.Module, names: Sequence[str], calls: Sequence[Call]) -> dict[str, list[Tensor]]:
    """All inputs (T, K) of several submodules, of which a call may reach any number (experts)."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    with _before(module, names, lambda name, x: found[name].append(x.flatten(0, -2))):
        for call in calls:
            call(module)
    return found


class _ReachedError(Exception):
    """A pass has come to the layer whose input is wanted."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
