"""What is asked of a server under measurement: when requests arrive, how long they are, what they share.

Arrivals are a renewal process: the time between two is drawn from a gamma distribution of mean 1 / rate and shape
`burstiness`, as `vllm bench serve` does it: 1 is a Poisson process, below 1 comes in bursts, above 1 is more even.

Lengths are fixed, or drawn from a lognormal distribution with the published means of ShareGPT's or Alpaca's
conversations (arXiv 2309.06180, figure 11: prompts 161 and 19 tokens, answers 338 and 58). Only the means are
published; the spread (sigma of the logarithm) is ours and is part of the report.
"""

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

from tyro.conf import Suppress

from hasten.errors import ConfigError
from hasten.measure.options import check_least

Lengths = Literal["fixed", "sharegpt", "alpaca"]
MEANS: dict[str, tuple[float, float]] = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One load."""

    requests: int = 64
    """How many are sent at each rate."""
    rate: Annotated[float, Suppress] = math.inf  # the command line takes several: --rates
    """Requests a second; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution between arrivals: 1 is Poisson, below comes in bursts."""
    concurrency: int | None = None
    """Requests in flight at most; one that waits for its turn arrives when it has it: times are the server's."""
    lengths: Lengths = "fixed"
    """Fixed, or drawn around the means of these data sets, up to the next two."""
    prompt_tokens: int = 128
    """Length of prompts, or their longest."""
    output_tokens: int = 64
    """Length of answers, or their longest."""
    spread: float = 0.8
    """Sigma of the lognormal distribution of lengths."""
    shared_prefix_tokens: int = 0
    """Tokens at the beginning that a prompt shares with its group."""
    prefix_groups: int = 1
    """Groups that share a prefix."""
    n: int = 1
    """Samples of each prompt."""
    temperature: float = 0.0
    """Sampling temperature; with n above 1 at 0 all samples are the same."""
    seed: int = 0
    """Decides arrivals, lengths, prompts and random weights."""

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens", "prefix_groups", "n", "concurrency"):
            check_least(name, getattr(self, name))
        for name in ("rate", "burstiness", "spread"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise ConfigError("the shared prefix must be shorter than the prompt")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: arrival in seconds after the start, the prompt's token ids, tokens wanted of each sample."""

    at: float
    prompt: tuple[int, ...]
    output_tokens: int


def plan(workload: Workload, *, vocabulary: int) -> list[Planned]:
    """All requests of a load, in order of arrival; the same seed gives the same ones, whatever the rate."""
    draw = random.Random(f"lengths {workload.seed}")
    first, last = min(256, vocabulary // 2), vocabulary  # the lowest ids are often special tokens

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(first, last) for _ in range(count))

    prefixes = [tokens(workload.shared_prefix_tokens) for _ in range(workload.prefix_groups)]
    found = []
    for at in _arrivals(workload):
        prompt, output = _lengths(workload, draw)
        prefix = draw.choice(prefixes)
        own = max(1, prompt - len(prefix))
        found.append(Planned(at, prefix + tokens(own), output))
    return found


def _arrivals(workload: Workload) -> list[float]:
    if math.isinf(workload.rate):
        return [0.0] * workload.requests
    draw, shape = random.Random(f"arrivals {workload.seed}"), workload.burstiness
    gaps = (draw.gammavariate(shape, 1 / (workload.rate * shape)) for _ in range(workload.requests - 1))
    return list(accumulate(gaps, initial=0.0))


def _lengths(workload: Workload, draw: random.Random) -> tuple[int, int]:
    if workload.lengths == "fixed":
        return workload.prompt_tokens, workload.output_tokens

    def drawn(mean: float, limit: int) -> int:
        mu = math.log(mean) - workload.spread**2 / 2  # so that exp(mu + sigma² / 2) is the mean
        return min(limit, max(1, round(draw.lognormvariate(mu, workload.spread))))

    prompt, output = MEANS[workload.lengths]
    return drawn(prompt, workload.prompt_tokens), drawn(output, workload.output_tokens)
