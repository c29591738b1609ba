"""What each part of a model takes in a step, forward and backward: seconds, or whatever else can be read off a counter.

A part's backward pass begins when the gradient of what it returned is there, and ends when that of what it was given
is: two hooks on tensors, which a compiled block does not see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.training.step import TrainStep


class Meter:
    """Reads `read()` around every call and around its backward pass; `forward` and `backward` are the sums by part."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read
        self.forward: dict[str, float] = defaultdict(float)
        self.backward: dict[str, float] = defaultdict(float)
        self.moved: dict[str, int] = defaultdict(int)
        self._open: dict[object, tuple[str, float]] = {}  # by call: a tensor's hooks run in the order they were made

    def wrap(self, name: str, part: Callable[..., Tensor], weights: int) -> Callable[..., Tensor]:
        """`part`, metered under a name. weights: its parameters' bytes."""

        def run(x: Tensor, *rest: Any, **options: Any) -> Tensor:
            before = self.read()
            out = part(x, *rest, **options)
            self.forward[name] += self.read() - before
            # At least: read input and weights, write the result; backward, read all three and write two gradients.
            self.moved[name] += 3 * _bytes(x) + 2 * _bytes(out) + 3 * weights
            if out.requires_grad:
                call = object()
                out.register_hook(lambda gradient: self._begin(call, name))
                if x.requires_grad:
                    x.register_hook(lambda gradient: self._end(call))
            return out

        return run

    def _begin(self, call: object, name: str) -> None:
        self._open[call] = (name, self.read())

    def _end(self, call: object) -> None:
        if call in self._open:
            name, before = self._open.pop(call)
            self.backward[name] += self.read() - before

    def finish(self) -> None:
        """The backward pass is over: end what has no gradient of its input, as an embedding of tokens."""
        for call in list(self._open):
            self._end(call)

    @property
    def total(self) -> dict[str, float]:
        """Forward and backward together, in the order of the model."""
        return {name: self.forward[name] + self.backward[name] for name in self.forward}


class _Metered(nn.Module):
    """Stands in a block's place for the while."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *given: Any, **options: Any) -> Tensor:
        return self.run(*given, **options)


@contextmanager
def metered(step: TrainStep, meter: Meter) -> Iterator[None]:
    """Meter embedding, blocks (together), norm, and head with loss, of the steps inside the block of code."""
    model, precision = step.model, step.precision
    blocks, loss, backward = model.blocks, model.loss, precision.backward

    def whole_backward(loss: Tensor) -> None:
        backward(loss)
        meter.finish()

    plain: dict[str, Any] = {"embedding": model.embedding, "norm": model.norm}
    wrapped = [_Metered(meter.wrap("blocks", block, _weights(block))) for block in blocks]
    try:
        for name, part in plain.items():
            part.forward = meter.wrap(name, part.forward, _weights(part))
        model.blocks = nn.ModuleList(wrapped)
        precision.backward = whole_backward  # type: ignore[method-assign]
        model.loss = meter.wrap("head and loss", loss, _weights(model.head))  # type: ignore[method-assign]
        yield
    finally:
        model.blocks = blocks
        del model.loss, precision.backward
        for part in plain.values():
            del part.forward


def _weights(part: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in part.parameters())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds, after everything the device was told to do."""
    import time

    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
