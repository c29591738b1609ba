"""The tables of a measurement: printed at the end of a run, and written into the pages by benchmarks/tables.py.

python benchmarks/gpu/report.py OUT/results.json > benchmarks/results/gpu.json      # what is committed of a run
"""

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

Results = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
MODELS = {
    "7b-bf16": "7B bf16", "7b-int8": "7B int8", "7b-int4": "7B int4, groups of 32",
    "1b-bf16": "1.1B bf16", "1b-int8": "1.1B int8", "1b-int4": "1.1B int4, groups of 32",
}  # fmt: skip
TRAINERS = (
    "nanogpt-12",
    "hasten-12",
    "nanogpt-32",
    "hasten-32",
    "hasten-32-fp8",
    "nanogpt-wide",
    "hasten-wide",
    "hasten-wide-fp8",
)
CONTESTANTS = {"hasten": "hasten", "flash-triton": "our Triton", "fa2": "FlashAttention-2", "cudnn": "cuDNN"}


def every(results: Results, job: str, command: str, key: str) -> list[Any]:
    """A value from each time that a job ran a command."""
    found = results.get(job, {}).get(command, [])
    return [one[key] for one in found if isinstance(one, dict) and one.get(key) is not None]


def median(results: Results, job: str, command: str, key: str) -> float | None:
    values = every(results, job, command, key)
    return statistics.median(values) if values else None


def shown(value: float | None, style: str = ",.0f") -> str:
    return "" if value is None else format(value, style)


def ratio(a: float | None, b: float | None, style: str = ".2f") -> str:
    return f"{a / b:{style}}" if a and b else ""


def copy_rate(results: Results) -> float:
    return median(results, "baseline", "measure", "copy_bytes_per_s") or float("nan")


def decode(results: Results) -> Table:
    """One stream, tokens/s."""
    head = ["one stream, tokens/s", "waited for", "queued", "`hasten.generate`", "gpt-fast", "its generate", "limit"]
    head += ["of gpt-fast", "of the limit", "launches"]
    rows = []
    for key, name in MODELS.items():
        ours, theirs = f"hasten-{key}", f"gptfast-{key}"
        queued, read = (median(results, ours, "measure", what) for what in ("queued", "bytes_per_token"))
        if queued is None or read is None:
            continue
        limit, peer = copy_rate(results) / read, median(results, theirs, "measure", "queued")
        user = [one["decode"] for one in every(results, ours, "user", "second")]
        cells = [median(results, ours, "measure", "waited"), queued, user[0] if user else None, peer]
        cells += [median(results, theirs, "measure", "user"), limit]
        row = [name, *map(shown, cells), ratio(queued, peer), ratio(queued, limit, ".0%")]
        rows.append([*row, shown(median(results, ours, "profile", "launches"))])
    return head, rows


def prefill(results: Results) -> Table:
    """Prompts of 512 and 2,048 tokens, tokens/s."""
    rows = []
    for key, name in MODELS.items():
        cells = [
            median(results, f"{who}-{key}", "prefill", n) for n in ("512", "2048") for who in ("hasten", "gptfast")
        ]
        if any(cells):
            rows.append([name, *map(shown, cells)])
    return ["prompts, tokens/s", "512: hasten", "gpt-fast", "2,048: hasten", "gpt-fast"], rows


def serving(results: Results) -> Table:
    """Many sequences, tokens/s."""
    head = ["1.1B, 128 in, 128 out", "sequences", "decode steps, tokens/s", "ms a step", "the static step", "share"]
    head += ["the whole run", "share"]
    rows = []
    for format in ("bf16", "int8", "int4"):
        for count in (1, 64, 256):
            command = f"measure {count}"
            own, static = (
                median(results, f"{job}-{format}", command, "decode_tokens_per_s") for job in ("engine", "static")
            )
            whole = median(results, f"engine-{format}", command, "whole_tokens_per_s")
            if own is not None or static is not None or whole is not None:
                step = median(results, f"engine-{format}", command, "ms_per_decode_step")
                row = [format, str(count), shown(own), shown(step, ".2f"), shown(static), ratio(own, static, ".0%")]
                rows.append([*row, shown(whole), ratio(whole, static, ".0%")])
    return head, rows


def training(results: Results) -> Table:
    """Trainers by their rows of 1,024 tokens: GPT-2 124M, and one 2,048 wide (8 layers, 8 rows)."""
    head = ["trainer and rows", "tokens/s", "ms", "GPU busy, ms", "launches", "MFU", "peak, GB"]
    head += ["of nanoGPT", "its memory"]
    rows = []
    for name in TRAINERS:
        speeds = every(results, name, "measure", "tokens_per_s")
        if not speeds:
            continue
        peer = f"nanogpt-{name.split('-')[1]}"
        spread = f" ({min(speeds):,.0f} to {max(speeds):,.0f})" if len(speeds) > 1 else ""
        busy = median(results, name, "profile", "gpu_us")
        peaks = [max(every(results, job, "measure", "peak_gb"), default=None) for job in (name, peer)]
        row = [name, f"{statistics.median(speeds):,.0f}{spread}", shown(median(results, name, "measure", "ms"), ".1f")]
        row += [shown(busy / 1e3 if busy else None, ".1f"), shown(median(results, name, "profile", "launches"))]
        row += [shown(median(results, name, "measure", "mfu"), ".1%"), shown(peaks[0], ".1f")]
        row.append(ratio(statistics.median(speeds), median(results, peer, "measure", "tokens_per_s")))
        rows.append([*row, ratio(*peaks)])
    return head, rows


