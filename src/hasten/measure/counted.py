"""What a rank holds and sends, counted: bytes of weights, gradients and optimizer states, and of every collective.

Resident memory is not looked at: it has activations, buffers of a collective and whatever an allocator keeps.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# What a rank sends of N in a ring, of the bytes of the tensor that is whole; and which argument that is.
_SENT = {"allreduce_": (2, 0), "_allgather_base_": (1, 0), "_reduce_scatter_base_": (1, 1), "allgather_": (1, 0)}
SMALL = 1024  # bytes: counts of targets, norms and flags, which no formula has


class Counted(TorchDispatchMode):
    """Inside `with`: `held()` at any moment, `peak` of it over all operations, `sent` by collective, and their `order`.

    host_peak, device_peak: the same of what offload puts on the host (the optimizer's tensors; of `all`, every share
    too), and of the rest. Without an accelerator both are in one memory.

    Everything is found that is a parameter when the block is entered; so take a step before it. order: (collective,
    bytes of the whole tensor), of all that are not `SMALL`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, offload: str = "none") -> None:
        super().__init__()
        self.optimizer, self.offload = optimizer, offload
        self.sent: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []
        self.peak = self.host_peak = self.device_peak = 0
        self.parameters = [found for found in gc.get_objects() if isinstance(found, nn.Parameter)]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")
        if name[0] == "c10d" and name[2] in _SENT:
            times, place = _SENT[name[2]]
            whole = sum(_bytes(tensor) for tensor in _flat(args[place]))
            if whole > SMALL:
                at = [argument.name for argument in function._schema.arguments].index("process_group")
                count = ProcessGroup.unbox(args[at]).size()
                self.sent[name[2].strip("_")] += times * whole * (count - 1) // count
                self.order.append((name[2].strip("_"), whole))
        result = function(*args, **(kwargs or {}))
        host, everything = _storages(self._on_host()), self.held()
        self.peak = max(self.peak, everything)
        self.host_peak, self.device_peak = max(self.host_peak, host), max(self.device_peak, everything - host)
        return result

    def held(self) -> int:
        """Bytes of weights, whole or in parts, their gradients and the optimizer's states."""
        return _storages([*_with_gradients(self.parameters), *self._optimizers()])

    def _on_host(self) -> Iterator[Tensor]:
        if self.offload != "none":
            yield from self._optimizers()
        if self.offload == "all":
            yield from _with_gradients(p for p in self.parameters if hasattr(p, "_local_tensor"))

    def _optimizers(self) -> Iterator[Tensor]:
        yield from _with_gradients(p for group in self.optimizer.param_groups for p in group["params"])
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())


class Alive(TorchDispatchMode):
    """Inside `with`: `peak`, the most bytes of storages alive after any operation, those of `before` included."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for tensor in before:
            self._add(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor):
                self._add(one)
        self.found = {key: value for key, value in self.found.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.found.values()))
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.found[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())


def _with_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad


def _storages(tensors: Iterable[Tensor]) -> int:
    """Bytes, what several share once."""
    storages = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
