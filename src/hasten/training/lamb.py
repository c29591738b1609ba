"""LAMB (arXiv 1904.00962): Adam's direction, with a step for each tensor proportional to the tensor's norm.

    m = β1·m + (1-β1)·g          v = β2·v + (1-β2)·g²
    u = m̂/(√v̂ + ε) + decay·x     m̂, v̂: corrected for the bias of their start at zero
    x = x - rate·c·u              c = ‖x‖/‖u‖, clamped to two bounds; 1 if one of the norms is zero

So large batches can be trained with large rates: no tensor moves by more than a fraction of itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hasten.distributed.whole_tensors import Parts

BOUNDS = (0.01, 10.0)


class Lamb(torch.optim.Optimizer):
    """The LAMB optimizer.

    bounds: smallest and largest c. foreach: a few operations on lists of tensors; False: one tensor after the other,
    the reference. parts: computes the norms of whole tensors. State per parameter: exp_avg, exp_avg_sq (like the
    parameter), step (0-dim).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bounds: tuple[float, float] = BOUNDS,
        foreach: bool = True,
        parts: Parts | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bounds": bounds})
        self.foreach = foreach
        self.parts = parts or Parts()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            for p in trained:
                self._begin(p)
            update = _many if self.foreach else _one_by_one
            self._lengths(trained, update(trained, [self.state[p] for p in trained], group, self.parts))

    def _lengths(self, parameters: list[Tensor], lengths: Tensor) -> None:
        """Receive c of each updated parameter; a subclass may use it."""

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        # On the host, even if a checkpoint was loaded to a device: computing the corrections must not wait for it.
        state["step"] = state["step"].cpu() + 1


def _corrections(states: list[dict[str, Tensor]], beta: float) -> list[float]:
    return [1 - beta ** float(state["step"]) for state in states]


def _one_by_one(trained: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any], parts: Parts) -> Tensor:
    beta1, beta2 = group["betas"]
    low, high = group["bounds"]
    found = []
    for x, state in zip(trained, states, strict=True):
        assert x.grad is not None
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.copy_(beta1 * m + (1 - beta1) * x.grad)
        v.copy_(beta2 * v + (1 - beta2) * x.grad.square())
        m_hat = m / (1 - beta1 ** float(state["step"]))
        v_hat = v / (1 - beta2 ** float(state["step"]))
        u = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * x
        size, length = parts.norms([x, u], [x, x])
        c = torch.where((size > 0) & (length > 0), (size / length).clamp(low, high), 1.0)
        x -= group["lr"] * c * u
        found.append(c)
    return torch.stack(found)


def _many(trained: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any], parts: Parts) -> Tensor:
    beta1, beta2 = group["betas"]
    low, high = group["bounds"]
    gradients = [x.grad for x in trained if x.grad is not None]
    m, v = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
    torch._foreach_lerp_(m, gradients, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(torch._foreach_div(v, _corrections(states, beta2)))
    torch._foreach_add_(denominators, group["eps"])
    u = torch._foreach_div(m, _corrections(states, beta1))
    torch._foreach_div_(u, denominators)
    if group["weight_decay"]:
        torch._foreach_add_(u, trained, alpha=group["weight_decay"])
    sizes, lengths = parts.norms([*trained, *u], trained * 2).chunk(2)
    c = torch.where((sizes > 0) & (lengths > 0), (sizes / lengths).clamp(low, high), 1.0)
    torch._foreach_mul_(u, list(c.unbind()))
    torch._foreach_add_(trained, u, alpha=-group["lr"])
    return c
