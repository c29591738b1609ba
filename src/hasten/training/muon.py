"""Muon (Jordan et al. 2024): updates a matrix by its momentum, with all singular values brought close to one.

PyTorch's implementation iterates in bfloat16, matrix by matrix. On processors that emulate bfloat16 this costs more
than the rest of the training step, so on a CPU ours iterates in float32. Matrices of one shape are computed together.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.distributed.whole_tensors import Parts

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic a·s + b·s³ + c·s⁵, steep at zero
ITERATIONS = 5
ADAMW_LENGTH = 0.2  # root mean square of AdamW's step, in learning rates (arXiv 2502.16982)
BATCH_ELEMENTS = 1 << 22  # elements of matrices that are stacked: 16 MiB in float32


class Muon(torch.optim.Muon):
    """PyTorch's Muon with `match_rms_adamw`: the same state and groups, with a faster step.

    parts: gathers matrices that are split over ranks by rows. The momentum is each rank's own rows; the directions are
    orthogonalized whole, with the same result on every rank.
    """

    def __init__(
        self, params: Any, *, lr: float, momentum: float = 0.95, weight_decay: float = 0.1, parts: Parts | None = None
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts = parts or Parts()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, bool], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[self.parts.shape(parameter), self.parts.divided(parameter)].append(parameter)
            for (shape, _), members in alike.items():
                count = max(1, BATCH_ELEMENTS // shape.numel())
                for start in range(0, len(members), count):
                    self._update(members[start : start + count], group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, members: Sequence[Tensor], rate: float, decay: float, momentum: float) -> None:
        steps = torch.stack([self._nesterov(parameter, momentum) for parameter in members])
        whole = orthogonal(self.parts.whole(steps, members[0]))
        directions = self.parts.part(whole, members[0])
        length = rate * ADAMW_LENGTH * math.sqrt(max(whole.shape[1:]))
        for parameter, direction in zip(members, directions, strict=True):
            parameter.mul_(1 - rate * decay).add_(direction, alpha=-length)

    def _nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        mean: Tensor = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(mean, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices (N, rows, columns) to about 0.7 to 1.2, by Newton-Schulz iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.float() if x.device.type == "cpu" else x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
