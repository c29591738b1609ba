"""Mixed precision: the dtype of a training step's matrix products. Weights, gradients and the loss stay in float32.

bfloat16 has float32's range and needs nothing else. float16 loses gradients below 6e-8, so the loss is multiplied by a
factor before the backward pass and the gradients divided by it after; a step whose gradients overflow is skipped and
the factor halved, and doubled again after many clean steps (arXiv 1710.03740). In both, softmax, norms and the loss are
computed in float32.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from hasten.distributed.ranks import ALONE, Ranks
from hasten.machine import ProductPrecision, resolve_device, resolve_dtype, training_precision
from hasten.training.recipe import PrecisionName, Recipe

START = 65_536.0  # initial factor, the largest that float16 gradients near 1 survive; a small model soon halves it
CLEAN_STEPS = 2000  # steps in a row without overflow, after which the factor is doubled


def choose_precision(
    recipe: Recipe, begun: Recipe | None = None, *, ranks: Ranks = ALONE
) -> tuple[Recipe, ProductPrecision]:
    """Decide the precision `auto`: the recipe with a dtype, and the reason for it.

    begun: recipe of the run that is resumed, whose precision is kept. Each rank measures, the first one decides.
    """
    name = recipe.techniques.precision
    if name != "auto":
        return recipe, ProductPrecision(name, "as the recipe says")
    if begun is not None:
        choice = ProductPrecision(begun.techniques.precision, "as the run began")
    else:
        own = training_precision(resolve_device(recipe.run.device))
        choice = ProductPrecision(*ranks.texts(f"{own.dtype}\n{own.reason}")[0].split("\n", 1))
    decided = cast(PrecisionName, choice.dtype)
    return replace(recipe, techniques=replace(recipe.techniques, precision=decided)), choice


class Precision:
    """Autocast and loss scaling; for float32 and bfloat16 the scaling does nothing.

    name: of the products' dtype; "auto": bfloat16 if the device multiplies it at speed, else float32. keeps_casts: a
    weight is cast once a step, and its cast is there until the end of the forward pass.
    """

    def __init__(self, name: PrecisionName, device: torch.device | str, *, keeps_casts: bool = True) -> None:
        if name == "auto":
            name = cast(PrecisionName, training_precision(device).dtype)
        self.name = name
        self.device = torch.device(device)
        self.keeps_casts = keeps_casts
        self.dtype = resolve_dtype(name)
        self.scales = name == "float16"
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.scales, init_scale=START, growth_interval=CLEAN_STEPS
        )

    def autocast(self) -> torch.autocast:
        """The autocast context of a forward pass."""
        on = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=on, cache_enabled=self.keeps_casts)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the scaled loss and add them to the parameters'."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        """Divide the gradients by the factor, once a step, before clipping; an overflow on one rank counts on all."""
        self.scaler.unscale_(optimizer)
        if self.scales:
            for found in self.scaler._found_inf_per_device(optimizer).values():
                ranks.sum(found)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, unless the gradients overflowed, and update the factor."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def scale(self) -> float:
        """The current factor (1 without scaling); waits for the device."""
        return float(self.scaler.get_scale())

    def state(self) -> dict[str, Any]:
        """State of the scaling for a checkpoint, as JSON values."""
        return dict(self.scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        if self.scales and state:
            self.scaler.load_state_dict(state)
