"""Chooses how to run a model on several devices: every candidate with its cost, and why it was chosen or rejected.

A candidate is a degree of tensor parallelism, a number of replicas, a format of the weights and a batch size. Its times
and bytes come from the plan of one rank (`plan.py`); a goal orders the candidates that are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hasten.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from hasten.planning.memory import InferenceUse
    from hasten.planning.plan import Plan

Goal = Literal["latency", "throughput", "cost"]
READING = 100.0  # milliseconds a token: as fast as most people read


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Goal and bounds of a plan for several devices."""

    goal: Goal | None = None
    """latency: shortest time of an answer; throughput: most tokens/s; cost: fewest device-seconds per token."""
    token_ms: float | None = None
    """Maximum milliseconds between two tokens of an answer (default: 100 for --goal cost, else no bound)."""
    price: float | None = None
    """Price per device-hour (any currency), to report costs."""

    def check(self) -> None:
        """Raise ConfigError for an unknown goal and for invalid numbers."""
        if self.goal is not None and self.goal not in GOALS:
            raise ConfigError(f"--goal {self.goal!r:.40} is not known; use {', '.join(GOALS)}")
        if self.token_ms is not None and not self.token_ms > 0:
            raise ConfigError(f"--token-ms is {self.token_ms}; it must be above 0")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(f"--price is {self.price}; it must be finite and not below 0")

    @property
    def bound(self) -> float | None:
        """Maximum seconds between two tokens, or None."""
        bound = READING if self.token_ms is None and self.goal == "cost" else self.token_ms
        return None if bound is None else bound / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run the model: `replicas` copies, each split over plan.use.degree ranks, with weights in one format.

    plan: of one rank, whose device is that rank's part of a device. weights: name of the format. rounded: weights are
    rounded after loading. rejected: why another candidate is better, empty for the best.
    """

    plan: Plan
    weights: str
    rounded: bool = False
    replicas: int = 1
    rejected: str = ""

    @property
    def use(self) -> InferenceUse:
        """The use that `plan` is for."""
        from hasten.planning.memory import InferenceUse

        assert isinstance(self.plan.use, InferenceUse)
        return self.plan.use

    @property
    def devices(self) -> float:
        """Devices that all ranks occupy; ranks that share one machine's cores occupy one together."""
        return self.replicas * self.use.degree / self.plan.device.parts

    @property
    def fits(self) -> bool:
        """Whether the plan fits in a rank's memory."""
        return self.plan.memory.peak <= self.plan.free

    @property
    def token_seconds(self) -> float:
        """Seconds between two tokens of an answer."""
        return self.plan.phases[1].seconds(self.plan.device)

    @property
    def answer_seconds(self) -> float:
        """Seconds for a batch of prompts and their answers."""
        return self.plan.phases[0].seconds(self.plan.device) + self.use.new_tokens * self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all replicas together."""
        return self.replicas * self.plan.tokens_per_second

    @property
    def device_seconds(self) -> float:
        """Device-seconds for a million tokens."""
        return 1e6 * self.devices / self.tokens_per_second

    def to_json(self, price: float | None = None) -> dict[str, Any]:
        """Plain JSON values: bytes of one rank, seconds, tokens/s of all replicas."""
        return {
            "tensor_parallel": self.use.degree,
            "replicas": self.replicas,
            "weights": self.weights,
            "batch_size": self.use.batch_size,
            "cache_bytes": self.plan.memory.parts["cache"],
            "peak_bytes": self.plan.memory.peak,
            "free_bytes": self.plan.free,
            "prompt_seconds": self.plan.phases[0].seconds(self.plan.device),
            "token_seconds": self.token_seconds,
            "link_seconds": self.plan.phases[1].limits(self.plan.device)["link"],
            "tokens_per_second": self.tokens_per_second,
            "device_seconds_per_million": self.device_seconds,
            "price_per_million": None if price is None else self.device_seconds * price / 3600,
            "rejected": self.rejected or None,
        }


# goal -> (what is minimized, in words; its value, and a second one that decides between equals)
GOALS: Mapping[str, tuple[str, Callable[[Candidate], tuple[float, float]]]] = {
    "latency": ("the time of an answer", lambda one: (one.answer_seconds, one.device_seconds)),
    "throughput": ("the time a token of all", lambda one: (1 / one.tokens_per_second, one.devices)),
    "cost": ("the device-seconds", lambda one: (one.device_seconds, one.token_seconds)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The candidates in the goal's order, one for each degree, number of replicas and weight format; best first."""

    wanted: Wanted
    rows: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The candidate that is chosen."""
        return self.rows[0]

    def why(self) -> str:
        """The reason for the choice, as a sentence."""
        (what, _), bound = GOALS[str(self.wanted.goal)], self.wanted.bound
        under = "no bound on a token" if bound is None else f"a token in at most {1e3 * bound:g} ms"
        return f"{what} is the least of {len(self.rows)} candidates, with {under}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the first candidate is the chosen one."""
        plan, wanted = self.best.plan, self.wanted
        return {
            "schema": 1,
            "model": plan.model,
            "device": plan.device.name,
            "link": plan.device.link.source,
            "goal": wanted.goal,
            "token_seconds_bound": wanted.bound,
            "price": wanted.price,
            "why": self.why(),
            "settings": dict(plan.settings),
            "candidates": [one.to_json(wanted.price) for one in self.rows],
        }


