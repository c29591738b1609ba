"""1-bit Adam (arXiv 2102.02888) and 1-bit LAMB (arXiv 2104.06069): after a warm-up only signs of the momentum are sent.

Warm-up: AdamW or LAMB on gradients averaged over all ranks. Then the variance v is frozen, gradients stay on their
ranks, and the momentum is averaged over ranks with one bit an element (`compressed_mean`):

    m = mean over ranks of (β1·m + (1-β1)·g), sent as m/(√v + ε)
    Adam:  x = x - rate·(m̂/(√v̂ + ε) + decay·x)
    LAMB:  u = m̂/(√v̂ + ε) + decay·x;  x = x - rate·c̄·f·u

LAMB's step length c = ‖x‖/‖u‖ is averaged in the warm-up (c̄) and corrected by f: by how far the variance of the
gradients that the momentum implies, ĝ = (m - β1·m_before)/(1-β1), has moved from the frozen one.

Two things differ from the papers, whose warm-ups are long. One bit has one size for all elements, so momenta are sent
in units of their steps, and LAMB's tensors are scaled to one size too: the compression error is then a small part of
every step, instead of many steps of a rare token's row. And a frozen variance is at least a tenth of its tensor's mean:
otherwise a token hardly seen in the warm-up would move far at each gradient for the rest of the run.
Elements whose variance is zero at the freeze (padded rows of a vocabulary) never move and are not sent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hasten.training.lamb import Lamb

STEADY = 0.96  # ratio of the variance's sums, 1/(1-β2) steps apart, from which on the variance is frozen
_LEAST = 0.1  # least frozen variance that is not zero, as a share of its tensor's mean
_MEAN = 0.9  # decay of the running mean c̄ in the warm-up
_FACTORS = (0.5, 4.0)  # smallest and largest f
_CHANGE = 0.1  # largest relative change of f from one step to the next


class OneBitOptimizer(torch.optim.Optimizer):
    """Base of both optimizers, mixed into AdamW and Lamb, whose step is used in the warm-up, bit for bit.

    Gradients must be averages over ranks until `frozen`, and each rank's own afterwards. Further state per parameter:
    frozen_at (0-dim; 0: not yet), mark (0-dim; the sum of its variance when last checked).
    """

    freeze_after: int | None = None
    """Steps of warm-up; None: until the sum of the variance is steady."""
    mean: Callable[[Tensor, Tensor], Tensor]
    """Function (x, kept) -> mean of x (n,) over ranks, one bit an element. kept (n,) bool: elements not always zero."""

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over, so that the next gradients must not be averaged."""
        return any("frozen_at" in state and state["frozen_at"] > 0 for state in self.state.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter; once frozen, a missing gradient counts as zero."""
        assert closure is None
        if not self.frozen:
            super().step()
            if self._is_time():
                self._freeze(self._members())
            return
        self._agree()
        for p, group in self._members():
            self._update(p, self.state[p], group)

    def _members(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """(parameter, group) of the parameters that had gradients in the warm-up; others never move."""
        return [(p, group) for group in self.param_groups for p in group["params"] if self.state[p]]

    def _agree(self) -> None:
        """Replace the momenta by their means over all ranks."""
        parts, scalings, kept = [], [], []
        for p, group in self._members():
            state, beta1 = self.state[p], group["betas"][0]
            state["step"] = state["step"] + 1
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            moved = torch.lerp(state["exp_avg"], gradient.to(state["exp_avg"].dtype), 1 - beta1)
            scalings.append(self._scaling(state, group))
            parts.append((moved * scalings[-1]).flatten().float())
            kept.append((state["exp_avg_sq"] > 0).flatten())
        mean = self.mean(torch.cat(parts), torch.cat(kept))
        means = mean.split([len(part) for part in parts])
        for (p, _), part, scaling in zip(self._members(), means, scalings, strict=True):
            state = self.state[p]
            self._take(state, (part.view_as(p) / scaling).to(state["exp_avg"].dtype))

    def _is_time(self) -> bool:
        """Whether to freeze the variance after this step."""
        members = self._members()
        step = max((int(self.state[p]["step"]) for p, _ in members), default=0)
        if self.freeze_after is not None:
            return step >= self.freeze_after
        beta2 = self.param_groups[0]["betas"][1]
        every = round(1 / (1 - beta2))
        if not step or step % every:
            return False
        # Corrected for the bias of its start at zero, which would look like change.
        now = torch.stack([self.state[p]["exp_avg_sq"].float().sum() for p, _ in members]).cpu() / (1 - beta2**step)
        before = sum(float(self.state[p].get("mark", 0.0)) for p, _ in members)
        for (p, _), mark in zip(members, now, strict=True):
            self.state[p]["mark"] = mark.clone()
        return before > 0 and STEADY * float(now.sum()) <= before <= float(now.sum()) / STEADY

    def _freeze(self, members: list[tuple[Tensor, dict[str, Any]]]) -> None:
        for p, _ in members:
            state, v = self.state[p], self.state[p]["exp_avg_sq"]
            state["frozen_at"] = state["step"].clone()
            v.copy_(torch.where(v > 0, v.clamp(min=_LEAST * v.mean()), v))

    def _scaling(self, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """Factor on a momentum that is sent."""
        return 1 / (state["exp_avg_sq"].float().sqrt() + group["eps"])

    def _take(self, state: dict[str, Tensor], mean: Tensor) -> None:
        state["exp_avg"] = mean

    def _update(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Move a parameter by its momentum."""
        raise NotImplementedError

    def _direction(self, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """m̂/(√v̂ + ε), both corrected for the bias of their start at zero."""
        beta1, beta2 = group["betas"]
        v = state["exp_avg_sq"] / (1 - beta2 ** float(state["frozen_at"]))
        return state["exp_avg"] / (1 - beta1 ** float(state["step"])) / (v.sqrt_() + group["eps"])


class OneBitAdam(OneBitOptimizer, torch.optim.AdamW):
    """AdamW whose variance is frozen after the warm-up."""

    def _update(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(self._direction(state, group).to(p.dtype), alpha=-group["lr"])


class OneBitLamb(OneBitOptimizer, Lamb):
    """LAMB whose variance is frozen after the warm-up.

    Further state per parameter: mean_length (c̄), factor (f), scaling (0-dim), fresh (the variance of ĝ).
    """

    def _lengths(self, parameters: list[Tensor], lengths: Tensor) -> None:
        for p, c in zip(parameters, lengths, strict=True):
            mean = self.state[p].get("mean_length", c)
            self.state[p]["mean_length"] = _MEAN * mean + (1 - _MEAN) * c

    def _freeze(self, members: list[tuple[Tensor, dict[str, Any]]]) -> None:
        super()._freeze(members)
        steps = (self.state[p]["exp_avg"].float() * self._scaling(self.state[p], group) for p, group in members)
        sizes = torch.stack([step.square().mean().sqrt() for step in steps])  # computed before any scaling exists
        for (p, _), size in zip(members, sizes, strict=True):
            state = self.state[p]
            state["fresh"], state["factor"] = state["exp_avg_sq"].clone(), torch.ones_like(size)
            state["scaling"] = sizes.mean() / size if size > 0 else torch.ones_like(size)

    def _scaling(self, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        return super()._scaling(state, group).mul_(state.get("scaling", 1.0))

    def _take(self, state: dict[str, Tensor], mean: Tensor) -> None:
        state["before"], state["exp_avg"] = state["exp_avg"], mean

    def _update(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        implied = (state["exp_avg"] - beta1 * state.pop("before")) / (1 - beta1)
        state["fresh"].mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        moving = state["exp_avg_sq"] > 0
        ratio = (state["exp_avg_sq"].sqrt() + group["eps"]) / (state["fresh"].sqrt() + group["eps"])
        f = torch.where(moving, ratio, 0).max()
        direction = self._direction(state, group)
        u = direction.add(p, alpha=group["weight_decay"])
        if group["weight_decay"]:
            share = (direction.norm() / u.norm().clamp(min=1e-38)).clamp(max=1)
            f = f * share + 1 - share
        last = state["factor"]
        state["factor"] = f = f.clamp(*_FACTORS).clamp((1 - _CHANGE) * last, (1 + _CHANGE) * last)
        p.add_((state["mean_length"] * f * u).to(p.dtype), alpha=-group["lr"])
