"""DiLoCo (arXiv 2311.08105): every rank trains alone, and only now and then they agree on where to go on from.

    Δ = mean over ranks of (start - x)      every `sync_every` steps, in 16 or 8 bits
    m = momentum·m + Δ                      the outer step, Nesterov's
    start = start - rate·(Δ + momentum·m);  x = start

The inner optimizer and its state stay each rank's own. Δ may travel while the next steps are taken already
(`fragment_sync_delay` of them), as in arXiv 2501.18512; x is then moved to the new start, but for the share
`fragment_update_alpha` of what it is by then. The names of the options are torchft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.distributed.compressed import Code, EightBits, Errors, SixteenBits, compressed_mean, no_errors


class DiLoCo:
    """The outer optimizer of parameters that lie whole on every rank; `step` is called after each inner step.

    should_quantize: Δ in 8 bits an element, else 16.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        sync_every: int,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        assert 0 <= fragment_sync_delay < sync_every, "the recipe says so before"
        self.parameters, self.sync_every, self.delay = list(parameters), sync_every, fragment_sync_delay
        self.alpha, self.learning_rate, self.momentum = fragment_update_alpha, learning_rate, momentum
        self.code: Code = EightBits() if should_quantize else SixteenBits()
        self.steps = 0
        self.start = self._now()
        self.outer = torch.zeros_like(self.start)
        self.errors = no_errors(len(self.start), dist.get_world_size(), self.start.device)
        # A group of its own: what the inner steps tell each other must not come between.
        self._group = dist.new_group()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._mean: Future[Tensor] | None = None

    def _now(self) -> Tensor:
        return torch.cat([p.detach().flatten().float() for p in self.parameters])

    @torch.no_grad()
    def step(self) -> None:
        """After an inner step: begin to agree, or go on from what was agreed."""
        self.steps += 1
        if self.steps % self.sync_every == 0:
            delta = self.start - self._now()
            self._mean = self._thread.submit(compressed_mean, delta, self.errors, self.code, group=self._group)
        if self._mean is not None and self.steps % self.sync_every == self.delay:
            mean, self._mean = self._mean.result(), None
            self.outer.mul_(self.momentum).add_(mean)
            self.start.sub_(self.learning_rate * (mean + self.momentum * self.outer))
            parts = self.start.split([p.numel() for p in self.parameters])
            for p, part in zip(self.parameters, parts, strict=True):
                p.copy_(torch.lerp(part.view_as(p), p.float(), self.alpha))

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step depends on, of this rank; what is on its way is waited for."""
        found = {"steps": torch.tensor(self.steps), "start": self.start, "outer": self.outer}
        return found | ({} if self._mean is None else {"mean": self._mean.result()}) | self.errors.to_state()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""
        self.steps = int(state["steps"])
        self.start.copy_(state["start"])
        self.outer.copy_(state["outer"])
        self.errors = Errors.of_state(state, dist.get_world_size(), self.start.device) or self.errors
        if "mean" in state:
            self._mean = Future()
            self._mean.set_result(state["mean"].to(self.start.device))
