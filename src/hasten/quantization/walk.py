"""Calibration samples passed through a model one block at a time, and the inputs of each layer."""

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.attention import Attention, KeysValues
from hasten.model.context import training_context
from hasten.model.swap import swap_kinds
from hasten.model.transformer import Transformer
from hasten.model.wide import NARROW
from hasten.quantization.blocks import Item, Result, in_order

PASS_TOKENS = 512  # tokens of a pass, which one thread computes: enough for fast products

Call = Callable[[nn.Module], Tensor]  # runs a module, a block or an expert, on some of the calibration inputs


class CalibrationWalk:
    """The states (samples, length, C) between two blocks: embeddings first; `advance` computes the next ones.

    device: where blocks are computed, one at a time; the states stay on the model's device. spill: a file that is
    mapped to hold them instead of memory. It may exist already, and is not removed.
    """

    def __init__(
        self, model: Transformer, tokens: Tensor, *, device: torch.device | None = None, spill: Path | None = None
    ) -> None:
        self.model = model
        self.device = model.device if device is None else device
        self.dtype = computing_dtype(model, self.device)
        length = tokens.shape[1]
        positions = torch.arange(length, device=model.device).unsqueeze(0)
        self._ropes = [tuple(part.to(self.device) for part in table(positions)) for table in model.ropes]
        self._context = training_context(model, length, device=self.device)
        self.step = max(1, PASS_TOKENS // length)
        parts = (model.embed(part.to(model.device), positions).to(self.dtype) for part in tokens.split(self.step))
        if spill is None:
            self.states = torch.cat(list(parts))
        else:
            self.states = _mapped(spill, (*tokens.shape, model.config.hidden_size), self.dtype)
            for room, part in zip(self.states.split(self.step), parts, strict=True):
                room.copy_(part)
        self._tokens, self._lent = tokens.to(model.device), dict[int, KeysValues]()  # of all samples, by their layer
        self._embedded = self.states if model.token_features is None else self.states.clone()

    def here(self, module: nn.Module) -> nn.Module:
        """A module of the model, copied to the walk's device (with kernels for it) if that is another one."""
        if self.device == self.model.device:
            return module
        own = shared_copy(module, self.device)
        swap_kinds(own, NARROW)
        for layer in own.modules():
            if isinstance(layer, Attention):
                layer.bind()
        return own

    def calls(self, index: int) -> list[Call]:
        """Calls that run a block, on a few samples each."""
        layer = self.model.config.layers[index]
        rope = None if layer.rope is None else self._ropes[layer.rope]
        own = self._context.layers[index]

        def call(samples: slice) -> Call:
            return lambda block: block(self.states[samples].to(self.device), rope, own, **self._beside(index, samples))

        return [call(slice(start, start + self.step)) for start in range(0, len(self.states), self.step)]

    def advance(self, index: int, block: nn.Module) -> None:
        """Replace the states by the block's outputs. block: on the walk's device."""
        found = passes(block, self.calls(index), lambda call: call(block))
        for start, new in zip(range(0, len(self.states), self.step), found, strict=True):
            samples = slice(start, start + self.step)
            if isinstance(new, tuple):
                new, (k, v) = new
                if not start:
                    shape = (len(self.states), *k.shape[1:])
                    self._lent[index] = k.new_empty(shape), v.new_empty(shape)
                for every, own in zip(self._lent[index], (k, v), strict=True):
                    every[samples] = own
            self.states[samples] = new

    def _beside(self, index: int, samples: slice) -> dict[str, Any]:
        """What a block gets beside the states, where its model has it: see `Block.forward`."""
        found: dict[str, Any] = {}
        if self.model.token_features is not None:
            own = self.model.token_features.of_layer(index, self._tokens[samples], self._embedded[samples])
            found["features"] = own.to(self.device, self.dtype)
        if (source := self.model.config.layers[index].keys_of) is not None:
            found["shared"] = tuple(part[samples] for part in self._lent[source])
        return found

    def kept(self) -> dict[str, Tensor]:
        """What the next blocks need of those before: the states, and the keys and values that these lend."""
        lent = {f"{part}.{layer}": own[i] for layer, own in self._lent.items() for i, part in enumerate("kv")}
        return {"states": self.states} | lent

    def go_on(self, kept: Mapping[str, Tensor]) -> None:
        """Go on from what `kept` returned behind some block."""
        self.states.copy_(kept["states"])
        for layer in (int(name[2:]) for name in kept if name.startswith("k.")):
            self._lent[layer] = kept[f"k.{layer}"].to(self.device), kept[f"v.{layer}"].to(self.device)

    def whole_calls(self) -> list[Call]:
        """Calls that run the norm and the head after the last block."""

        def call(part: Tensor) -> Call:
            return lambda module: module(part.to(self.device))

        return [call(part) for part in self.states.split(self.step)]


def computing_dtype(model: Transformer, device: torch.device) -> torch.dtype:
    """The dtype in which blocks compute on a device; if copied there, that of the weights (slow on some CPUs only)."""
    return model.compute_dtype if device == model.device else model.dtype


def _mapped(file: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in a mapped file. Raises OSError if the disk is full, since a later write would kill the process."""
    count = torch.Size(shape).numel()
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, count * dtype.itemsize)
    finally:
        os.close(handle)
    return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)


def rows_calls(parts: Sequence[Tensor]) -> list[Call]:
    """Calls that run a module on rows (T, K), for experts."""
    return [partial(_call, part) for rows in parts for part in rows.split(PASS_TOKENS)]


def _call(x: Tensor, module: nn.Module) -> Tensor:
    return module(x)


def shared_copy(module: nn.Module, device: torch.device | None = None) -> Any:
    """Copy a module with shared tensors, so that its submodules can be replaced without changing the original.

    device: move the copy's tensors there instead.
    """

    def here(tensor: Tensor) -> Tensor:
        if device is None:
            return tensor
        moved = tensor.detach().to(device)
        return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved

    others = [value for own in module.modules() for value in vars(own).values() if isinstance(value, Tensor)]
    tensors = (*module.parameters(), *module.buffers(), *others)
    return copy.deepcopy(module, {id(tensor): here(tensor) for tensor in tensors})


def passes(module: nn.Module, items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
    """Yield `work(item)` for each item in order, computed on the module's device."""
    return in_order(items, work, device=next(chain(module.parameters(), module.buffers())).device)


def stages(module: nn.Module, names: Sequence[str], call: Call) -> list[list[str]]:
    """The linear layers `names` of a module in the order of its calls; layers with the same input form one stage.

    The last one is not run: the logits of a whole pass would take memory that is not planned for.
    """
    found: list[tuple[Tensor, list[str]]] = []
    left = set(names)

    def note(name: str, x: Tensor) -> None:
        if found and found[-1][0] is x:
            found[-1][1].append(name)
        else:
            found.append((x, [name]))
        left.discard(name)
        if not left:
            raise _ReachedError(x)

    with suppress(_ReachedError):
        call(_watched(module, names, note))
    return [stage for _, stage in found]


def inputs_of(module: nn.Module, name: str, calls: Sequence[Call]) -> Iterator[Tensor]:
    """Yield the inputs (T, K) of the submodule `name` in each call; nothing after it is computed."""

    def stop(_: str, x: Tensor) -> None:
        raise _ReachedError(x)

    watched = _watched(module, [name], stop)

    def inputs(call: Call) -> Tensor:
        try:
            call(watched)
        except _ReachedError as reached:
            return reached.inputs.flatten(0, -2)
        raise AssertionError(f"{name} was not called")

    return passes(module, calls, inputs)


def inputs_of_each(module: nn.Module, names: Sequence[str], calls: Sequence[Call]) -> dict[str, list[Tensor]]:
    """All inputs (T, K) of several submodules (experts); a call may reach any number of them."""
    own = threading.local()  # what the call of each thread has found
    watched = _watched(module, names, lambda name, x: own.found[name].append(x.flatten(0, -2)))

    def inputs(call: Call) -> dict[str, list[Tensor]]:
        own.found = {name: [] for name in names}
        call(watched)
        return own.found

    of_calls = list(passes(module, calls, inputs))
    return {name: [x for found in of_calls for x in found[name]] for name in names}


def _watched(module: nn.Module, names: Sequence[str], look: Callable[[str, Tensor], None]) -> nn.Module:
    """Copy a module so that `look` is called with the name and the input of each of these submodules."""
    copied = shared_copy(module)

    def hook_of(name: str) -> Callable:
        return lambda _, inputs: look(name, inputs[0])

    for name in names:
        copied.get_submodule(name).register_forward_pre_hook(hook_of(name))
    return copied


class _ReachedError(Exception):
    """Raised when a pass reaches the layer whose input is wanted."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
