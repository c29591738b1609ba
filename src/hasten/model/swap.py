"""One module in the place of another: how a technique changes a model, and changes it back."""

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
    """A module of another kind with everything that `other` has: layers, norms and settings; nothing is copied."""
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    new.__dict__.update(other.__dict__)
    return new


def swap_kinds(model: nn.Module, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Put a module of the other kind, with everything that it has, in the place of each whose class is in `kinds`."""
    replace_modules(model, {old: take_over(kinds[type(old)], old) for old in model.modules() if type(old) in kinds})
