"""One training step: forward and backward of every micro-batch, clipping, the update. Nothing here waits for a device.

The losses of the micro-batches are summed and divided by the number of targets of the whole step, so that a step of
4 x 8 rows equals a step of 32 rows, whatever is masked in each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from hasten.data import Batch
from hasten.distributed.placement import Placement
from hasten.model.context import TrainingContexts
from hasten.model.transformer import Transformer
from hasten.ops.loss import IGNORED
from hasten.training.optimizers import set_learning_rate
from hasten.training.precision import Precision
from hasten.training.teacher import Teacher

__all__ = ["IGNORED", "StepResult", "TrainStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """loss: mean over the targets (nats); gradient_norm: before clipping; both 0-dim float32 on the model's device.

    tokens: input tokens of the step. targets: 0-dim int64, how many of them were predicted.
    """

    loss: Tensor
    gradient_norm: Tensor
    tokens: int
    targets: Tensor


@dataclass(eq=False)
class TrainStep:
    """The step of one model with one optimizer.

    clip: the largest gradient norm, None for no clipping. separate_documents: attention stays inside the documents that
    `Batch.documents` numbers. should_stop: asked between micro-batches. placement: where weights, gradients and states
    are (None: here); of several ranks each has its own rows, and what is counted is everybody's. teacher: whose
    probabilities `run` trains on, instead of on the next tokens. how: how it is compiled, in words for the run's log.
    """

    model: Transformer
    optimizer: torch.optim.Optimizer
    precision: Precision
    _: KW_ONLY
    clip: float | None = 1.0
    separate_documents: bool = False
    should_stop: Callable[[], bool] = lambda: False
    placement: Placement | None = None
    teacher: Teacher | None = None
    how: str = ""

    def __post_init__(self) -> None:
        self.where = Placement(self.model) if self.placement is None else self.placement
        self.ranks, self.device = self.where.ranks, self.precision.device
        self.parameters = list(self.where.optimizer_params.values())
        self.contexts = TrainingContexts(self.model)

    @property
    def reads_late(self) -> bool:
        """Whether `run` only queues a step, so that its result is best read when another one is queued."""
        return False

    def run(
        self,
        batches: Sequence[Batch],
        *,
        learning_rate: float | None = None,
        block_scales: Sequence[Sequence[float]] | None = None,
    ) -> StepResult | None:
        """Train on the micro-batches, on any device, inputs and targets (B, T) int64; the model is left in train mode.

        learning_rate: set it first (None: as it is). block_scales: for each micro-batch (layer dropping). A block left
        out of all of them has no gradient, and the optimizer leaves it as it is. Returns None, with the weights
        untouched, if `should_stop` said so.
        """
        if learning_rate is not None:
            set_learning_rate(self.optimizer, learning_rate)
        self.model.train()
        device = self.device
        targets = self.ranks.sum(torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).sum()).to(device)
        # A step without any target has the loss 0, not 0/0. The ranks' gradients are averaged; their sum is meant.
        share = self.ranks.size / targets.clamp(min=1).float()
        total = torch.zeros((), device=device)
        for number, batch in enumerate(batches):
            if self.should_stop():
                self.where.zero_grad()
                return None
            self.where.micro_batch(last=number == len(batches) - 1)
            own = None if block_scales is None else block_scales[number]
            loss = self.loss(batch.to(device, non_blocking=True), block_scales=own, teacher=self.teacher) * share
            self.precision.backward(loss)
            total += loss.detach()
        norm = self.update()
        tokens = sum(batch.inputs.numel() for batch in batches) * self.ranks.readers
        return StepResult(
            loss=self.ranks.sum(total) / self.ranks.size, gradient_norm=norm, tokens=tokens, targets=targets
        )

    def update(self) -> Tensor:
        """Clip the gradients, take the optimizer's step, and forget them; returns their norm before clipping."""
        self.where.collect()
        self.precision.unscale(self.optimizer, self.ranks)
        held = {p: p.grad for p in self.parameters if p.grad is not None}
        norm = torch.linalg.vector_norm(self.where.norms(list(held.values()), list(held)))
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.precision.step(self.optimizer)
        self.where.zero_grad()
        self.where.copy_to_model()
        return norm

    def loss(
        self, batch: Batch, *, block_scales: Sequence[float] | None = None, teacher: Teacher | None = None
    ) -> Tensor:
        """The sum of the token losses of a batch on the model's device: float32 scalar, nats.

        teacher: of the divergences from its probabilities instead.
        """
        tokens = batch.inputs.shape[1]
        documents = batch.documents if self.separate_documents else None
        context = self.contexts.of(tokens, documents)
        # (1, T) instead of (B, T): the rotary table is the same for every row, and is made once.
        positions = torch.arange(tokens, device=batch.inputs.device).unsqueeze(0)
        with self.precision.autocast():
            targets = batch.targets if teacher is None else teacher.soft_targets(batch, positions, documents)
            return self.where.module(batch.inputs, positions, context, targets=targets, block_scales=block_scales)
