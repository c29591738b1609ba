"""docs/results/gpu-status.md's one table: what ran on a GPU, how fast, when, on which card, and what waits.

The first rows are figures of the measurement that is committed as benchmarks/results/gpu.json; the others are kept by
hand in benchmarks/results/gpu-status.json.
"""

from collections.abc import Sequence
from typing import Any

from gpu.report import MODELS, Results, copy_rate, every, median, shown, where

MEASURE = "`benchmarks/gpu/measure.py`"
HEAD = ["what", "figure", "date", "card", "command"]


def _each(results: Results, jobs: Sequence[str], command: str, key: str) -> str:
    values = [median(results, job, command, key) for job in jobs]
    return " / ".join(shown(value) or "-" for value in values)


def _limits(results: Results, jobs: Sequence[str]) -> str:
    read = [median(results, job, "measure", "bytes_per_token") for job in jobs]
    return " / ".join(shown(copy_rate(results) / one) if one else "-" for one in read)


def _decode(results: Results, size: str, formats: Sequence[str]) -> tuple[str, str]:
    ours, theirs = ([f"{who}-{size}-{format}" for format in formats] for who in ("hasten", "gptfast"))
    source, mark = where(results, theirs[0])
    figure = f"**{_each(results, ours, 'measure', 'queued')}** tokens/s; gpt-fast "
    figure += f"{_each(source, theirs, 'measure', 'queued')}{mark}; limit {_limits(results, ours)}"
    names = " / ".join(MODELS[f"{size}-{format}"].partition(" ")[2] for format in formats)
    return f"one stream, {MODELS[f'{size}-{formats[0]}'].partition(' ')[0]} {names}", figure


def _user(results: Results) -> tuple[str, str]:
    found = []
    for format in ("bf16", "int8", "int4"):
        seconds = every(results, f"hasten-7b-{format}", "user", "second")
        found.append(shown(seconds[-1]["decode"]) if seconds else "-")
    source, mark = where(results, "gptfast-7b-bf16")
    theirs = _each(source, [f"gptfast-7b-{format}" for format in ("bf16", "int8", "int4")], "measure", "user")
    return "`hasten.generate`, 7B bf16 / int8 / int4", f"**{' / '.join(found)}** tokens/s; gpt-fast's {theirs}{mark}"


def _serving(results: Results, format: str) -> tuple[str, str]:
    cells = []
    for count in (1, 64, 256):
        own = median(results, f"engine-{format}", f"measure {count}", "decode_tokens_per_s")
        own = own or median(results, f"engine-{format}", f"measure {count}", "whole_tokens_per_s")
        cells.append(shown(own) or "-")
    static = [median(results, f"static-{format}", f"measure {n}", "decode_tokens_per_s") for n in (1, 64, 256)]
    figure = f"**{' / '.join(cells)}** tokens/s; the static step {' / '.join(shown(one) or '-' for one in static)}"
    return f"the engine, 1.1B {format}, 1 / 64 / 256 sequences", figure


def _training(results: Results) -> tuple[str, str]:
    cells = []
    for batch in (12, 32):
        names = (f"hasten-{batch}", f"nanogpt-{batch}")
        speeds = _each(results, names, "measure", "tokens_per_s")
        peaks = [max(every(results, name, "measure", "peak_gb"), default=None) for name in names]
        cells.append(f"{batch} rows {speeds} tokens/s in {' / '.join(shown(one, '.1f') or '-' for one in peaks)} GB")
    for name, words in (("hasten-32-fp8", "fp8 at 32 rows"), ("hasten-wide-fp8", "fp8, 2,048 wide")):
        if fp8 := median(results, name, "measure", "tokens_per_s"):
            peer = median(results, "nanogpt-wide", "measure", "tokens_per_s") if "wide" in name else None
            cells.append(f"{words} {fp8:,.0f}" + (f" / {peer:,.0f}" if peer else ""))
    return "GPT-2 124M, hasten / nanoGPT", "; ".join(cells)


def _attention(results: Results) -> tuple[str, str]:
    found = every(results, "attention", "measure", "rows")
    row = [one for one in (found[-1] if found else ()) if one["tokens"] == 8192 and one["causal"]]
    cells = []
    for one in row:
        rates = {k: v for k, v in one["tflops"].items() if isinstance(v, list)}
        parts = [f"{name} {rates[name][0]:.0f} / {rates[name][1]:.0f}" for name in rates]
        cells.append(f"heads of {one['head_dim']}: {', '.join(parts)}")
    return "attention, causal, 8,192 tokens, TFLOP/s forward / with backward", "; ".join(cells)


def _products(results: Results) -> tuple[str, str]:
    found = every(results, "products", "measure", "rows")
    rows = [row for row in (found[-1] if found else ()) if row[:2] == [4096, 4096] and row[3] == 1]
    return "one row times 4096 × 4096, cold", ", ".join(f"{row[2]} {row[4]} µs" for row in rows if row[5])


def _tests(results: Results) -> tuple[str, str]:
    tests = results.get("tests", {})
    bad = tests.get("FAILED", 0) + tests.get("ERROR", 0)
    end = f", {tests['left']} not run" if tests.get("left") else ""
    if "left" not in tests and tests.get("status") not in (0, 1):
        end = " when the time was over"
    if not tests:
        return "tests that need a GPU", "-"
    earlier = tests.get("resumed", 0)
    more = f" (and {earlier} in an earlier run)" if earlier else ""
    return "tests that need a GPU", f"{tests['PASSED'] - earlier} passed{more}, {bad} failed{end}"


def status(report: dict[str, Any], by_hand: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: report as benchmarks/results/gpu.json, by_hand as gpu-status.json."""
    results = report["results"]
    pairs = [_decode(results, "7b", ("bf16", "int8", "int4")), _decode(results, "1b", ("bf16", "int4"))]
    measured = [format for format in ("bf16", "int8", "int4") if f"engine-{format}" in results]
    pairs += [_user(results), *(_serving(results, format) for format in measured)]
    pairs += [_training(results), _attention(results), _products(results)]
    run = results.get("run", {})
    date, card = run.get("date", ""), ",".join(str(run.get("card", "")).split(",")[:1])
    rows = [[what, figure, date, card, MEASURE] for what, figure in pairs]
    rows.append([*_tests(results), date, card, "`pytest -m gpu`"])
    rows += [[one[key] for key in ("what", "figure", "date", "card", "command")] for one in by_hand["rows"]]
    return HEAD, rows
