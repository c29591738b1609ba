"""Prometheus metrics under the names that vLLM's dashboards use, with the prefix `hasten:`.

https://docs.vllm.ai/en/latest/usage/metrics.html. It has a registry of its own, so that metrics of the
process do not appear in it and two servers in one process do not collide. Gauges and the engine's counters are read at
each scrape; only the histograms are written by requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hasten.engine.settings import COUNTERS, GAUGES, Stats

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
SAMPLES = (1, 2, 5, 10, 20)


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str, stats: Callable[[], Mapping[str, Stats]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats))
        self.model_name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"hasten:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.between = histogram("inter_token_latency_seconds", "Between two pieces of one answer.", BETWEEN)
        self.each = histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first, by request.", BETWEEN
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", SECONDS)
        self.prompts = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.answers = histogram("request_generation_tokens", "Tokens of one answer.", TOKENS)
        self.samples = histogram("request_params_n", "Samples asked for.", SAMPLES)
        self.most = histogram("request_params_max_tokens", "Most tokens asked for.", TOKENS)
        labels = ("model_name", "finished_reason")
        self.finished = Counter("hasten:request_success", "Answers by how they ended.", labels, registry=self.registry)
        self.responses = Counter(
            "hasten:http_requests", "Responses by path and status.", ["path", "status"], registry=self.registry
        )

    def text(self) -> bytes:
        """The text that /metrics returns."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Collects the engine's statistics, labelled by replica if there are several."""

    def __init__(self, model_name: str, stats: Callable[[], Mapping[str, Stats]]) -> None:
        self._name, self._stats = model_name, stats

    def collect(self) -> Iterable[Metric]:
        each = self._stats()
        names = ["model_name"] if "" in each else ["model_name", "replica"]
        labels = {replica: [self._name, replica][: len(names)] for replica in each}
        for family, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (field, text) in metrics.items():
                metric = family(f"hasten:{name}", text, labels=names)
                for replica, stats in each.items():
                    metric.add_metric(labels[replica], float(getattr(stats, field)))
                yield metric
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens that were taken, by their place."
        metric = CounterMetricFamily(f"hasten:{name}", text, labels=[*names, "position"])
        for replica, stats in each.items():
            for position, count in enumerate(stats.accepted_by_position):
                metric.add_metric([*labels[replica], str(position)], count)
        yield metric


def median(histogram: Histogram) -> float | None:
    """The median of what a histogram observed, interpolated within its bucket; None if it observed nothing."""
    samples = [sample for metric in histogram.collect() for sample in metric.samples if sample.name.endswith("_bucket")]
    half = max((sample.value for sample in samples), default=0) / 2
    below, edge = 0.0, 0.0
    for sample in samples:
        bound = float(sample.labels["le"])
        if sample.value >= half > 0:
            inside = (half - below) / (sample.value - below)
            return edge if math.isinf(bound) else edge + inside * (bound - edge)
        below, edge = sample.value, bound
    return None
