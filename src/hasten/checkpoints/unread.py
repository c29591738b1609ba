"""Tensors of a checkpoint that are no weights of the model: towers, leftovers, numbers that no model changes."""

import warnings
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from torch import Tensor

from hasten.checkpoints.checkpoint import DTYPES, StoredTensor
from hasten.errors import CheckpointError, HastenWarning
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES
from hasten.model.families.slices import TensorSlice
from hasten.model.families.wrapped import skipped_towers

# Buffers that older versions of transformers saved beside the weights.
_LEFTOVERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def warn_of_unused(
    stored: Mapping[str, StoredTensor], pieces: Mapping[str, TensorSlice], config: ModelConfig, folder: Path
) -> None:
    """Warn once of tensors that this model type does not know."""
    used = {piece.name for piece in pieces.values()} | _constants(config, stored).keys()
    unused = [name for name in stored if name not in used and not name.endswith(_LEFTOVERS)]
    if unused:
        warnings.warn(
            f"{folder}: {len(unused)} tensors are not part of this model type and stay unread, "
            f"for example {unused[0]!r:.100}: the results may differ from the model they were trained with",
            HastenWarning,
            stacklevel=3,
        )


def warn_of_towers(towers: Mapping[str, int], where: str) -> None:
    """Say in one line which towers are skipped."""
    if towers:
        text = f"{where}: the text model is read, without {skipped_towers(towers)}"
        warnings.warn(text, HastenWarning, stacklevel=4)


def check_constants(
    config: ModelConfig, stored: Mapping[str, StoredTensor], read: Callable[[str], Tensor], where: str
) -> None:
    """Raise CheckpointError where a number that is the same in all models of the family is another one."""
    for name, wanted in _constants(config, stored).items():
        tensor = stored[name]
        numbers = read(name).flatten().tolist() if tensor.dtype in DTYPES and tensor.bytes <= 8 else []
        if len(numbers) != 1 or not abs(numbers[0] - wanted) <= 0.01 * abs(wanted):  # as bfloat16 rounds it
            found = numbers[0] if len(numbers) == 1 else f"{tensor.dtype!s:.20} {list(tensor.shape)}"
            raise CheckpointError(
                f"{where}: {name} is {found}; hasten computes a {config.family} with {wanted:g}, as all published "
                "ones are: run this model with transformers"
            )


def _constants(config: ModelConfig, stored: Container[str]) -> dict[str, float]:
    """The numbers that a checkpoint has of those that its family's files may hold."""
    family = FAMILIES[config.family]
    known = family.constants(config)
    known |= {name.removeprefix(family.base): value for name, value in known.items()}  # of a bare model
    return {name: value for name, value in known.items() if name in stored}
