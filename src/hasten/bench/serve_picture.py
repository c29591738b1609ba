"""Latency against load: the report of `hasten bench serve` with several rates as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.bench.draw import draw_curves
from hasten.bench.table import machine_line


def draw_latency(report: Mapping[str, Any], path: str) -> None:
    """TTFT and TPOT, median and 99th percentile in milliseconds, against the output tokens/s that were reached."""
    loads = [entry for entry in report["summary"] if "error" not in entry]
    loads.sort(key=lambda entry: entry["output_tokens_per_second"])
    series = {}
    for name, text in (("ttft_ms", "first token"), ("tpot_ms", "each further token")):
        for key, which in (("p50", "median"), ("p99", "99th percentile")):
            points = [(entry["output_tokens_per_second"], entry[name][key]) for entry in loads if entry[name]]
            if points:
                x, y = zip(*points, strict=True)
                series[f"{text}, {which}"] = (x, y)
    workload = report["workload"]
    what = f"{workload['prompt_tokens']}-token prompts, {workload['output_tokens']}-token answers"
    if workload["lengths"] != "fixed":
        what = f"lengths like {workload['lengths']}'s"
    machine = machine_line(report["machine"])
    draw_curves(
        series,
        path,
        title="Latency against load",
        subtitle=f"{workload['requests']} requests a load, {what}, n = {workload['n']}; {machine}",
        x_label="output tokens/s reached",
        y_label="milliseconds",
        log_y=True,
    )
