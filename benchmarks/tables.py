"""Write the tables of the pages from the committed JSON, and say where a page and its JSON differ.

    python benchmarks/tables.py             # every page
    python benchmarks/tables.py --check     # change nothing; exit status 1 where a table is not its JSON's

In a page a table is between two marks, the first of which names a file of benchmarks/results and, if it can be
shown in several ways, the way:

    <!-- table: compare-avx2 -->
    <!-- /table -->

Where there is no such file, the page says "Not measured yet." in its place.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu.aims import aims as gpu_aims
from gpu.report import TABLES as GPU
from gpu.report import median as gpu_median
from gpu.report import ratio, shown, where
from gpu.status import status as gpu_status

from hasten.bench.generate import RUNGS
from hasten.measure.report import SPEED_METRICS
from hasten.measure.script import Report, Table, markdown
from hasten.measure.table import COLUMNS, cell, format_value, limits_line, machine_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "Not measured yet."
GPU_FORMATS = ("bf16", "int8", "int4")  # of one stream, beside gpt-fast
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"(<!-- table: (\S+)(?: (\S+))? -->\n).*?(<!-- /table -->)", re.DOTALL)
SUBJECTS = (
    *(
        "attention",
        "busy",
        "cache",
        "draft_parts",
        "equal_steps",
        "finetuning",
        "memory",
        "mutants",
        "parallel",
        "peers.nanogpt",
        "plan",
        "plan_ranks",
        "plan_training",
    ),
    *("precision", "products", "profiling", "qat", "quantization", "quantize_versions", "replica_routing"),
    *("replicas", "serving"),
    *("sharing", "slow_link", "soak", "sparse", "speculation", "speeds", "training_figures", "training_races"),
    *("wheels", "zero"),
)


def beside_others(report: Report) -> str:
    """`compare.py programs`: ours and theirs, medians, and the ratio of each round, or of turns the quartiles."""
    by_turns = "turns" in report.get("protocol", {})

    def rounds(pair: Report, metric: str) -> str:
        worked = [one for one in pair["rounds"] if "error" not in one["peer"] and "error" not in one["hasten"]]
        ratios = [one["hasten"][metric] / one["peer"][metric] for one in worked]
        if by_turns and len(ratios) > 1:
            low, middle, high = quantiles(ratios, n=4)
            return f"{middle:.2f} ({low:.2f} to {high:.2f})"
        return " ".join(f"{ratio:.2f}" for ratio in ratios)

    each = "turn by turn" if by_turns else "in each round"
    head = ["ours / theirs", "decode, tokens/s", "ratio", each, "share of the read bandwidth"]
    head += ["prefill, tokens/s", "ratio", each]
    rows = []
    for pair in report["pairs"]:
        ours, theirs, ratio = pair["median"]["hasten"], pair["median"]["peer"], pair["ratio"]
        rows.append(
            [
                f"{pair['hasten']} / {pair['peer']} {their_format(pair['model'])}",
                f"{ours['decode']:.1f} / {theirs['decode']:.1f}",
                f"{ratio['decode']:.2f}×",
                rounds(pair, "decode"),
                f"{ours['share_of_bandwidth']:.0%} / {theirs['share_of_bandwidth']:.0%}",
                f"{ours['prefill']:.0f} / {theirs['prefill']:.0f}",
                f"{ratio['prefill']:.2f}×",
                rounds(pair, "prefill"),
            ]
        )
    return markdown(head, rows)


def ratios(report: Report) -> str:
    """`compare.py programs` in short: the ratios of the medians."""
    rows = []
    for pair in report["pairs"]:
        speed, ratio = pair["median"]["hasten"], pair["ratio"]
        name = f"{pair['hasten']} / {pair['peer']} {their_format(pair['model'])}"
        shown = [f"{speed['decode']:.1f}", f"{ratio['decode']:.2f}×", f"{speed['prefill']:.0f}"]
        rows.append([name, *shown, f"{ratio['prefill']:.2f}×"])
    return markdown(["ours / theirs", "ours, decode tokens/s", "ratio", "ours, prefill tokens/s", "ratio"], rows)


def their_format(model: str) -> str:
    """ "l-q8_0.gguf" and "l-Instruct.Q8_0.gguf" -> "Q8_0", "ov-int8" -> "int8"."""
    name = model.removesuffix(".gguf").rpartition("-")[2].rpartition(".")[2]
    return name.upper() if model.endswith(".gguf") else name


def by_bytes(report: Report) -> str:
    """`compare.py files --beside uniform`: what a token of a mixed file takes over what its bytes predict."""
    rows = []
    for one in report["by_bytes"]:
        pairs = [pair for pair in report["pairs"] if pair["hasten"] == one["hasten"]]
        ours = pairs[0]["median"]["hasten"]["decode"]
        size = pairs[0]["weight_bytes_per_token"]["hasten"]
        cells = [f"{one['hasten']}", f"{size / 1e6:.0f} MB, {ours:.1f} tokens/s"]
        for pair in pairs:
            size, speed = pair["weight_bytes_per_token"]["peer"], pair["median"]["peer"]["decode"]
            cells.append(f"{size / 1e6:.0f} MB, {speed:.1f}")
        rows.append([*cells, f"{one['ratio']:.2f}×", " ".join(f"{ratio:.2f}" for ratio in one["ratios"])])
    kinds = [their_format(pair["model"]) for pair in report["pairs"][:2]]
    head = ["", "the mixed file", *(f"{kind} throughout" for kind in kinds), "time / predicted", "each"]
    return markdown(head, rows)


SHORT = ("decode_tokens_per_second", "speedup", "mbu", "perplexity", "kl_mean", "peak_memory_bytes")


def ladder(report: Report, only: tuple[str, ...] = ()) -> str:
    """`hasten bench generate`, `train` and `heads`, as they print it. only: these columns."""
    rows, speed = report["rows"], SPEED_METRICS[report["kind"]]
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    columns = [column for column in columns if not only or column[1] in only]
    body = []
    for row in rows:
        cells = [row["name"]]
        for _, key, style in columns:
            low, high = row.get("min", {}).get(key), row.get("max", {}).get(key)
            spread = f" ({format_value(low, style)}-{format_value(high, style)})" if key == speed else ""
            cells.append(cell(row, key, style) + spread)
        body.append(cells)
    settings, machine = report["settings"], machine_line(report["machine"], report["limits"]["device"])
    end = f"{machine}, {settings['threads']} threads; {settings['rounds']} rounds; {limits_line(report)}."
    return f"{markdown(['rung', *(heading for heading, _, _ in columns)], body)}\n\n{end}"


def formats(report: Report) -> str:
    """`hasten bench generate`: what each format of the weights costs and gives, beside bfloat16."""
    rows = {row["name"]: row for row in report["rows"] if "kl_mean" in row}
    plain, body = rows["native-bf16"], []
    for name, row in rows.items():
        mode = RUNGS.get(name)  # none: a rung's further row
        if mode is None or not mode.fused or mode.drafted or mode.file:
            continue
        speed, base = row["decode_tokens_per_second"], zip(row["rounds"], plain["rounds"], strict=False)
        ratio = median(own["decode_tokens_per_second"] / one["decode_tokens_per_second"] for own, one in base)
        cells = [f"`{name}`", f"{row['bytes_per_token'] / 1e6:.0f}", format_value(speed, "speed"), f"{ratio:.2f}×"]
        loss = row["perplexity"] / plain["perplexity"] - 1
        body.append([*cells, f"{row['mbu']:.0%}", f"{row['kl_mean']:.4f}", f"{loss:+.1%}", f"{row['top1']:.1%}"])
    head = ["rung", "MB a token", "tokens/s", "beside bf16", "MBU", "KL divergence", "perplexity", "same top token"]
    return markdown(head, body)


def limits(report: Report) -> str:
    """A ladder with several sequences and contexts: what each format has of the machine's limits."""
    rows = {row["name"]: row for row in report["rows"]}

    head = ["", "decode, tokens/s", "MBU", "prefill of 512, tokens/s", "of the matrix rate of"]
    head += ["8 sequences cost", "attention at 2,048 tokens, of a step"]
    body = []
    for name in [row["name"] for row in report["rows"] if "mbu" in row and "ratio" not in row]:
        # Ratios of speeds within a round. What a step costs more after 2,048 tokens than after 16 is the attention.
        together, longer = rows[f"{name}-x8"]["ratio"], rows[f"{name}-c2048"]["ratio"]
        body.append(
            [
                name.removeprefix("native-"),
                f"{rows[name]['decode_tokens_per_second']:.1f}",
                f"{rows[name]['mbu']:.0%}",
                f"{rows[name]['prefill_tokens_per_second']:.0f}",
                f"{rows[name]['prefill_mfu']:.0%} {rows[name]['matrix_dtype']}",
                f"{8 / together:.1f} steps of one",
                f"{1 - longer:.0%}",
            ]
        )
    return f"{markdown(head, body)}\n\n{measured_limits(report)}"


