"""Distillation (arXiv 1503.02531): a model learns another one's probabilities instead of the text's next tokens.

They tell of every token what the text tells of one, so the same tokens teach more. That is what a draft model is for,
which has to guess what its target says, and a model that is trained while rounded, which has to stay what it was.
"""

import torch

from hasten.data import Batch
from hasten.errors import CheckpointError, ConfigError, ResourceError
from hasten.model.context import training_context
from hasten.model.interfaces import Context, Taught
from hasten.model.load import load
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import check_vocabulary


class Teacher:
    """A model that only answers."""

    def __init__(self, model: Transformer) -> None:
        self.model = model.eval()
        self.model.requires_grad_(False)

    @classmethod
    def of(cls, source: str, student: Transformer, *, dtype: torch.dtype, tokens: int) -> "Teacher":
        """Of a folder or hub id, with products in `dtype`, for rows of so many tokens.

        Raises ConfigError where it does not fit the student, and as `load` does.
        """
        try:
            model = load(source, dtype=dtype, device=str(student.device))
            check_vocabulary(model, student, name=f"the teacher {source}")
        except (CheckpointError, ConfigError, ResourceError) as error:
            raise type(error)(f"teacher: {error}") from None
        if model.config.max_positions < tokens:
            raise ConfigError(
                f"teacher: {source} knows {model.config.max_positions:,} positions and data.context is {tokens:,}; "
                "lower that"
            )
        return cls(model)

    @torch.no_grad()
    def taught(self, batch: Batch, positions: torch.Tensor, documents: torch.Tensor | None) -> Taught:
        """What the student is to learn of a batch: its probabilities where the text has a target."""
        context: Context = training_context(self.model, batch.inputs.shape[1], documents)
        states = self.model.states(batch.inputs, positions, context)
        return Taught(targets=batch.targets, states=states, scores=self.model.scores)
