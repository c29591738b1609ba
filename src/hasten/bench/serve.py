"""Measuring a server: the requests of a load are sent when they are due, and what comes back is timed.

    {"schema": 1, "kind": "serve", "machine": {...}, "target": {...}, "workload": {...}, "summary": [...],
     "requests": [...], "definitions": {...}}

`summary` has one entry a load (a rate), `requests` one a request with `load` saying which.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from statistics import mean
from typing import Any

import numpy

from hasten.bench.serve_targets import RequestOutcome, Target
from hasten.bench.serve_workload import Workload, plan

SCHEMA = 1
DEFINITIONS = {
    "ttft": "time to first token: from sending a request to the first token of any of its samples",
    "tpot": "time per output token: (last - first piece of a sample) / (its tokens - 1), mean over a request's samples",
    "itl": "inter-token latency: between two pieces of the same sample, all gaps of all requests together",
    "e2e": "from sending a request to the end of its answer",
    "goodput": "requests a second that met every limit given (of those sent in the whole load)",
    "output_tokens_per_second": "tokens of all answers / time from the first sending to the last end",
    "prefix_hit_rate": "prompt tokens found in the prefix cache / prompt tokens looked up, in the load",
    "blocks_saved": "blocks saved by sharing / blocks without sharing, mean over samples taken while it runs",
}
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """What a request must keep to for goodput, in milliseconds; None: no limit."""

    goodput_ttft_ms: float | None = None
    """Limit of the time to the first token that a good request keeps."""
    goodput_tpot_ms: float | None = None
    """Limit of the time per output token."""
    goodput_e2e_ms: float | None = None
    """Limit of the whole time."""


async def measure(
    target: Target, workload: Workload, *, progress: Callable[[int, int], None] = lambda done, whole: None
) -> Load:
    """Send one load and wait for its end. progress: called with the number of ended requests, and of all."""
    planned = plan(workload, vocabulary=target.vocabulary)
    ended = count(1)
    progress(0, len(planned))
    gate = asyncio.Semaphore(workload.concurrency or len(planned))
    before = await target.counters()
    samples: list[dict[str, float]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            samples.append(await target.counters())

    start = time.perf_counter()

    async def one(index: int) -> RequestOutcome:
        await asyncio.sleep(max(0.0, start + planned[index].at - time.perf_counter()))
        async with gate:
            outcome = await target.ask(planned[index], workload, seed=workload.seed + index)
        progress(next(ended), len(planned))
        return outcome

    watcher = asyncio.create_task(watch()) if before else None
    try:
        outcomes = await asyncio.gather(*(one(index) for index in range(len(planned))))
    finally:
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    after = await target.counters()
    return Load(workload, start, outcomes, before, after, samples)


@dataclass(frozen=True, slots=True)
class Load:
    """What one load gave."""

    workload: Workload
    start: float
    outcomes: Sequence[RequestOutcome]
    before: dict[str, float]
    after: dict[str, float]
    samples: Sequence[dict[str, float]]

    def summary(self, limits: LatencyLimits) -> dict[str, Any]:
        """Figures of the whole load; times in milliseconds."""
        good = [outcome for outcome in self.outcomes if outcome.error is None]
        if not good:
            return {"completed": 0, "failed": len(self.outcomes), "error": self.outcomes[0].error}
        seconds = max(outcome.ended for outcome in self.outcomes) - min(outcome.sent for outcome in self.outcomes)
        times = [figures(outcome) for outcome in good]
        met = sum(_meets(entry, limits) for entry in times)
        found: dict[str, Any] = {
            "rate": None if math.isinf(self.workload.rate) else self.workload.rate,
            "completed": len(good),
            "failed": len(self.outcomes) - len(good),
            "seconds": seconds,
            "requests_per_second": len(good) / seconds,
            "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
            "output_tokens": sum(outcome.output_tokens for outcome in good),
            "output_tokens_per_second": sum(outcome.output_tokens for outcome in good) / seconds,
            "total_tokens_per_second": sum(o.prompt_tokens + o.output_tokens for o in good) / seconds,
            "goodput": met / seconds,
            "goodput_share": met / len(self.outcomes),
        }
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            found[name] = _spread([value for entry in times if (value := entry[name]) is not None])
        gaps = [1000 * (b - a) for o in good for at in o.pieces.values() for a, b in pairwise(at)]
        found["itl_ms"] = _spread(gaps)
        return found | self._counted()

    def _counted(self) -> dict[str, float]:
        """What the server counted in the load."""
        found: dict[str, float] = {}
        grown = {name: self.after[name] - self.before.get(name, 0) for name in self.after}
        if grown.get("prefix_queries"):
            found["prefix_hit_rate"] = grown["prefix_hits"] / grown["prefix_queries"]
        if "preemptions" in grown:
            found["preemptions"] = grown["preemptions"]
        busy = [sample for sample in self.samples if sample.get("running") and sample.get("blocks")]
        saved = [(sample["blocks_saved"], sample["cache_usage"] * sample["blocks"]) for sample in busy]
        if saved:
            found["blocks_saved"] = mean(more / (used + more) for more, used in saved)
        usage = [sample["cache_usage"] for sample in self.samples if "cache_usage" in sample]
        if usage:
            found["cache_usage_peak"] = max(usage)
        return found

    def requests(self, load: int) -> list[dict[str, Any]]:
        """Each request, times in milliseconds, `sent` after the load's start."""
        return [
            {
                "load": load,
                "sent_ms": 1000 * (outcome.sent - self.start),
                "prompt_tokens": outcome.prompt_tokens or len(outcome.planned.prompt),
                "cached_tokens": outcome.cached_tokens,
                "output_tokens": outcome.output_tokens,
                **(figures(outcome) if outcome.error is None else {"error": outcome.error}),
            }
            for outcome in self.outcomes
        ]


def figures(outcome: RequestOutcome) -> dict[str, float | None]:
    """A request's times in milliseconds; tpot is None for answers of one token."""
    first = min(at[0] for at in outcome.pieces.values())
    tokens = outcome.output_tokens / len(outcome.pieces)
    spans = [at[-1] - at[0] for at in outcome.pieces.values()]
    return {
        "ttft_ms": 1000 * (first - outcome.sent),
        "tpot_ms": 1000 * mean(spans) / (tokens - 1) if tokens > 1 else None,
        "e2e_ms": 1000 * (outcome.ended - outcome.sent),
    }


def _meets(entry: dict[str, float | None], limits: LatencyLimits) -> bool:
    pairs = ((entry[name.removeprefix("goodput_")], limit) for name, limit in asdict(limits).items())
    return all(limit is None or value is None or value <= limit for value, limit in pairs)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (linear between ranks)."""
    if not values:
        return {}
    found = numpy.percentile(values, PERCENTILES).tolist()
    return {"mean": mean(values)} | {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
