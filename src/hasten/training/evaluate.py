"""The validation loss, measured on the same held-out windows every time."""

import math
from collections.abc import Iterator

import torch

from hasten.data import Batch, Batches, TokenSplit, evaluation_windows
from hasten.data.batches import evaluated
from hasten.distributed.ranks import ALONE, Ranks
from hasten.training.step import IGNORED, TrainStep

# Not the recipe's seed, so that runs with different seeds are compared on the same windows.
WINDOWS_SEED = 0


class Validation:
    """Measures the mean loss per token (nats) on up to `batches` batches of a split.

    If the split is larger, they are random windows of it, else all of it in order. batch_size: rows of all ranks; each
    rank reads its own. Raises DataError for a split shorter than one window.
    """

    def __init__(
        self, split: TokenSplit, *, batch_size: int, sequence_length: int, batches: int, ranks: Ranks = ALONE
    ) -> None:
        self.split = split
        own = ranks.rows(batch_size)
        self.rows = slice(ranks.reader * own, (ranks.reader + 1) * own)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        whole = math.ceil(len(evaluated(split, sequence_length=sequence_length)) / batch_size)
        self.whole = whole <= batches
        self.batches = min(whole, batches)
        next(iter(self._batches()), None)  # raise errors now, not after hours of training

    def _batches(self) -> Iterator[Batch]:
        if self.whole:
            yield from evaluation_windows(self.split, batch_size=self.batch_size, sequence_length=self.sequence_length)
            return
        shuffled = Batches(
            self.split, batch_size=self.batch_size, sequence_length=self.sequence_length, seed=WINDOWS_SEED
        )
        for position in range(self.batches):
            yield shuffled.batch(position)

    def loss(self, step: TrainStep) -> float:
        """Mean loss over all targets and ranks, in the step's precision, without dropout."""
        total = torch.zeros((), dtype=torch.float64, device=step.device)
        targets = torch.zeros((), dtype=torch.int64)
        trained = step.model.training
        step.model.eval()
        with torch.no_grad(), step.cores():
            for batch in self._batches():
                own = batch.only(self.rows)
                targets += (own.targets != IGNORED).sum()
                total += step.loss(own.to(step.device, non_blocking=True)).double()
        step.model.train(trained)
        step.where.reshard()
        return step.ranks.sum(total).item() / max(1, int(step.ranks.sum(targets)))
