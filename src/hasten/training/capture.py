"""A training step captured as CUDA graphs: forward and backward of a micro-batch, and the update, replayed.

The first step of each run runs uncaptured, which compiles; then the same functions are captured. A step then copies its
batch and a few numbers (learning rate, AdamW's corrections) to fixed addresses and launches one graph, or, with several
micro-batches, one graph for each and one for the update. Nothing waits for the GPU: losses and norms stay on the device
until the caller reads them.

Captured and uncaptured steps run the same functions; a step whose rows have another size runs uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.data import Batch
from hasten.machine.cuda_graphs import capture_graph
from hasten.machine.host_copy import HostCopy
from hasten.ops.loss import IGNORED
from hasten.training.checkpoint_state import RandomState
from hasten.training.step import StepResult, TrainStep, set_learning_rate
from hasten.training.update import Update
from hasten.training.whole import WholeModel

Replay = Callable[[], None]


@dataclass
class _Buffers:
    """Tensors that a graph of one size reads. tokens: (2, B, T) int64, inputs and targets."""

    tokens: Tensor
    positions: Tensor
    context: Any


@dataclass(eq=False)
class CapturedStep(TrainStep):
    """A step with fixed shapes, captured as CUDA graphs.

    whole: the model as one function, which is also `where.module`. copies: keep 16-bit copies of the weights. kernel:
    name of the update's kernel ("triton", "torch"; None: the first that fits). captures: False runs the same functions
    uncaptured.
    """

    whole: WholeModel | None = None
    copies: bool = True
    kernel: str | None = None
    captures: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.capture: Callable[[Callable[[], Any], Any], tuple[Replay, Any]] = capture_graph
        self.updater: Update | None = None
        self.steps_run = 0

    @property
    def reads_late(self) -> bool:
        return True

    def prepare(self, accumulates: bool) -> None:
        """Create weight copies, optimizer state, tables and gradient sums for the current weights."""
        assert self.whole is not None
        assert isinstance(self.optimizer, torch.optim.AdamW)
        self.whole.copies = None
        if self.copies:
            self.whole.copies = self.whole.make_copies()
        kept = self.whole.copies
        self.leaves = list(self.parameters) if kept is None else kept.leaves(self.parameters)
        self.updater = Update(self.optimizer, self.parameters, clip=self.clip, copies=kept, kernel=self.kernel)
        zero = torch.zeros((), device=self.device)
        self.total, self.norm, self.count = zero.clone(), zero.clone(), zero.clone().long()
        # Sums over micro-batches; the gradients of a single one are read in place.
        self.sums = [torch.zeros_like(one, dtype=torch.float32) for one in self.leaves] if accumulates else None
        self.replays: dict[str, Replay] = {}
        self.buffers: _Buffers | None = None
        self.pool: Any = None
        self.steps_run = 0

    def run(
        self,
        batches: Sequence[Batch],
        *,
        learning_rate: float | None = None,
        block_scales: Sequence[Sequence[float]] | None = None,
    ) -> StepResult | None:
        """Run a step like `TrainStep.run`; block_scales must be None."""
        assert block_scales is None
        assert self.whole is not None
        if learning_rate is not None:
            set_learning_rate(self.optimizer, learning_rate)
        self.train_mode()
        accumulates = len(batches) > 1
        if self.updater is None or not self.updater.current() or (self.sums is not None) != accumulates:
            self.prepare(accumulates)
        shape = batches[0].inputs.shape
        if self.buffers is None:
            self.buffers = self._buffers(shape)
        same = all(batch.inputs.shape == self.buffers.tokens.shape[1:] for batch in batches)
        if self.should_stop():
            return None
        self._send_counts(batches)
        if same and self.captures and self.steps_run:
            if not self.replays:
                self._capture(accumulates)
            if not self._replay(batches):
                return None
        elif not self._plain(batches, accumulates):
            return None
        self.steps_run += 1
        tokens = sum(batch.inputs.numel() for batch in batches)
        found = torch.stack([self.total, self.norm])
        return StepResult(
            loss=found[0],
            gradient_norm=found[1],
            tokens=tokens,
            targets=self.count.clone(),
            copy=HostCopy(found),
        )

    def _replay(self, batches: Sequence[Batch]) -> bool:
        """Replay the graphs; False if the step was stopped."""
        assert self.updater is not None
        assert self.buffers is not None
        for number, batch in enumerate(batches):
            if number and self.should_stop():
                return False  # the next step's first micro-batch overwrites sums and loss
            self._send(batch, self.buffers)
            if number + 1 == len(batches):
                self._send_scalars()
            self.replays["micro" if number else "first"]()
        if "update" in self.replays:
            self.replays["update"]()
        return True

    def _plain(self, batches: Sequence[Batch], accumulates: bool) -> bool:
        """Run the same functions without graphs; False if the step was stopped."""
        assert self.buffers is not None
        for number, batch in enumerate(batches):
            if number and self.should_stop():
                return False  # the next step's first micro-batch overwrites sums and loss
            buffers = self.buffers
            if batch.inputs.shape != buffers.tokens.shape[1:]:
                buffers = self._buffers(batch.inputs.shape)
            self._send(batch, buffers)
            gradients = self._micro(buffers, first=number == 0)
        self._send_scalars()
        self._update(self.sums if accumulates else gradients)
        return True

    def _capture(self, accumulates: bool) -> None:
        assert self.updater is not None
        assert self.buffers is not None
        buffers = self.buffers
        random = RandomState.capture(self.device)
        if accumulates:
            self._take("first", lambda: self._micro(buffers, first=True))
            self._take("micro", lambda: self._micro(buffers, first=False))
            self._take("update", lambda: self._update(self.sums))
        else:
            self._take("first", lambda: self._update(self._micro(buffers, first=True)))
        random.restore(self.device)

    def _take(self, name: str, run: Callable[[], Any]) -> None:
        with torch.cuda.device_of(self.total):
            self.replays[name], self.pool = self.capture(run, self.pool)
        assert self.updater is not None
        self.updater.flush()

    def _micro(self, buffers: _Buffers, *, first: bool) -> list[Tensor] | None:
        """Run forward and backward; returns the gradients of the leaves, or None if they were added to the sums."""
        share = 1.0 / self.count.clamp(min=1).float()
        with self.precision.autocast():
            inputs, targets = buffers.tokens[0], buffers.tokens[1]
            loss = self.where.module(inputs, buffers.positions, buffers.context, targets=targets, share=share)
        found = list(torch.autograd.grad(loss, self.leaves))
        with torch.no_grad():
            self.total.copy_(loss.detach()) if first else self.total.add_(loss.detach())
            if self.sums is None:
                return found
            for total, gradient in zip(self.sums, found, strict=True):
                total.copy_(gradient) if first else total.add_(gradient)
        return None

    def _update(self, found: list[Tensor] | None) -> None:
        assert self.updater is not None
        assert found is not None
        assert self.whole is not None
        gradients = found
        if self.whole.copies is not None:
            gradients = self.whole.copies.gradients(self.parameters, dict(zip(self.leaves, found, strict=True)))
        self.norm.copy_(self.updater.run(gradients))

    def _buffers(self, shape: torch.Size) -> _Buffers:
        tokens = torch.zeros((2, *shape), dtype=torch.int64, device=self.device)
        positions = torch.arange(shape[1], device=self.device).unsqueeze(0)
        return _Buffers(tokens, positions, self.contexts.of(shape[1]))

    def _send(self, batch: Batch, buffers: _Buffers) -> None:
        """Copy a batch to the graph's buffers, after the work that is queued."""
        if batch.inputs.device.type == self.device.type != "cpu":
            buffers.tokens[0].copy_(batch.inputs)
            buffers.tokens[1].copy_(batch.targets)
            return
        packed = torch.empty(buffers.tokens.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        packed[0].copy_(batch.inputs)
        packed[1].copy_(batch.targets)
        buffers.tokens.copy_(packed, non_blocking=True)

    def _send_counts(self, batches: Sequence[Batch]) -> None:
        """Copy the step's number of targets to the device."""
        counted = (batches[0].targets != IGNORED).sum()
        for batch in batches[1:]:
            counted = counted + (batch.targets != IGNORED).sum()
        self.count.copy_(self._pinned(counted), non_blocking=True)

    def _send_scalars(self) -> None:
        """Copy the update's numbers to the device."""
        assert self.updater is not None
        numbers = torch.tensor(self.updater.next_scalars(), dtype=torch.float32)
        self.updater.scalars.copy_(self._pinned(numbers), non_blocking=True)

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" and tensor.device.type == "cpu" else tensor