def choose(candidates: Iterable[Candidate], wanted: Wanted) -> Choices:
    """Choose the best candidate for the goal and give every other one the reason for its rejection.

    Of candidates that differ only in the batch size, the best is kept. Raises ResourceError if none fits in memory,
    ConfigError if none is within the bound.
    """
    assert wanted.goal is not None
    what, order = GOALS[wanted.goal]
    given = list(candidates)
    judged = [replace(one, rejected=one.rejected or _refused(one, wanted)) for one in given]
    if all(one.rejected for one in judged):
        raise _none([one for one in given if not one.rejected], wanted)
    rows: dict[tuple[int, int, str], Candidate] = {}
    for one in sorted(judged, key=lambda one: (bool(one.rejected), *order(one))):
        rows.setdefault((one.use.degree, one.replicas, one.weights), one)
    best, *others = rows.values()

    def behind(one: Candidate) -> str:
        times = order(one)[0] / order(best)[0]
        return "as good, on as many devices or more" if times < 1.005 else f"{times:.2f} times {what}"

    return Choices(wanted=wanted, rows=(best, *(replace(one, rejected=one.rejected or behind(one)) for one in others)))


def _refused(one: Candidate, wanted: Wanted) -> str:
    """Why a candidate is not allowed for any goal, or an empty string."""
    if not one.fits:
        return f"needs {one.plan.memory.peak / 1e9:.1f} GB a rank, {max(one.plan.free, 0) / 1e9:.1f} GB are free"
    if wanted.bound is not None and one.token_seconds > wanted.bound:
        return f"a token takes {1e3 * one.token_seconds:,.1f} ms, not {1e3 * wanted.bound:g}"
    return ""


def _none(refused: list[Candidate], wanted: Wanted) -> ConfigError | ResourceError:
    """The error if no candidate is allowed."""
    fitting = [one.token_seconds for one in refused if one.fits]
    if fitting:
        return ConfigError(
            f"no plan makes a token in {1e3 * (wanted.bound or 0):g} ms; the fastest takes {1e3 * min(fitting):,.1f} "
            "ms: raise --token-ms, or use more devices"
        )
    least = min(refused, key=lambda one: one.plan.memory.peak)
    smaller = "" if least.weights.startswith("int4") else ", int4 weights (--weights int4, or --quantize int4)"
    return ResourceError(
        f"no plan fits: the smallest, {least.weights} on {least.use.degree} of {least.plan.device.name}, "
        f"{_refused(least, wanted)}; use more devices{smaller}, or a shorter --length"
    )
