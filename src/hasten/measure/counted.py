"""What a rank holds and sends, counted: bytes of weights, gradients and optimizer states, and of every collective.

Resident memory is not looked at: it has activations, buffers of a collective and whatever an allocator keeps.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Work, _resolve_process_group
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Collectives: their kind, how often a rank sends its share of the whole tensor in a ring, and which argument that is.
_KINDS = {
    "allreduce_": ("all-reduce", 2, 0),
    "_allgather_base_": ("all-gather", 1, 0),
    "allgather_": ("all-gather", 1, 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "alltoall_base_": ("all-to-all", 1, 1),
    "broadcast_": ("broadcast", 1, 0),
    "barrier": ("barrier", 0, 0),
}
# The same of operators that return their result, as tensor parallelism calls them; an all-gather is given its part.
_FUNCTIONAL = {
    "all_reduce": ("all-reduce", 2, 0),
    "all_gather_into_tensor": ("all-gather", 1, 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1, 0),
    "all_to_all_single": ("all-to-all", 1, 0),
}
SMALL = 1024  # bytes: counts of targets, norms and flags, which no formula has


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective as an operator. kind: "all-reduce". whole: bytes of the whole tensor; sent: what a rank sends of it,
    in a ring, or to each other rank what it is to have. group: the process group's name. operator: its name.
    """

    kind: str
    operator: str
    whole: int
    sent: int
    group: str


def collective_of(function: Any, args: Any) -> Collective | None:
    """The collective that an operator is; None for another operator."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return None
    space, _, name = schema.name.partition("::")
    if space == "c10d" and name in _KINDS:
        kind, times, place = _KINDS[name]
        group = ProcessGroup.unbox(args[_place(schema, "process_group")])
        whole = sum(_bytes(tensor) for tensor in _flat(args[place]))
    elif space == "_c10d_functional" and name in _FUNCTIONAL:
        kind, times, place = _FUNCTIONAL[name]
        group = _resolve_process_group(args[-1])
        whole = _bytes(args[place]) * (group.size() if kind == "all-gather" else 1)
    else:
        return None
    sent = times * whole * (group.size() - 1) // group.size()
    if name == "alltoall_base_" and sum(rows := args[_place(schema, "input_split_sizes")]):
        sent = whole * (sum(rows) - rows[group.rank()]) // sum(rows)
    return Collective(kind=kind, operator=name, whole=whole, sent=sent, group=group.group_name)


def _place(schema: Any, name: str) -> int:
    """Which argument of an operator has a name."""
    return [argument.name for argument in schema.arguments].index(name)


def wait_for(result: Any) -> None:
    """Wait for what the operator of a collective returned."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
        return
    for one in result if isinstance(result, list | tuple) else (result,):
        if isinstance(one, torch.ScriptObject):
            Work.unbox(one).wait()


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
        found = collective_of(function, args)
        if found is not None and function.namespace == "c10d" and found.whole > SMALL:
            name = found.operator.strip("_")
            self.sent[name] += found.sent
            self.order.append((name, found.whole))
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
