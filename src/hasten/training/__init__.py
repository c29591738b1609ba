"""Recipe -> trained model folder. See docs/training.md.

Names are imported when first used, so that `hasten train --help` answers without importing torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "train": "hasten.training.session",
    "TrainResult": "hasten.training.session",
    "Recipe": "hasten.training.recipe",
    "Shape": "hasten.training.recipe",
    "Data": "hasten.training.recipe",
    "Optimizer": "hasten.training.recipe",
    "Schedule": "hasten.training.recipe",
    "Techniques": "hasten.training.recipe",
    "Run": "hasten.training.recipe",
    "RECIPES": "hasten.training.recipes",
    "TrainStep": "hasten.training.step",
    "StepResult": "hasten.training.step",
    "Precision": "hasten.training.precision",
    "adamw": "hasten.training.optimizers",
    "Lamb": "hasten.training.lamb",
    "make_optimizer": "hasten.training.optimizers",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hasten.training' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
