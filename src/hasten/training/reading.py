"""A step's loss and norm on their way to the host: asked for when the step is queued, waited for when they are read."""

import torch

from hasten.machine.host_copy import HostCopy
from hasten.training.step import StepResult


class Reading:
    """Begins the copy behind the step's own work, before any later step is queued."""

    def __init__(self, result: StepResult) -> None:
        found = torch.stack([result.loss.float(), result.gradient_norm.float()])
        self._copy = HostCopy(found)

    def values(self) -> tuple[float, float]:
        """Loss and gradient norm; waits for the step if it has not ended."""
        loss, norm = self._copy.tensor().tolist()
        return loss, norm
