"""The optimizers of a recipe: AdamW (arXiv 1711.05101), LAMB (arXiv 1904.00962) and Muon."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from hasten.distributed.placement import Placement, Replicated
from hasten.errors import ConfigError
from hasten.training.lamb import Lamb
from hasten.training.muon import Muon
from hasten.training.onebit import OneBitAdam, OneBitLamb, OneBitOptimizer
from hasten.training.parameter_groups import parameter_groups, parse_rule
from hasten.training.recipe import Optimizer, OptimizerName


def make_optimizer(model: nn.Module | Placement, settings: Optimizer, *, fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer that a recipe asks for, of a model or of what a placement has of one.

    fused: one kernel for many tensors (LAMB: operations on lists of tensors), else one tensor after the other.
    """
    placement = model if isinstance(model, Placement) else Placement(model)
    rules = [parse_rule(text) for text in settings.groups]
    groups = parameter_groups(list(placement.optimizer_params.items()), weight_decay=settings.weight_decay, rules=rules)
    groups = [group | {"lr": settings.learning_rate * group["rate_factor"]} for group in groups]
    if settings.kind == "adamw":
        return _adamw(groups, settings, fused=fused)
    if settings.kind == "lamb":
        return Lamb(groups, **_means(settings), foreach=fused, parts=placement)
    if settings.kind == "muon":
        return _muon(placement, groups, settings, fused=fused)
    if settings.kind in ("onebit-adam", "onebit-lamb"):
        return _onebit(placement, groups, settings, fused=fused)
    raise ConfigError(f"optimizer.kind is {settings.kind!r}; choose one of {', '.join(get_args(OptimizerName))}")


def adamw(model: nn.Module | Placement, settings: Optimizer, *, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW; fused: one kernel updates all parameters of a group."""
    return make_optimizer(model, replace(settings, kind="adamw"), fused=fused)


def _onebit(placement: Placement, groups: list[dict[str, Any]], settings: Optimizer, *, fused: bool) -> OneBitOptimizer:
    """1-bit Adam or LAMB; fused: their warm-up's step. Raises ConfigError unless every rank has the whole model."""
    if type(placement) is not Replicated:
        raise ConfigError(
            f"optimizer.kind {settings.kind} is for several processes that all have the whole model (parallel.zero 0): "
            "start them with torchrun or --processes"
        )
    made: OneBitOptimizer
    if settings.kind == "onebit-adam":
        made = OneBitAdam(groups, **_means(settings), fused=fused, foreach=None if fused else False)
        # AdamW's kernel would skip float16's steps by itself, and does not run any more once the variance is frozen.
        made._step_supports_amp_scaling = False
    else:
        made = OneBitLamb(groups, **_means(settings), foreach=fused)
    made.freeze_after, made.mean = settings.freeze_after, placement.one_bit_mean
    placement.averages = lambda: not made.frozen
    return made


def _muon(placement: Placement, groups: list[dict[str, Any]], settings: Optimizer, *, fused: bool) -> "Together":
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms and biases.

    Muon's step is scaled to the length of AdamW's (arXiv 2502.16982), so that one learning rate serves both.
    """
    own = {id(p) for name, p in placement.optimizer_params.items() if name.startswith("blocks.") and p.dim() == 2}

    def members(inside: bool) -> list[dict[str, Any]]:
        parts = [group | {"params": [p for p in group["params"] if (id(p) in own) == inside]} for group in groups]
        return [group for group in parts if group["params"]]

    matrices, others = members(True), members(False)
    if not matrices:
        raise ConfigError("optimizer.kind is 'muon', and the model has no matrices in `blocks` that it could update")
    chosen = {"lr": settings.learning_rate, "momentum": settings.momentum, "adjust_lr_fn": "match_rms_adamw"}
    first = Muon(matrices, parts=placement, **chosen)
    return Together([first, _adamw(others, settings, fused=fused)] if others else [first])


class Together(torch.optim.Optimizer):
    """Several optimizers, each with its own parameters, as one: their groups, their state, one step."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for member in members for group in member.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self.members = list(members)
        # The members' own groups and one state for all, so that whatever is set here is set there.
        self.param_groups = groups
        for member in members:
            member.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each."""
        assert closure is None
        for member in self.members:
            member.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of every group: the same, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def _adamw(groups: list[dict[str, Any]], settings: Optimizer, *, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, **_means(settings), fused=fused, foreach=None if fused else False)


def _means(settings: Optimizer) -> dict[str, Any]:
    """What all but Muon take."""
    betas = (settings.beta1, settings.beta2)
    return {"lr": settings.learning_rate, "betas": betas, "eps": settings.epsilon}
