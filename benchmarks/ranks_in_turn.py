"""Ranks that train with a one-bit optimizer, one after the other in one process, so that none waits for another.

A step of two ranks that other programs keep waiting takes seconds; what it computes does not depend on that.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from hasten.data import Batch
from hasten.distributed.compressed import no_errors, pack, unpack
from hasten.training.journal import Journal
from hasten.training.onebit import OneBitAdam, OneBitLamb
from hasten.training.recipe import Optimizer, Recipe
from hasten.training.schedules import learning_rate
from hasten.training.setup import set_up
from hasten.training.step import TrainStep, set_learning_rate

BASES = {"onebit-adam": "adamw", "onebit-lamb": "lamb"}  # the optimizers that are compressed


def train_in_turn(recipe: Recipe, *, ranks: int) -> None:
    """Train as `ranks` ranks would with a one-bit optimizer, in one process: none waits for another.

    The warm-up's gradient is that of all rows. After it each rank's own rows give a gradient that is clipped alone, and
    momenta are averaged as `compressed_mean` does it over a network.
    """
    kind = recipe.optimizer.kind
    base = replace(recipe.optimizer, kind=BASES.get(kind, kind), freeze_after=None)  # type: ignore[arg-type]
    setup = set_up(replace(recipe, optimizer=base), progress=False)
    step, total = setup.step, recipe.run.steps
    assert setup.validation is not None
    assert total is not None
    if kind in BASES:
        step.optimizer = RanksInTurn(step.optimizer, recipe.optimizer, ranks).optimizer
    journal = Journal(Path(recipe.run.folder) / recipe.name / "train.jsonl", keep_steps=0)
    for number, (_, batch) in zip(range(total), setup.batches.iterate(0), strict=False):
        rate = learning_rate(recipe.schedule, peak=base.learning_rate, step=number, total=total)
        if getattr(step.optimizer, "frozen", False):
            loss = step.optimizer.turns.run(step, batch, rate)
        else:
            result = step.run([batch], learning_rate=rate)
            assert result is not None
            loss = float(result.loss)
        line = {"step": number + 1, "loss": loss, "tokens": (number + 1) * batch.inputs.numel()}
        if (number + 1) % recipe.run.validate_every == 0:
            line["validation_loss"] = setup.validation.loss(step)
        journal.write(line)
    journal.close()


class RanksInTurn:
    """A one-bit optimizer of several ranks in one process."""

    def __init__(self, base: torch.optim.Optimizer, settings: Optimizer, ranks: int) -> None:
        """base: the optimizer that is compressed, whose parameters and settings the new one gets."""
        one_bit = OneBitAdam if settings.kind == "onebit-adam" else OneBitLamb
        keys = ("params", "weight_decay", "rate_factor")
        groups = [{key: group[key] for key in keys} for group in base.param_groups]
        betas = (settings.beta1, settings.beta2)
        fused = {"fused": True} if one_bit is OneBitAdam else {}  # the warm-up's step, as AdamW's
        self.optimizer: Any = one_bit(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon, **fused)
        self.optimizer.freeze_after, self.optimizer.mean, self.optimizer.turns = settings.freeze_after, self.mean, self
        self.ranks, self.gradients = ranks, list[dict[nn.Parameter, Tensor | None]]()
        self.average = CompressedInTurn(ranks)

    def run(self, step: TrainStep, batch: Batch, rate: float) -> float:
        """One step after the warm-up; its loss."""
        set_learning_rate(self.optimizer, rate)
        step.train_mode()
        self.gradients, losses, each = [], [], len(batch.inputs) // self.ranks
        for rank in range(self.ranks):
            own = batch.only(slice(rank * each, (rank + 1) * each))
            loss = step.loss(own) / own.targets.numel()
            loss.backward()
            clip_grad_norm_(step.parameters, step.clip)
            self.gradients.append({p: p.grad for p in step.parameters})
            losses.append(loss.item())
            self.optimizer.zero_grad()
        for p in step.parameters:
            p.grad = self.gradients[0][p]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return fmean(losses)

    def mean(self, x: Tensor, kept: Tensor) -> Tensor:
        """The mean of all ranks' momenta, of which x is the first one's: they differ by their gradients alone."""
        momenta, members = [x], self.optimizer._members()
        for own in self.gradients[1:]:
            parts = []
            for p, group in members:
                scaling = self.optimizer._scaling(self.optimizer.state[p], group)
                parts.append(((own[p] - self.gradients[0][p]) * (1 - group["betas"][0]) * scaling).flatten())
            momenta.append(x + torch.cat(parts))
        return self.average(momenta, kept)


class CompressedInTurn:
    """`compressed_mean` of all ranks' tensors in one process, with the errors of each."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.workers, self.servers = ranks, list[Tensor](), list[Tensor]()

    def __call__(self, xs: Sequence[Tensor], kept: Tensor) -> Tensor:
        """xs: of each rank, (n,) float32. kept: (n,) bool."""
        if not self.workers:
            made = [no_errors(len(xs[0]), self.ranks, xs[0].device) for _ in xs]
            self.workers, self.servers = [one.worker for one in made], [one.server for one in made]
        mask = torch.zeros_like(self.workers[0])
        mask[: len(kept)] = kept
        masks, received = mask.view(self.ranks, -1), []
        for x, error in zip(xs, self.workers, strict=True):
            error[: len(x)] += x
            pieces = error.mul_(mask).view(self.ranks, -1)
            received.append(unpack(pack(pieces, masks), pieces.shape[1]).mul_(masks))
            pieces -= received[-1]
        answers = []
        for piece, error in enumerate(self.servers):
            own = masks[piece : piece + 1]
            r = torch.stack([one[piece] for one in received]).mean(0).add_(error)[None]
            answers.append(unpack(pack(r, own), r.shape[1]).mul_(own))
            torch.sub(r[0], answers[-1][0], out=error)
        return torch.cat(answers).flatten()[: len(xs[0])]
