"""One training step: forward and backward of every micro-batch, clipping, the update. Nothing here waits for a device.

The losses of the micro-batches are summed and divided by the number of targets in the whole step, so that a step of
4 x 8 rows equals a step of 32 rows, whatever is masked in each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from hasten.data import Batch
from hasten.distributed.placement import Placement
from hasten.machine.contention import context_of_steps
from hasten.machine.host_copy import HostCopy
from hasten.model.context import TrainingContexts
from hasten.model.transformer import Transformer
from hasten.ops.loss import IGNORED
from hasten.training.precision import Precision
from hasten.training.teacher import Teacher

__all__ = ["IGNORED", "StepResult", "TrainStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step, on the model's device.

    loss: mean over the targets (nats), 0-dim float32. gradient_norm: before clipping, 0-dim float32. tokens: number of
    input tokens. targets: number of predicted tokens, 0-dim int64. copy: (loss, gradient norm) on their way to the
    host, for a step that is read after later ones are queued.
    """

    loss: Tensor
    gradient_norm: Tensor
    tokens: int
    targets: Tensor
    copy: HostCopy | None = None

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm; waits for the step."""
        if self.copy is None:
            return self.loss.item(), self.gradient_norm.item()
        loss, norm = self.copy.tensor().tolist()
        return loss, norm


@dataclass(eq=False)
class TrainStep:
    """The training step of one model with one optimizer.

    clip: maximum gradient norm, None for no clipping. separate_documents: attention stays inside the documents that
    `Batch.documents` numbers. should_stop: called before each micro-batch. placement: where weights, gradients and
    optimizer states are (None: in this process); each rank trains on its own rows, and results cover all ranks.
    teacher: `run` trains on its probabilities instead of the next tokens. how: how the step is compiled, for the log.
    shares_cores: run on fewer threads while other programs take cores away; the last bits depend on their number.
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
    shares_cores: bool = False

    def __post_init__(self) -> None:
        self.where = Placement(self.model) if self.placement is None else self.placement
        self.ranks, self.device = self.where.ranks, self.precision.device
        self.parameters = list(self.where.optimizer_params.values())
        self.contexts = TrainingContexts(self.model)
        self.cores = context_of_steps(shares_cores=self.shares_cores)  # to run steps in, and to validate in

    @property
    def reads_late(self) -> bool:
        """Whether `run` only queues the step, so that its result should be read after the next one is queued."""
        return False

    def run(
        self,
        batches: Sequence[Batch],
        *,
        learning_rate: float | None = None,
        block_scales: Sequence[Sequence[float]] | None = None,
    ) -> StepResult | None:
        """Train on micro-batches with inputs and targets (B, T) int64, on any device; leaves the model in train mode.

        learning_rate: None leaves the optimizer's. block_scales: for each micro-batch, a factor of each block, 0 to
        skip it (layer dropping); a block skipped in all of them gets no gradient and is not updated. Returns None,
        with the weights unchanged, if `should_stop` returned True.
        """
        with self.cores():
            return self._run(batches, learning_rate, block_scales)

    def _run(
        self,
        batches: Sequence[Batch],
        learning_rate: float | None,
        block_scales: Sequence[Sequence[float]] | None,
    ) -> StepResult | None:
        if learning_rate is not None:
            set_learning_rate(self.optimizer, learning_rate)
        self.train_mode()
        device = self.device
        targets = self.ranks.sum(torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).sum()).to(device)
        # A step without targets has loss 0, not 0/0. Gradients are averaged over ranks, but their sum is needed.
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

    def train_mode(self) -> None:
        """Set the model to training mode, if it is not, or never was. Raises ConfigError for a fused model."""
        if not self.model.training or not self.model.was_trained:
            self.model.train()

    def update(self) -> Tensor:
        """Clip the gradients, update the weights, and drop the gradients; returns their norm before clipping."""
        self.where.collect()
        self.precision.unscale(self.optimizer, self.ranks)
        held: dict[Tensor, Tensor] = {p: p.grad for p in self.parameters if p.grad is not None}
        norm = self.where.gradient_norm(held)
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.precision.step(self.optimizer)
        self.where.zero_grad()
        self.where.copy_to_model()
        return norm

    def loss(
        self, batch: Batch, *, block_scales: Sequence[float] | None = None, teacher: Teacher | None = None
    ) -> Tensor:
        """Sum of the token losses of a batch on the model's device (nats, float32 scalar).

        teacher: sum of the divergences from its probabilities instead.
        """
        tokens = batch.inputs.shape[1]
        documents = batch.documents if self.separate_documents else None
        context = self.contexts.of(tokens, documents)
        # (1, T) instead of (B, T): the rotary table is the same for every row, and is made once.
        positions = torch.arange(tokens, device=batch.inputs.device).unsqueeze(0)
        with self.precision.autocast():
            targets = batch.targets if teacher is None else teacher.soft_targets(batch, positions, documents)
            return self.where.module(batch.inputs, positions, context, targets=targets, block_scales=block_scales)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's learning rate to `rate` times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)
