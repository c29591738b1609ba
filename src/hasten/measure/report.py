"""The report of a ladder: plain JSON values with a schema, built from what the rungs measured.

    {"schema": 1, "kind": "generate" | "train", "machine": {...}, "settings": {...}, "limits": {...}, "rows": [...]}

A row that worked holds its name and techniques, the median over the rounds of every metric, `speedup` against the first
rung that worked, `bandwidth_gb_s` and the utilisation, `peak_memory_bytes` above a process that has imported torch,
what the rung says of itself, and under `min`, `max` and `rounds` where the medians come from. A rung that was set up a
second time, with what the first time left behind, has the seconds of that as `warm_…`. A further row of a rung has
`ratio` against the row that `ratio_to` names in place of a speed-up, and shares the rung's process and peak. A row that
did not work holds `error` (and `traceback` if it was unforeseen) in place of figures.

Utilisation, each formed within one round:
- `mbu` = decode_tokens_per_second × bytes_per_token / measured read bandwidth
- `mfu` = tokens_per_second × flops_per_token / measured rate of matrix products in `matrix_dtype`
- `prefill_mfu`: the same of prefill_tokens_per_second, with prefill_flops_per_token if the rung gives it
- `vendor_mbu`, `vendor_mfu`, `vendor_prefill_mfu`: over the data sheet's figures, on GPUs that are known
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hasten.machine import Limits, vendor_limits
from hasten.measure.process import RungRun

SCHEMA = 1
# the metric that is the speed of a ladder, by its kind
SPEED_METRICS = {"generate": "decode_tokens_per_second", "train": "tokens_per_second"}


def build_report(
    *, kind: str, machine: Mapping[str, Any], settings: Mapping[str, Any], runs: Sequence[RungRun], limits: RungRun
) -> dict[str, Any]:
    """The report of rungs that have run. `limits`: what measured the machine's limits beside them."""
    speed, device = SPEED_METRICS[kind], limits.rung.device
    gpu = gpu_of(machine, device)
    vendor = None if gpu is None else vendor_limits(gpu["name"])
    first = next((run for run in runs if run.error is None), None)
    rows: list[dict[str, Any]] = []
    for run in runs:
        name, techniques = run.rung.name, list(run.rung.techniques)
        if run.error is not None:
            trace = {"traceback": run.traceback} if run.traceback else {}
            rows.append({"name": name, "techniques": techniques, "error": run.error} | trace)
            continue
        assert first is not None
        facts = dict(run.description)
        further = facts.pop("rows", {})
        for ending, known in {"": facts, **further}.items():
            held = known.get("ratio_to", "") if ending else None  # the ending of the row it is held against
            rounds: list[dict[str, float]] = []
            for index, measured in enumerate(run.rounds):
                metrics = _of_row(measured, ending)
                limit = limits.rounds[index] if index < len(limits.rounds) else {}
                found = {**metrics, **_utilisation(metrics, known, limit, vendor)}
                base = first.rounds[index] if held is None else _of_row(measured, held)
                if base.get(speed) and speed in metrics:
                    found["speedup" if held is None else "ratio"] = metrics[speed] / base[speed]
                rounds.append(found)
            row: dict[str, Any] = {"name": f"{name}-{ending}" if ending else name, "techniques": techniques}
            row |= known | _over_rounds(rounds, median)
            if held is not None:
                row["ratio_to"] = f"{name}-{held}" if held else name
            else:
                row["peak_memory_bytes"] = run.peak_memory_bytes
                row |= {f"warm_{key}": fact for key, fact in (run.again or {}).items() if key.endswith("_seconds")}
            row["min"], row["max"], row["rounds"] = _over_rounds(rounds, min), _over_rounds(rounds, max), rounds
            rows.append(row)
    return {
        "schema": SCHEMA,
        "kind": kind,
        "machine": dict(machine),
        "settings": dict(settings),
        "limits": _limits(limits, vendor, device),
        "rows": rows,
    }


def _of_row(measured: Mapping[str, float], ending: str) -> dict[str, float]:
    """The metrics of one row of a rung, without the ending they are marked with (the rung's own, "", with none)."""
    marked = ((name.rpartition("|"), value) for name, value in measured.items())
    return {metric: value for (mark, _, metric), value in marked if mark == ending}


def _over_rounds(rounds: Sequence[Mapping[str, float]], combine: Any) -> dict[str, float]:
    """Each metric over the rounds that have it."""
    names = dict.fromkeys(name for found in rounds for name in found)  # in order, each once
    return {name: combine([found[name] for found in rounds if name in found]) for name in names}


def _utilisation(
    metrics: Mapping[str, float], description: Mapping[str, Any], limit: Mapping[str, float], vendor: Limits | None
) -> dict[str, float]:
    known = {**description, **metrics}
    dtype, flops = known.get("matrix_dtype", "float32"), known.get("flops_per_token")
    bandwidth, rate = limit.get("bandwidth"), limit.get(f"rate {dtype}")
    vendor_rate = vendor.rates.get(dtype) if vendor else None
    found = {"bandwidth_gb_s": bandwidth / 1e9} if bandwidth else {}
    for name, speed, cost, measured, of_vendor in (
        ("mbu", "decode_tokens_per_second", known.get("bytes_per_token"), bandwidth, vendor and vendor.bandwidth),
        ("mfu", "tokens_per_second", flops, rate, vendor_rate),
        ("prefill_mfu", "prefill_tokens_per_second", known.get("prefill_flops_per_token", flops), rate, vendor_rate),
    ):
        if speed not in known or cost is None:
            continue
        if measured:
            found[name] = known[speed] * cost / measured
        if of_vendor:
            found[f"vendor_{name}"] = known[speed] * cost / of_vendor
    return found


def _limits(limits: RungRun, vendor: Limits | None, device: str) -> dict[str, Any]:
    if limits.error is not None and not limits.rounds:
        return {"device": device, "error": limits.error}
    middle = _over_rounds(limits.rounds, median)
    found: dict[str, Any] = {
        "device": device,
        "bandwidth_gb_s": middle["bandwidth"] / 1e9,
        "matrix_rates": {name.removeprefix("rate "): middle[name] for name in middle if name.startswith("rate ")},
        "rounds": limits.rounds,
    }
    if vendor:
        found["vendor"] = {"bandwidth_gb_s": vendor.bandwidth / 1e9, "matrix_rates": vendor.rates}
    return found


def gpu_of(machine: Mapping[str, Any], device: str) -> Mapping[str, Any] | None:
    """The GPU that `device` is, as a report's machine (`describe`) has it; None for another device."""
    gpus, index = machine.get("gpus", []), int(device.partition(":")[2] or 0)
    return gpus[index] if device.startswith("cuda") and index < len(gpus) else None
