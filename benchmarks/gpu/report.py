"""The tables of a measurement: printed at the end of a run, and written into the pages by benchmarks/tables.py.

python benchmarks/gpu/report.py OUT/results.json [EARLIER.json] > benchmarks/results/gpu.json  # what is committed

EARLIER.json: what was committed of an earlier run on the same kind of card, for peers that were not ready in this one.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
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
RUNG = (("tokens_per_s", ",.0f"), ("ms", ".1f"), ("mfu", ".1%"), ("peak_gb", ".1f"))
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


def where(results: Results, job: str, command: str = "measure") -> tuple[Results, str]:
    """Where a job's figures are: in this run or, if it was not ready then, in the earlier one, which a † says."""
    earlier = results.get("earlier", {})
    return (results, "") if results.get(job, {}).get(command) or job not in earlier else (earlier, " †")


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
        limit, (source, mark) = copy_rate(results) / read, where(results, theirs)
        peer, its_user = (median(source, theirs, "measure", what) for what in ("queued", "user"))
        user = [one["decode"] for one in every(results, ours, "user", "second")]
        cells = [median(results, ours, "measure", "waited"), queued, user[0] if user else None]
        row = [name, *map(shown, cells), *(shown(one) + mark if one else "" for one in (peer, its_user)), shown(limit)]
        row += [ratio(queued, peer) + (mark if peer else ""), ratio(queued, limit, ".0%")]
        rows.append([*row, shown(median(results, ours, "profile", "launches"))])
    return head, rows


def prefill(results: Results) -> Table:
    """Prompts of 512 and 2,048 tokens, tokens/s."""
    rows = []
    for key, name in MODELS.items():
        cells = []
        for length in ("512", "2048"):
            for job in (f"hasten-{key}", f"gptfast-{key}"):
                source, mark = where(results, job)
                rate = median(source, job, "prefill", length)
                cells.append(shown(rate) + (mark if rate else ""))
        if any(cells):
            rows.append([name, *cells])
    return ["prompts, tokens/s", "512: hasten", "gpt-fast", "2,048: hasten", "gpt-fast"], rows


DISTURBED = 1.05  # times the static step's rate: no engine can be as fast


def engine_rate(results: Results, format: str, count: int) -> tuple[float | None, str]:
    """The engine's decode steps, tokens/s; the static step's, marked ‡, where the difference of two runs is impossible.

    It is so where something slowed down the shorter run, which is subtracted.
    """
    own, static = (
        median(results, f"{job}-{format}", f"measure {count}", "decode_tokens_per_s") for job in ("engine", "static")
    )
    return (static, " ‡") if own and static and own > DISTURBED * static else (own, "")


def serving(results: Results) -> Table:
    """Many sequences, tokens/s."""
    head = ["1.1B, 128 in, 128 out", "sequences", "decode steps, tokens/s", "ms a step", "the static step", "share"]
    head += ["the whole run", "share"]
    rows = []
    for format in ("bf16", "int8", "int4"):
        for count in (1, 64, 256):
            command = f"measure {count}"
            static = median(results, f"static-{format}", command, "decode_tokens_per_s")
            own, mark = engine_rate(results, format, count)
            whole = median(results, f"engine-{format}", command, "whole_tokens_per_s")
            if own is not None or static is not None or whole is not None:
                step = median(results, f"engine-{format}", command, "ms_per_decode_step")
                times = ["‡", "", shown(static), ""]
                if not mark:
                    times = [shown(own), shown(step, ".2f"), shown(static), ratio(own, static, ".0%")]
                row = [format, str(count), *times]
                rows.append([*row, shown(whole), ratio(whole, static, ".0%")])
    return head, rows


def training(results: Results) -> Table:
    """Trainers by their rows of 1,024 tokens: GPT-2 124M, and one 2,048 wide (8 layers, 8 rows)."""
    head = ["trainer and rows", "tokens/s", "ms", "GPU busy, ms", "launches", "MFU", "peak, GB"]
    head += ["of nanoGPT", "its memory"]
    rows = []
    for name in TRAINERS:
        (own, own_mark), peer = where(results, name), f"nanogpt-{name.split('-')[1]}"
        source, mark = where(results, peer)
        speeds = every(own, name, "measure", "tokens_per_s")
        if not speeds:
            continue
        spread = f" ({min(speeds):,.0f} to {max(speeds):,.0f})" if len(speeds) > 1 else ""
        busy = median(own, name, "profile", "gpu_us")
        pair = ((own, name), (source, peer))
        peaks = [max(every(place, job, "measure", "peak_gb"), default=None) for place, job in pair]
        row = [f"{name}{own_mark}", f"{statistics.median(speeds):,.0f}{spread}"]
        row.append(shown(median(own, name, "measure", "ms"), ".1f"))
        row += [shown(busy / 1e3 if busy else None, ".1f"), shown(median(own, name, "profile", "launches"))]
        row += [shown(median(own, name, "measure", "mfu"), ".1%"), shown(peaks[0], ".1f")]
        mark = mark if not own_mark else ""
        row.append(ratio(statistics.median(speeds), median(source, peer, "measure", "tokens_per_s")) + mark)
        rows.append([*row, ratio(*peaks) + mark])
    return head, rows


def losses(results: Results) -> Table:
    """The losses of trainers that began with the same weights."""
    rows = []
    for name in TRAINERS:
        found = every(results, name, "losses", "losses")
        if found:
            rows.append([name, *(f"{found[-1][i]:.3f}" if len(found[-1]) > i else "" for i in (0, 9, 19, 39, 59))])
    return ["loss at step", "1", "10", "20", "40", "60"], rows


