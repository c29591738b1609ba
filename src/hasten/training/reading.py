"""A step's loss and norm on their way to the host: asked for when the step is queued, waited for when they are read."""

import torch
from torch import Tensor

from hasten.training.step import StepResult


class Reading:
    """Begins the copy behind the step's own work, before any later step is queued."""

    def __init__(self, result: StepResult) -> None:
        found = torch.stack([result.loss.float(), result.gradient_norm.float()])
        self._event: torch.cuda.Event | None = None
        self._host: Tensor = found
        if found.is_cuda:
            self._host = torch.empty(2, pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> tuple[float, float]:
        """Loss and gradient norm; waits for the step if it has not ended."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm = self._host.tolist()
        return loss, norm