def measured_limits(report: Report) -> str:
    """The bandwidth and the matrix rates that the utilisation is of."""
    line = limits_line(report)
    return f"{line[0].upper()}{line[1:]}; {report['settings']['rounds']} rounds."


def render(name: str, way: str) -> str:
    """One result of benchmarks/results as Markdown."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return NOT_MEASURED
    report = json.loads(path.read_text())
    if shown := TABLES.get(f"{name} {way}".strip()):
        return shown(report)
    if way == "limits":
        return limits(report)
    if way == "bytes":
        return by_bytes(report)
    if way == "formats":
        return formats(report)
    if "pairs" in report:
        return ratios(report) if way == "short" else beside_others(report)
    if "kind" in report:
        return ladder(report, SHORT if way == "short" else ())
    raise SystemExit(f"{name}.json is no report that there is a table for")


def with_tables(page: str) -> str:
    """The page with each table made again."""
    return TABLE.sub(lambda found: f"{found[1]}\n{render(found[2], found[3] or '')}\n\n{found[4]}", page)


def stale() -> Iterator[Path]:
    """The pages in which a table is not its JSON's."""
    for page in PAGES:
        text = page.read_text()
        if with_tables(text) != text:
            yield page


def demo_ladder(report: Report) -> str:
    """The ladder at the end of `hasten demo`: speed beside what it costs in perplexity."""
    rows = []
    for one in report["rows"]:
        speed = f"{one['decode_tokens_per_second']:,.0f}"
        rows.append([f"`{one['name']}`", speed, f"{one['speedup']:.1f}×", f"{one['perplexity']:.2f}"])
    return markdown(["rung", "decode tokens/s", "speed-up", "perplexity"], rows)


