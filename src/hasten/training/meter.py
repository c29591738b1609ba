"""What each part of a training step takes: seconds, or whatever else can be read off a counter.

A step is cut at the tensors that go from one part to the next. Forward, hooks on modules say when such a tensor is
there; backward, a hook on the tensor says when its gradient is. A compiled block sees none of them.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hasten.data import Batch
from hasten.training.step import TrainStep

PARTS = ("embedding", "blocks", "norm", "head and loss", "update", "between")


class MeteredStep(TrainStep):
    """Another training step of the same model, whose parts are metered inside `with`.

    read: what is metered, a number that only grows. spent: its growth in each part. moved: the bytes that each part of
    the model has to move at the least. Both are sums over all steps.
    """

    def __init__(self, step: TrainStep, read: Callable[[], float]) -> None:
        super().__init__(
            step.model,
            step.optimizer,
            step.precision,
            clip=step.clip,
            separate_documents=step.separate_documents,
            placement=step.where,
        )
        self.read = read
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.moved = dict.fromkeys(PARTS, 0.0)
        model = step.model
        modules = (model.embedding, model.blocks, model.norm, model.head)
        self._weights = {
            part: sum(map(_bytes, module.parameters())) for part, module in zip(PARTS[:4], modules, strict=True)
        }
        self._part = "between"

    def __enter__(self) -> Self:
        model = self.model
        self._hooks = [
            model.register_forward_pre_hook(lambda _, given: self._pass(given[0], "between", "embedding")),
            model.dropout.register_forward_hook(lambda _, given, x: self._pass(x, "embedding", "blocks")),
            model.norm.register_forward_pre_hook(lambda _, given: self._pass(given[0], "blocks", "norm")),
            model.norm.register_forward_hook(lambda _, given, x: self._pass(x, "norm", "head and loss")),
            model.register_forward_hook(lambda _, given, loss: self._pass(loss, "head and loss", "between")),
        ]
        self._since = self.read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._enter("between")
        for hook in self._hooks:
            hook.remove()

    def loss(self, batch: Batch, *, block_scales: Sequence[float] | None = None) -> Tensor:
        self._enter("between")  # the backward pass of the micro-batch before is over
        return super().loss(batch, block_scales=block_scales)

    def update(self) -> Tensor:
        self._enter("update")
        norm = super().update()
        self._enter("between")
        return norm

    def _enter(self, part: str) -> None:
        now = self.read()
        self.spent[self._part] += now - self._since
        self._part, self._since = part, now

    def _pass(self, tensor: Tensor, before: str, after: str) -> None:
        """A part hands `tensor` over to the next; in the backward pass its gradient goes the other way."""
        self._enter(after)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._enter(before))
        # One part writes the tensor and reads its gradient. The other reads it twice and writes its gradient.
        if before != "between":
            self.moved[before] += 2 * _bytes(tensor)
        if after != "between":
            self.moved[after] += 3 * (_bytes(tensor) + self._weights[after])
        if after == "blocks":  # the same from block to block
            self.moved["blocks"] += 5 * _bytes(tensor) * (len(self.model.blocks) - 1)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds, after everything the device was told to do."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
