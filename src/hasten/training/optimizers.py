"""The optimizers of a recipe: AdamW (arXiv 1711.05101), LAMB (arXiv 1904.00962) and Muon."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import nn

from hasten.distributed.placement import Placement, Replicated
from hasten.errors import ConfigError
from hasten.training.lamb import Lamb
from hasten.training.muon import Muon
from hasten.training.onebit import OneBitAdam, OneBitLamb, OneBitOptimizer
from hasten.training.recipe import Optimizer, OptimizerName

KEYS = ("rate", "decay")


def make_optimizer(model: nn.Module | Placement, settings: Optimizer, *, fused: bool = True) -> torch.optim.Optimizer:
    """Create the optimizer that a recipe's settings ask for.

    model: a module, or a placement, whose `optimizer_params` are updated. fused: one kernel for many tensors (LAMB:
    operations on lists of tensors), else one tensor after the other. Raises ConfigError for an unknown kind, for groups
    that match no parameter, and for an optimizer that does not support the placement.
    """
    placement = model if isinstance(model, Placement) else Placement(model)
    rules = [parse_rule(text) for text in settings.groups]
    own = list(placement.optimizer_params.items())
    groups = parameter_groups(own, weight_decay=settings.weight_decay, rules=rules, names=placement.everywhere)
    groups = [group | {"lr": settings.learning_rate * group["rate_factor"]} for group in groups]
    if settings.kind == "adamw":
        return _adamw(groups, settings, fused=fused)
    if settings.kind == "lamb":
        return Lamb(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            foreach=fused,
            parts=placement,
        )
    if settings.kind == "muon":
        return _muon(placement, groups, settings, fused=fused)
    if settings.kind in ("onebit-adam", "onebit-lamb"):
        return _onebit(placement, groups, settings, fused=fused)
    raise ConfigError(f"optimizer.kind is {settings.kind!r}; choose one of {', '.join(get_args(OptimizerName))}")


def adamw(model: nn.Module | Placement, settings: Optimizer, *, fused: bool = True) -> torch.optim.Optimizer:
    """Create AdamW, whatever `settings.kind` says. fused: one kernel updates all parameters of a group."""
    return make_optimizer(model, replace(settings, kind="adamw"), fused=fused)


def _onebit(placement: Placement, groups: list[dict[str, Any]], settings: Optimizer, *, fused: bool) -> OneBitOptimizer:
    """1-bit Adam or LAMB; fused: the warm-up's step. Raises ConfigError unless every rank has the whole model."""
    if type(placement) is not Replicated:
        raise ConfigError(
            f"optimizer.kind {settings.kind} is for several processes that all have the whole model (parallel.zero 0): "
            "start them with torchrun or --processes"
        )
    rate, betas, eps = settings.learning_rate, (settings.beta1, settings.beta2), settings.epsilon
    made: OneBitOptimizer
    if settings.kind == "onebit-adam":
        foreach = None if fused else False
        made = OneBitAdam(groups, lr=rate, betas=betas, eps=eps, fused=fused, foreach=foreach)
        # AdamW's kernel would skip float16's steps by itself, but it no longer runs once the variance is frozen.
        made._step_supports_amp_scaling = False
    else:
        made = OneBitLamb(groups, lr=rate, betas=betas, eps=eps, foreach=fused)
    made.freeze_after, made.mean = settings.freeze_after, placement.one_bit_mean
    placement.averages = lambda: not made.frozen
    return made


def _muon(
    placement: Placement, groups: list[dict[str, Any]], settings: Optimizer, *, fused: bool
) -> "CombinedOptimizer":
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
    first = Muon(matrices, lr=settings.learning_rate, momentum=settings.momentum, parts=placement)
    return CombinedOptimizer([first, _adamw(others, settings, fused=fused)] if others else [first])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each for its own parameters, as one: with their groups, their state and one step."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for member in members for group in member.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self.members = list(members)
        # The members' own groups, and one state for all: what is set here is set there.
        self.param_groups = groups
        for member in members:
            member.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step with each of them."""
        assert closure is None
        for member in self.members:
            member.step()


def _adamw(groups: list[dict[str, Any]], settings: Optimizer, *, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=fused,
        foreach=None if fused else False,
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings of the parameters whose names match `pattern`, as file names do (*, ?, [abc]).

    rate: factor on the learning rate. decay: weight decay; None: as without the rule.
    """

    pattern: str
    rate: float = 1.0
    decay: float | None = None


def parse_rule(text: str) -> Rule:
    """Parse a rule of a recipe: PATTERN:rate=NUMBER,decay=NUMBER, with at least one of the two.

    Raises ConfigError for anything else.
    """
    pattern, colon, settings = text.rpartition(":")
    values: dict[str, float] = {}
    try:
        for setting in settings.split(","):
            key, _, number = setting.partition("=")
            if key.strip() not in KEYS or key.strip() in values:
                raise ValueError(key)
            values[key.strip()] = float(number)
            if not 0 <= values[key.strip()] < float("inf"):
                raise ValueError(number)
    except ValueError:
        values = {}
    if not colon or not pattern or not values:
        raise ConfigError(
            f"optimizer.groups has {text!r}; write PATTERN:rate=0.1 (times the learning rate), PATTERN:decay=0, or "
            "both with a comma, for example embedding.*:rate=0.1,decay=0"
        )
    return Rule(pattern, **values)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    rules: Sequence[Rule] = (),
    names: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Group parameters for an optimizer: matrices and embeddings (two or more dimensions) decay, norms and biases not.

    parameters: (name, parameter); those that need no gradient are left out. The first rule that matches a name
    overrides this. A group's `rate_factor` is its factor on the learning rate. names: of parameters that other ranks
    have. Raises ConfigError for a rule that matches nothing.
    """
    named = [(name, p) for name, p in parameters if p.requires_grad]
    every = [name for name, _ in named] + list(names)
    for rule in rules:
        if not any(fnmatchcase(name, rule.pattern) for name in every):
            some = ", ".join(every[:4])
            raise ConfigError(f"optimizer.groups: no parameter's name matches {rule.pattern!r}; names are {some}, …")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for matrix in (True, False):
        for name, parameter in named:
            if (parameter.dim() >= 2) != matrix:
                continue
            rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern)), Rule("*"))
            usual = weight_decay if matrix else 0.0
            decay = usual if rule.decay is None else rule.decay
            groups.setdefault((decay, rule.rate), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "rate_factor": rate} for (decay, rate), members in groups.items()
    ]