def losses(results: Results) -> Table:
    """The losses of trainers that began with the same weights."""
    rows = []
    for name in TRAINERS:
        found = every(results, name, "losses", "losses")
        if found:
            rows.append([name, *(f"{found[-1][i]:.3f}" if len(found[-1]) > i else "" for i in (0, 9, 19, 39, 59))])
    return ["loss at step", "1", "10", "20", "40", "60"], rows


def ladder(results: Results) -> Table:
    """The rungs of the article's figure 2."""
    rows = []
    for name in [job for job in results if job.startswith("rung-")]:
        speed = median(results, name, "measure", "tokens_per_s")
        if speed is not None:
            cells = [shown(speed), shown(median(results, name, "measure", "ms"), ".1f")]
            cells += [shown(median(results, name, "measure", "mfu"), ".1%")]
            rows.append([name.removeprefix("rung-"), *cells, shown(median(results, name, "measure", "peak_gb"), ".1f")])
    return ["12 × 1,024", "tokens/s", "ms", "MFU", "peak, GB"], rows


def attention(results: Results) -> Table:
    """TFLOP/s of attention alone: forward / forward and backward, captured."""
    rows, found = [], every(results, "attention", "measure", "rows")
    for one in found[-1] if found else ():
        cells = []
        for name in CONTESTANTS:
            rate = one["tflops"].get(name)
            cells.append(f"{rate[0]:.0f} / {rate[1]:.0f}" if isinstance(rate, list) else "")
        rows.append([f"{one['head_dim']}", f"{one['tokens']:,}", "causal" if one["causal"] else "full", *cells])
    return ["head size", "tokens", "", *CONTESTANTS.values()], rows


def products(results: Results) -> Table:
    """Microseconds of one product with cold weights, and GB/s of its own bytes for one row."""
    found = every(results, "products", "measure", "rows")
    every_row = found[-1] if found else []
    formats = list(dict.fromkeys(row[2] for row in every_row))
    rows = []
    for n, k, count in dict.fromkeys((row[0], row[1], row[3]) for row in every_row):
        cells = []
        for format in formats:
            own = [row for row in every_row if row[:4] == [n, k, format, count] and row[5] is not None]
            share = own[0][5] * 1e9 / copy_rate(results) if own else 0.0
            cells.append((f"{own[0][4]:.1f}" + (f" ({share:.0%})" if count == 1 and share > 0 else "")) if own else "")
        rows.append([f"{n} × {k}", str(count), *cells])
    return ["matrix, µs", "rows", *formats], rows


TABLES = {
    "decode": decode,
    "prefill": prefill,
    "serving": serving,
    "training": training,
    "losses": losses,
    "ladder": ladder,
    "attention": attention,
    "products": products,
}


def compact(report: dict[str, Any]) -> dict[str, Any]:
    """What is committed: without logs and traces, and of a profile the six longest kernels."""

    def short(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: short(v, k) for k, v in value.items() if k not in ("trace", "log", "output")}
        if isinstance(value, list):
            return [short(one) for one in (value[:6] if key == "kernels" else value)]
        return round(value, 4) if isinstance(value, float) and abs(value) < 1e6 else value

    return {"results": short(report["results"])}


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))


def tables(results: Results) -> str:
    """All tables of a run as text, its tests and what failed."""
    parts = []
    base = (results.get("baseline", {}).get("measure") or [{}])[0]
    if "copy_bytes_per_s" in base:
        rates = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in base["flops"].items())
        parts.append(f"copy {base['copy_bytes_per_s'] / 1e12:.2f} TB/s, {rates}")
    for name, table in TABLES.items():
        try:
            head, rows = table(results)
        except Exception as error:  # one table's mistake must not cost the others
            parts.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if rows:
            parts.append(aligned(head, rows))
    if tests := results.get("tests"):
        counts = " ".join(f"{key} {tests[key]}" for key in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"))
        parts.append(f"tests: {counts} in {tests['seconds']} s {' '.join(tests['failed'])[:900]}")
        parts += tests["reasons"][: len(tests["failed"])]
    for name, one in results.get("commands", {}).items():
        if one["status"] != 0:
            parts.append(f"command {name}: status {one['status']}: {one['output'][-250:]!r}")
    for name, one in results.items():
        failure = one.get("failed") if isinstance(one, dict) else None
        if isinstance(failure, dict):
            parts.append(f"failed {name}: {str(failure.get('error'))[:200]}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(compact(json.load(file)), indent=None, separators=(",", ":")))
