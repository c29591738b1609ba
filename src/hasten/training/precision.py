"""In which dtype the matrix products of a training step run. Weights, gradients and the loss stay in float32.

bfloat16 has float32's range and needs nothing else. float16 loses gradients below 6e-8, so the loss is multiplied by a
factor before the backward pass and the gradients divided by it after; a step whose gradients overflow is skipped and
the factor halved, and doubled after many clean ones (arXiv 1710.03740). In both, softmax, norms and the loss compute
in float32.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from hasten.distributed.ranks import ALONE, Ranks
from hasten.machine import ProductPrecision, resolve_device, resolve_dtype, training_precision
from hasten.training.recipe import PrecisionName, Recipe

START = 65_536.0  # the largest that float16 gradients near 1 survive; a small model's first steps halve it
CLEAN_STEPS = 2000  # in a row, until it is doubled


def choose_precision(
    recipe: Recipe, begun: Recipe | None = None, *, ranks: Ranks = ALONE
) -> tuple[Recipe, ProductPrecision]:
    """The recipe with `auto` decided, and the reason. begun: the precision of the run that is resumed; it is kept.

    Each rank measures, and the first one decides.
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
    """Autocast and loss scaling behind one small object; for float32 and bfloat16 the scaling does nothing.

    name "auto": bfloat16 where the device multiplies it at speed, else float32.
    """

    def __init__(self, name: PrecisionName, device: torch.device | str) -> None:
        if name == "auto":
            name = cast(PrecisionName, training_precision(device).dtype)
        self.name = name
        self.device = torch.device(device)
        self.dtype = resolve_dtype(name)
        self.scales = name == "float16"
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.scales, init_scale=START, growth_interval=CLEAN_STEPS
        )

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Add the (scaled) gradients of `loss`."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        """Make the gradients true ones, for clipping; once a step. What overflowed on one rank overflowed on all."""
        self.scaler.unscale_(optimizer)
        if self.scales:
            for found in self.scaler._found_inf_per_device(optimizer).values():
                ranks.sum(found)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step, unless the gradients overflowed."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def scale(self) -> float:
        """The present factor (1 without scaling). Waits for the device where there is one."""
        return float(self.scaler.get_scale())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON values."""
        return dict(self.scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        if self.scales and state:
            self.scaler.load_state_dict(state)
