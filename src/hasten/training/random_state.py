"""The states of the random number generators: what makes dropout go on exactly where it was."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """torch's generators as uint8 tensors (cuda: of the model's device, or None), Python's as `setstate` takes it."""

    cpu: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        """The states now."""
        return cls(
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            python=random.getstate(),
        )

    def restore(self, device: torch.device) -> None:
        """Go on from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        random.setstate(self.python)
