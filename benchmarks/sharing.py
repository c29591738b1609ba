"""How many blocks sharing saves, for parallel sampling and beam search as PagedAttention published it.

    python benchmarks/sharing.py --output benchmarks/results/sharing.json

Drives the engine's `Scheduler` and `BlockManager` through a serving run without a model. Like the published one
(arXiv 2309.06180, figure 15; the authors' scheduler counted and their script for the figure averaged):

- In each step the blocks of all running sequences are counted, as if nothing were shared and as they are; the quotient
  is averaged over the steps, the first third of the run left out; saved is 1 - 1 / that average.
- The cache has the 15.7 thousand slots of their OPT-13B on one A100 (their table 1) in blocks of 16, and at most 256
  sequences run. Pairs of 2,048 tokens and more are left out, and all samples of a prompt get the length of its answer.

What is not published, and what stands for it here:

- The request rate with ShareGPT. Here requests always wait, so that as many run as fit.
- How lengths are spread around the published means (19.31 and 58.45 tokens for Alpaca, 161.31 and 337.99 for
  ShareGPT). Here they are lognormal and independent. For ShareGPT standard deviation ÷ mean is 547 ÷ 246 for prompts
  and 244 ÷ 322 for answers, the figures of arXiv 2408.12757, table 4, for another cut of the same conversations. For
  Alpaca no figure is known to us; both are 0.95, which is σ = 0.8 of the logarithm. The JSON has narrower and wider
  ones too. 500 pairs, for samples in three random orders, of which the mean is told.
- A beam's next token has log-probabilities of normally distributed logits over 64 candidates, standard deviation 2.5
  (entropy near 1.8 nats); the best k of all go on, as in a beam search.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import tyro

from hasten.engine.blocks import BlockManager
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import TextSequence

BLOCK, SLOTS, SEQUENCES = 16, 15_700, 256
LONGEST = 2048  # tokens of prompt and answer, not reached
CANDIDATES, LOGIT_SPREAD = 64, 2.5
MEANS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}  # tokens of prompt and answer, as published
SPREADS = {"alpaca": (0.95, 0.95), "sharegpt": (547 / 246, 244 / 322)}  # standard deviation ÷ mean
SCALES = (1.0, 0.5, 1.5)  # of the spread; the first is the one that is told
STEPS = {
    ("alpaca", "parallel"): 2000,
    ("alpaca", "beam"): 800,
    ("sharegpt", "parallel"): 12_000,
    ("sharegpt", "beam"): 2500,
}
SEEDS = {"parallel": (0, 1, 2), "beam": (0,)}
# Percent saved with 2 … 6 samples or beams: the ends of the published ranges.
PUBLISHED = {
    ("alpaca", "parallel"): (6.1, 9.8),
    ("alpaca", "beam"): (37.6, 55.2),
    ("sharegpt", "parallel"): (16.2, 30.5),
    ("sharegpt", "beam"): (44.3, 66.3),
}
WIDTHS = (2, 4, 6)


def lengths(random: np.random.Generator, data: str, *, scale: float = 1.0, count: int = 500) -> np.ndarray:
    """Pairs (N, 2) of prompt and answer tokens below `LONGEST` together, with the published means.

    Quantiles at even distances in a random order, not draws: the few longest decide much, and chance would too.
    """
    spread = scale * np.array(SPREADS[data])
    sigma = np.sqrt(np.log1p(spread**2))
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    shape = np.exp(np.stack([random.permutation(normal), random.permutation(normal)], axis=1) * sigma)
    means = np.array(MEANS[data])
    factor = means / shape.mean(0)
    for _ in range(50):  # what is left out takes from the means: lengthen the others until they are met
        pairs = np.maximum(1, np.rint(shape * factor))
        pairs = pairs[pairs.sum(1) < LONGEST]
        factor = factor * means / pairs.mean(0)
    return pairs.astype(int)


def survivors(random: np.random.Generator, width: int) -> Iterator[list[int]]:
    """For each token of a beam search, the beam that each of the `width` best continuations comes from."""
    scores = np.array([0.0] + [-np.inf] * (width - 1))  # all continue the prompt at first
    while True:
        logits = random.normal(0, LOGIT_SPREAD, (width, CANDIDATES))
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        total = (scores[:, None] + logits).ravel()
        best = np.argpartition(total, -width)[-width:]
        scores = total[best]
        yield sorted((best // CANDIDATES).tolist())


@dataclass(slots=True, eq=False)
class Group:
    """The samples or beams of one request: at first one sequence, the prompt."""

    prompt: int
    answer: int
    members: list[TextSequence]
    chosen: Iterator[list[int]] | None  # of beams: who goes on
    ready: set[TextSequence] = field(default_factory=set)  # those that can draw a token


class Server:
    """The scheduler at work; it is never idle, the next request waits behind those that run."""

    def __init__(self, kind: str, width: int, pairs: np.ndarray, random: np.random.Generator, slots: int = SLOTS):
        self.kind, self.width, self.random = kind, width, random
        self.pairs = itertools.cycle(pairs.tolist())
        self.manager = BlockManager(blocks=slots // BLOCK, block_size=BLOCK)
        self.books = Scheduler(self.manager, max_sequences=SEQUENCES, token_budget=1 << 16)
        self.groups: dict[int, Group] = {}
        self.tokens = itertools.count()  # no two texts have one in common but what they share

    def step(self) -> float:
        """One step; blocks as if nothing were shared ÷ blocks."""
        if not self.books.waiting:
            self.arrive()
        plan = self.books.plan()
        self.books.advance(plan)
        groups = {}
        for sequence in [entry.sequence for entry in plan if entry.complete]:
            groups[sequence.request] = group = self.groups[sequence.request]
            group.ready.add(sequence)
            if len(group.members) < self.width and len(sequence.tokens) == group.prompt:  # the prompt is computed
                group.members += [self.books.fork(sequence) for _ in range(self.width - 1)]
                group.ready.update(group.members)
        stats = self.manager.stats
        for group in groups.values():
            self.grow(group)
        return (stats.used_blocks + stats.blocks_saved) / stats.used_blocks

    def arrive(self) -> None:
        prompt, answer = next(self.pairs)
        tokens = list(itertools.islice(self.tokens, prompt))
        prompt_sequence = self.books.add(tokens, slots=self.width)
        chosen = survivors(self.random, self.width) if self.kind == "beam" else None
        self.groups[prompt_sequence.request] = Group(prompt, answer, [prompt_sequence], chosen)

    def grow(self, group: Group) -> None:
        """A token for every sample that is ready; for beams when all are, because they are chosen together."""
        if group.chosen is not None:
            if len(group.ready) < len(group.members):
                return
            self.choose(group, next(group.chosen))
            group.ready = set(group.members)
        for member in group.ready:
            self.books.accept(member, [next(self.tokens)])
            if len(member.tokens) == group.prompt + group.answer:
                self.books.finish(member)
        group.ready.clear()

    def choose(self, group: Group, parents: list[int]) -> None:
        """Member i goes on from what member parents[i] has; what nobody continues ends."""
        for index in set(range(len(group.members))) - set(parents):
            self.books.finish(group.members[index])
        kept: list[TextSequence] = []
        for parent in (group.members[index] for index in parents):
            kept.append(self.books.fork(parent) if parent in kept else parent)
        group.members = kept


def saved(kind: str, width: int, pairs: np.ndarray, random: np.random.Generator, *, steps: int) -> float:
    """Percent of the blocks without sharing that are saved."""
    server = Server(kind, width, pairs, random)
    ratios = [server.step() for _ in range(steps)]
    server.books.check()
    return 100 * (1 - 1 / float(np.mean(ratios[steps // 3 :])))


def row(data: str, kind: str, scale: float) -> dict[str, Any]:
    """One line of the table: the means over the seeds, and each of them."""
    runs = []
    for seed in SEEDS[kind]:
        random = np.random.default_rng(seed)
        pairs = lengths(random, data, scale=scale)
        runs.append([saved(kind, width, pairs, random, steps=STEPS[data, kind]) for width in WIDTHS])
    return {
        "lengths": data,
        "kind": kind,
        "scale": scale,
        "spread": (pairs.std(0) / pairs.mean(0)).round(2).tolist(),
        "saved": dict(zip(WIDTHS, np.mean(runs, axis=0).round(1).tolist(), strict=True)),
        "runs": np.round(runs, 1).tolist(),
        "published": PUBLISHED[data, kind],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Compute the table, print it as Markdown, and write it (minutes)."""

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.machine.files import write_json

        rows = [row(data, kind, scale) for data, kind in PUBLISHED for scale in SCALES]
        print("| lengths | | 2 | 4 | 6 | published, 2 to 6 |\n|---|---|---|---|---|---|")
        for one in rows:
            if one["scale"] == 1.0:
                told = " | ".join(f"{value:.1f}%" for value in one["saved"].values())
                low, high = one["published"]
                print(f"| {one['lengths']} | {one['kind']} | {told} | {low}-{high}% |")
        if self.output:
            settings = {"seeds": SEEDS, "block_size": BLOCK, "slots": SLOTS, "sequences": SEQUENCES, "means": MEANS}
            write_json(self.output, {"schema": 2, "settings": settings, "rows": rows})


if __name__ == "__main__":
    tyro.cli(Sharing).run()
