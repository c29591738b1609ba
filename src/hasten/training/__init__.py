"""Recipe -> trained model folder. See docs/training.md.

Names are imported when first used, so that `hasten train --help` answers without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors read; `__getattr__` imports the same names at run time
    from hasten.training.lamb import Lamb
    from hasten.training.optimizers import adamw, make_optimizer
    from hasten.training.precision import Precision
    from hasten.training.recipe import (
        Data,
        Lora,
        Optimizer,
        Parallel,
        Qat,
        Recipe,
        Run,
        Schedule,
        Shape,
        Techniques,
    )
    from hasten.training.recipes import RECIPES
    from hasten.training.session import TrainResult, train
    from hasten.training.step import StepResult, TrainStep

__all__ = [
    "RECIPES",
    "Data",
    "Lamb",
    "Lora",
    "Optimizer",
    "Parallel",
    "Precision",
    "Qat",
    "Recipe",
    "Run",
    "Schedule",
    "Shape",
    "StepResult",
    "Techniques",
    "TrainResult",
    "TrainStep",
    "adamw",
    "make_optimizer",
    "train",
]

_MODULES = {  # the module of each public name, as imported above
    "RECIPES": "hasten.training.recipes",
    "Data": "hasten.training.recipe",
    "Lamb": "hasten.training.lamb",
    "Lora": "hasten.training.recipe",
    "Optimizer": "hasten.training.recipe",
    "Parallel": "hasten.training.recipe",
    "Precision": "hasten.training.precision",
    "Qat": "hasten.training.recipe",
    "Recipe": "hasten.training.recipe",
    "Run": "hasten.training.recipe",
    "Schedule": "hasten.training.recipe",
    "Shape": "hasten.training.recipe",
    "StepResult": "hasten.training.step",
    "Techniques": "hasten.training.recipe",
    "TrainResult": "hasten.training.session",
    "TrainStep": "hasten.training.step",
    "adamw": "hasten.training.optimizers",
    "make_optimizer": "hasten.training.optimizers",
    "train": "hasten.training.session",
}

if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts any name, misspelt ones too

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten.training' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)
