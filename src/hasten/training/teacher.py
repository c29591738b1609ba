"""Distillation (arXiv 1503.02531): a model learns a teacher's probabilities instead of the text's next tokens.

The probabilities score every token of the vocabulary where the text names one, so the same text teaches more. This
suits draft models, which must predict what their target says, and rounded models, which must stay what they were.
"""

from pathlib import Path

import torch
from torch import Tensor

from hasten.checkpoints.load import load_quietly, resolve_model
from hasten.data import Batch
from hasten.errors import CheckpointError, ConfigError, ResourceError
from hasten.model.context import TrainingContexts
from hasten.model.interfaces import SoftTargets
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import check_vocabulary


class Teacher:
    """A frozen model that gives probabilities of the first `words` tokens of its vocabulary."""

    def __init__(self, model: Transformer, *, words: int) -> None:
        self.model, self.words = model.eval(), words
        self.model.requires_grad_(False)
        self.contexts = TrainingContexts(model)

    @classmethod
    def of(
        cls, source: str, student: Transformer, *, device: torch.device, dtype: torch.dtype, tokens: int
    ) -> "Teacher":
        """Load the teacher from a folder, file or hub id, with products in `dtype`, for rows of `tokens` tokens.

        Its vocabulary may have further, unused rows. Raises ConfigError if it does not fit the student, and whatever
        `load` raises.
        """
        if dtype == torch.float16:  # many models' states overflow in it; autocast still rounds the products
            dtype = torch.float32
        model = load_quietly(teacher_path(source), dtype=dtype, device=str(device))
        check_vocabulary(model, student, name=f"teacher {source}", larger=True)
        if model.config.max_positions < tokens:
            raise ConfigError(
                f"teacher {source} has {model.config.max_positions:,} positions and data.context is {tokens:,}; lower "
                "data.context"
            )
        return cls(model, words=student.config.vocab_size)

    @torch.no_grad()
    def soft_targets(self, batch: Batch, positions: Tensor, documents: Tensor | None) -> SoftTargets:
        """The probabilities for the student to learn in a batch, wherever the text has a target."""
        context = self.contexts.of(batch.inputs.shape[1], documents)
        states = self.model.states(batch.inputs, positions, context)
        return SoftTargets(targets=batch.targets, states=states, logits=self._logits)

    def _logits(self, states: Tensor) -> Tensor:
        return self.model.scores(states)[..., : self.words]


def teacher_path(source: str) -> Path:
    """Path of the teacher, downloaded if needed. Raises CheckpointError or ResourceError that name the option."""
    try:
        return resolve_model(source)
    except (CheckpointError, ResourceError) as error:
        raise type(error)(f"teacher: {error}") from None
