"""Replaces modules of a model, which is how techniques change it and change it back."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules, keys by values of `new`, wherever they are in a model."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if child in new:
                setattr(owner, name, new[child])


def take_over(kind: type[Module], other: nn.Module) -> Module:
    """Create a module of another class with all attributes of `other` (layers, norms, settings), without copying."""
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    new.__dict__.update(other.__dict__)
    return new


def swap_kinds(model: nn.Module, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Replace each module whose class is in `kinds` by one of the mapped class with the same attributes."""
    replace_modules(model, {old: take_over(kinds[type(old)], old) for old in model.modules() if type(old) in kinds})