def losses500(results: Results) -> Table:
    """The losses of GPT-2 124M over 500 steps of 12 × 1,024 tokens of real text, and the mean of the last 20."""
    rows, places = [], (1, 10, 50, 100, 200, 300, 400, 500)
    for name in ("losses-bf16", "losses-fp8"):
        source, mark = where(results, name, "losses500")
        for found in every(source, name, "losses500", "losses")[-1:]:
            cells = [f"{found[step - 1]:.3f}" if len(found) >= step else "" for step in places]
            rows.append([name.removeprefix("losses-") + mark, *cells, f"{statistics.mean(found[-20:]):.3f}"])
    return ["loss at step", *map(str, places), "mean of the last 20"], rows


def ladder(results: Results) -> Table:
    """The rungs of the article's figure 2."""
    rows = []
    for row in next(iter(every(results, "ladder", "measure", "rows")), ()):
        if "error" not in row:
            cells = [shown(row["tokens_per_second"]), shown(row["milliseconds_per_batch"], ".1f")]
            cells += [shown(row.get("mfu"), ".1%"), shown(row["peak_memory_bytes"] / 1e9, ".1f")]
            rows.append([row["name"], *cells])
    earlier = results.get("earlier", {})
    # Of a run before the command measured them, where it was not done in time.
    for name in [job for job in earlier if job.startswith("rung-") and not rows]:
        cells = [shown(median(earlier, name, "measure", key), style) for key, style in RUNG]
        rows.append([name.removeprefix("rung-") + " †", *cells])
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


def experts(results: Results) -> Table:
    """All experts of a layer of a Qwen3-30B-A3B: microseconds, and of the limit what few or many rows are bound by."""
    found = every(results, "experts", "measure", "rows")
    rows = []
    for name, count, us, rate, tflops in found[-1] if found else ():
        share = f"{rate * 1e9 / copy_rate(results):.0%}" if rate > 0 else ""
        rows.append([name, f"{count:,}", f"{us:,.1f}", share, f"{tflops:.0f}"])
    return ["experts", "rows", "µs", "of the bandwidth", "TFLOP/s"], rows


def drafts(results: Results) -> Table:
    """One stream with drafts, medians of tokens/s."""
    rows = []
    for kind, found in next(iter(every(results, "drafts", "measure", "kinds")), {}).items():
        cells = [
            statistics.median(one[key] for one in found) for key in ("generate_tokens_per_s", "whole_tokens_per_s")
        ]
        per = [statistics.median(one[key] for one in found) for key in ("tokens_a_step", "accepted")]
        rows.append([kind, *map(shown, cells), shown(per[0], ".1f"), shown(per[1], ".0%")])
    return ["1.1B bf16, drafts", "`hasten.generate`", "the engine", "tokens a step there", "accepted"], rows


def start(results: Results) -> Table:
    """Seconds from the command `hasten serve` to each mark."""
    marks = ("models_s", "first_token_s", "captured_s", "captured_steps")
    rows = []
    for job, size in (("start", "1.1B"), ("start-7b", "7B")):
        for name in ("cold", "warm"):
            cells = [median(results, job, f"measure {name}", mark) for mark in marks]
            if cells[0] is not None:
                rows.append([size, name, *(shown(one, ".1f") for one in cells[:3]), shown(cells[3])])
    return ["bf16", "compiled kernels", "answers, s", "first token", "last captured step", "captured steps"], rows


TABLES = {
    "decode": decode,
    "prefill": prefill,
    "serving": serving,
    "training": training,
    "losses": losses,
    "losses500": losses500,
    "ladder": ladder,
    "attention": attention,
    "products": products,
    "experts": experts,
    "drafts": drafts,
    "start": start,
}


CARRIED = ("gptfast-", "nanogpt-", "rung-", "losses-")  # from an earlier run


def measured(job: dict[str, Any]) -> bool:
    """Whether any command of a job found something."""
    return any(isinstance(found, list) and any("error" not in one for one in found) for found in job.values())


def compact(report: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is committed: without logs and traces, and of a profile the six longest kernels.

    earlier: what was committed of an earlier run on the same kind of card: it gives the peers, rungs and losses that
    this one has not, under "earlier".
    """

    def short(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: short(v, k) for k, v in value.items() if k not in ("trace", "log", "output")}
        if isinstance(value, list):
            return [short(one) for one in (value[:6] if key == "kernels" else value)]
        return round(value, 4) if isinstance(value, float) and abs(value) < 1e6 else value

    results = short(report["results"])
    if earlier is not None:
        before = earlier["results"].get("earlier", {}) | earlier["results"]
        jobs = {
            name: job
            for name, job in before.items()
            if name.startswith(CARRIED) and measured(job) and not measured(results.get(name, {}))
        }
        results["earlier"] = {"run": earlier["results"]["run"], "baseline": earlier["results"]["baseline"], **jobs}
    return {"results": results}


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
        counts = " ".join(f"{key} {tests[key]}" for key in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "left"))
        parts.append(f"tests: {counts} in {tests['seconds']} s")
        parts += tests["reasons"][:20]
        parts.append("\n".join(f"{seconds:6.1f} s  {name}" for seconds, name in tests["slowest"]))
    for name, one in results.get("commands", {}).items():
        if one["status"] != 0:
            parts.append(f"command {name}: status {one['status']}: {one['output'][-250:]!r}")
    for name, one in results.items():
        failure = one.get("failed") if isinstance(one, dict) else None
        if isinstance(failure, dict):
            parts.append(f"failed {name}: {str(failure.get('error'))[:200]}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    reports = [json.loads(Path(name).read_text()) for name in sys.argv[1:3]]
    print(json.dumps(compact(*reports), indent=None, separators=(",", ":")))
