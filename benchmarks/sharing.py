"""How many blocks sharing saves, for parallel sampling and beam search as PagedAttention published it.

    python benchmarks/sharing.py --output benchmarks/results/sharing.json

Drives `hasten.serving.blocks.BlockManager` as the engine does: a prompt is computed once, samples fork it, and a beam
search forks and releases after every token. Saved is blocks saved ÷ blocks without sharing, summed over all steps of
all requests (arXiv 2309.06180, figure 15). No model and no data set take part:

- Prompt and answer lengths are drawn from lognormal distributions with the means published for Alpaca and ShareGPT.
  Their spread is not published; the table takes σ = 0.8 (of the logarithm), and the JSON has 0.4 and 1.2 as well.
- Samples of one prompt all get the length of its answer; the step that computes the prompt gives the first token.
- A beam's next token has log-probabilities of normally distributed logits over 64 candidates, standard deviation 2.5
  (entropy near 1.8 nats); the best k of all go on, as in a beam search.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from hasten.serving.blocks import BlockManager

BLOCK = 16
LONGEST = 2048  # tokens of a prompt or an answer
CANDIDATES, LOGIT_SPREAD = 64, 2.5
LENGTHS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}  # mean tokens of prompt and answer, as published
# Percent saved with 2 … 6 samples or beams: the ends of the published ranges.
PUBLISHED = {
    ("alpaca", "parallel"): (6.1, 9.8),
    ("alpaca", "beam"): (37.6, 55.2),
    ("sharegpt", "parallel"): (16.2, 30.5),
    ("sharegpt", "beam"): (44.3, 66.3),
}
WIDTHS = (2, 4, 6)


def lengths(random: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    """Lognormal token counts with this mean (before they are cut at `LONGEST`)."""
    drawn = random.lognormal(math.log(mean) - spread * spread / 2, spread, count)
    return np.clip(np.rint(drawn), 1, LONGEST).astype(int)


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


class Group:
    """The samples or beams of one request."""

    def __init__(self, manager: BlockManager, width: int, prompt: int) -> None:
        self.manager, self.length, self.next = manager, prompt, width
        manager.begin(0, range(prompt))
        self.write(0)
        self.members = list(range(width))
        for child in self.members[1:]:
            manager.fork(0, child)

    def write(self, *members: int) -> None:
        for member in members:
            self.manager.reserve(member, self.length)
            self.manager.written(member, range(self.length))
        self.manager.computed()

    def grow(self) -> None:
        """One token of every member."""
        self.length += 1
        self.write(*self.members)

    def choose(self, parents: list[int]) -> None:
        """Member i goes on from what member parents[i] has: forks first, then what nobody continues is released."""
        kept: list[int] = []
        for parent in (self.members[index] for index in parents):
            if parent in kept:
                self.manager.fork(parent, self.next)
                parent, self.next = self.next, self.next + 1
            kept.append(parent)
        for member in set(self.members) - set(kept):
            self.manager.release(member)
        self.members = kept


def saved(kind: str, width: int, prompts: np.ndarray, answers: np.ndarray, random: np.random.Generator) -> float:
    """Percent of the blocks without sharing that are saved."""
    spared = whole = 0
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        room = width * (-(-(prompt + answer) // BLOCK) + 1)
        manager = BlockManager(blocks=room, block_size=BLOCK, prefix_cache=False)
        group = Group(manager, width, prompt)
        chosen = survivors(random, width)
        for token in range(answer):
            if token:  # the first step computes the prompt
                if kind == "beam":
                    group.choose(next(chosen))
                group.grow()
            stats = manager.stats
            spared += stats.saved
            whole += stats.saved + stats.used
        manager.check()
    return 100 * spared / whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Compute the table, print it as Markdown, and write it."""

    requests: int = 200
    """Of each kind."""

    seed: int = 0

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.bench.report import write_json

        rows: list[dict[str, Any]] = []
        for (data, kind), published in PUBLISHED.items():
            for spread in (0.8, 0.4, 1.2):
                random = np.random.default_rng(self.seed)
                prompts, answers = (lengths(random, mean, spread, self.requests) for mean in LENGTHS[data])
                found = {width: round(saved(kind, width, prompts, answers, random), 1) for width in WIDTHS}
                rows.append({"lengths": data, "kind": kind, "spread": spread, "saved": found, "published": published})
        print("| lengths | | 2 | 4 | 6 | published, 2 to 6 |\n|---|---|---|---|---|---|")
        for row in rows:
            if row["spread"] == 0.8:
                found = " | ".join(f"{value:.1f}%" for value in row["saved"].values())
                low, high = row["published"]
                print(f"| {row['lengths']} | {row['kind']} | {found} | {low}-{high}% |")
        if self.output:
            settings = {"requests": self.requests, "seed": self.seed, "block_size": BLOCK, "means": LENGTHS}
            write_json(self.output, {"schema": 1, "settings": settings, "rows": rows})


if __name__ == "__main__":
    tyro.cli(Sharing).run()