def front_page(report: dict[str, Any]) -> str:
    """`compare.py files` and `gpu/report.py` in short, each pair in one precision. †: theirs is of an earlier run."""
    files, results = committed("real-files"), report["results"]
    cpu = f"{files['threads']} cores of an {files['machine']['cpu']}, {files['hasten']['isa'].upper()}"
    rows = []
    for pair in files["pairs"]:
        format = re.findall(r"Q\w+", pair["model"])[-1]
        for key, what in {"decode": "decoding", "prefill": "prompts"}.items():
            ours, theirs = (shown(pair["median"][one][key]) for one in ("hasten", "peer"))
            cells = [f"{ours} ({format})", f"{pair['peer']}: {theirs} ({format})", f"{pair['ratio'][key]:.2f}×"]
            rows.append([f"{pair['hasten']}, {what}", cpu, *cells])
    card = f"one {results['run']['card'].partition(',')[0].removeprefix('NVIDIA ')}"
    jobs = [(f"7b-{format}", "a 7 B Llama, decoding", format, "gpt-fast", "queued") for format in GPU_FORMATS]
    for job, what, format, peer, key in [*jobs, ("12", "GPT-2 124M, training", "bf16", "nanoGPT", "tokens_per_s")]:
        its_job = f"{peer.replace('-', '').lower()}-{job}"
        source, mark = where(results, its_job)
        ours, theirs = gpu_median(results, f"hasten-{job}", "measure", key), gpu_median(source, its_job, "measure", key)
        cells = [f"{shown(ours)} ({format})", f"{peer}: {shown(theirs)}{mark} ({format})", f"{ratio(ours, theirs)}×"]
        rows.append([what, card, *cells])
    table = markdown(["tokens/s", "on", "hasten", "beside it", "ratio"], rows, left=2)
    slow = gpu_median(results, "gptfast-7b-int8", "measure", "queued") or 0.0
    if slow < (gpu_median(results, "gptfast-7b-bf16", "measure", "queued") or 0.0):  # it reads half the bytes
        table += "\n\ngpt-fast's int8 was slower than its bf16 in this run."
    return table


def main() -> None:
    """Write all pages, or with --check name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page differs")
    given = parser.parse_args()
    pages = list(stale())
    if given.check:
        if pages:
            names = ", ".join(str(page.relative_to(ROOT)) for page in pages)
            raise SystemExit(f"tables differ from benchmarks/results in {names}: run python benchmarks/tables.py")
        return
    for page in pages:
        page.write_text(with_tables(page.read_text()))
        print(page.relative_to(ROOT))


TABLES: dict[str, Table] = {
    "demo-ladder": demo_ladder,
    "gpu front-page": front_page,
    "gpu aims": lambda report: markdown(*gpu_aims(report["results"])),
    "gpu-status": lambda by_hand: markdown(*gpu_status(committed("gpu"), by_hand), left=5),
}
for subject in SUBJECTS:
    TABLES |= import_module(subject).TABLES
for name, table in GPU.items():
    TABLES[f"gpu {name}"] = lambda report, table=table: markdown(*table(report["results"]))


def committed(name: str) -> Report:
    """A result by its name."""
    found: Report = json.loads((RESULTS / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    main()
