"""Writes the tables of the pages from the committed JSON, and says where a page and its JSON differ.

    python benchmarks/tables.py             # every page
    python benchmarks/tables.py --check     # change nothing; exit status 1 where a table is not its JSON's

In a page a table is between two marks, the first of which names a file of benchmarks/results and, if it can be
shown in several ways, the way:

    <!-- table: compare-avx2 -->
    <!-- /table -->

Where there is no such file, the page says "Not measured yet." in its place.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
import article_tables
import checkpoint_memory
import kill_ranks
import profile_tables
import replica_kills
import replica_routing
import replica_throughput
import scaling
import sentences
import slow_link
import start
import tensor_parallel
import zero_profile
from drafting_tables import TABLES as DRAFTING
from gpu.aims import aims as gpu_aims
from gpu.report import TABLES as GPU
from gpu.status import status as gpu_status
from lora_tables import lora, lora_cost
from plan_tables import plan_70b, plan_memory, plan_ranks, plan_speed
from renderers import RENDERERS, Report, committed, markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "Not measured yet."
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLES = RENDERERS | profile_tables.TABLES | article_tables.TABLES | DRAFTING
TABLES |= {"lora": lora, "lora cost": lora_cost}
TABLES |= {"plan memory": plan_memory, "plan speed": plan_speed, "plan-ranks": plan_ranks, "plan-70b": plan_70b}
for name, table in {
    "checkpoint-memory": checkpoint_memory.table,
    "kill-ranks": kill_ranks.table,
    "replica-kills": replica_kills.table,
    "replica-routing": replica_routing.table,
    "replica-throughput": replica_throughput.table,
    "scaling": scaling.table,
    "scaling paper": scaling.paper_table,
    "slow-link": slow_link.table,
    "tensor-parallel": tensor_parallel.table,
    "slow-link-long": slow_link.long_table,
    "start": start.table,
    "zero-profile": zero_profile.table,
}.items():
    TABLES[name] = lambda report, table=table: markdown(*table(report))
for name, table in GPU.items():
    TABLES[f"gpu {name}"] = lambda report, table=table: markdown(*table(report["results"]))
TABLES |= {"gpu sentence": sentences.gpu, "real-files sentence": sentences.real_files}
TABLES["gpu aims"] = lambda report: markdown(*gpu_aims(report["results"]))
TABLES["gpu-status"] = lambda by_hand: markdown(*gpu_status(committed("gpu"), by_hand), left=5)
TABLE = re.compile(r"(<!-- table: (\S+)(?: (\S+))? -->\n).*?(<!-- /table -->)", re.DOTALL)


def beside_others(report: Report) -> str:
    """`compare.py`: ours and theirs, medians and the ratio of each round."""

    def rounds(pair: Report, metric: str) -> str:
        worked = [one for one in pair["rounds"] if "error" not in one["peer"] and "error" not in one["hasten"]]
        return " ".join(f"{one['hasten'][metric] / one['peer'][metric]:.2f}" for one in worked)

    head = ["ours / theirs", "decode, tokens/s", "ratio", "in each round", "share of the read bandwidth"]
    head += ["prefill, tokens/s", "ratio", "in each round"]
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
    """`compare.py` in short: the ratios of the medians."""
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
    """`real_files.py --beside uniform`: what a token of a mixed file takes over what its bytes predict."""
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
    head = ["", "the mixed file", *(f"{kind} throughout" for kind in kinds), "time / predicted", "in each round"]
    return markdown(head, rows)


SHORT = ("decode_tokens_per_second", "speedup", "mbu", "perplexity", "kl_mean", "peak_memory_bytes")


def ladder(report: Report, only: tuple[str, ...] = ()) -> str:
    """`hasten bench generate`, `train` and `heads`, as they print it. only: these columns."""
    from hasten.measure.report import SPEED_METRICS
    from hasten.measure.table import COLUMNS, cell, format_value, limits_line, machine_line

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
    from hasten.bench.generate import RUNGS
    from hasten.measure.table import format_value

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
    from hasten.measure.table import limits_line

    line = limits_line(report)
    return f"{line[0].upper()}{line[1:]}; {report['settings']['rounds']} rounds."


def beside_nanogpt(report: Report) -> str:
    """`compare_training.py`: the medians of both, the ratio of each round, the losses."""
    ratios, loss = [one["ratio"] for one in report["rounds"]], report["loss_of_the_last_tenth"]["difference"]
    rows = []
    for name, found in report["medians"].items():
        shares = [one[name]["mfu"] for one in report["rounds"]]
        spread = f"{found['mfu']:.0%} ({min(shares):.0%} to {max(shares):.0%})"
        rows.append([name, f"{found['tokens_per_second']:,.0f}", spread])
    end = f"{report['ratio']:.2f} times as many ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds). "
    end += f"After {report['steps']} steps ({report['tokens']:,} tokens) the losses differ by {abs(loss):.2%} on the "
    end += f"batch and {abs(report['validation_loss']['difference']):.2%} on held-out text."
    return f"{markdown(['', 'tokens/s', 'of the matrix rate'], rows)}\n\n{end}"


def evaluation(report: Report) -> str:
    """`eval_rate.py`."""
    found, shares = report["median"], " ".join(f"{one['share_of_rate']:.0%}" for one in report["rounds"])
    speeds = f"{found['tokens_per_second']:,.0f} scored tokens/s, {found['flops_per_second'] / 1e9:.0f} GFLOP/s"
    return f"{speeds}; of the rate of float32 products {found['share_of_rate']:.0%}, in each round {shares}."


def versions(report: Report) -> str:
    """`versions.py`: what the later version makes of the earlier one's speeds."""
    rows = []
    for row in report["rows"]:
        for metric, ratio in row["ratio"].items():
            if metric.startswith("predicted"):
                continue
            what = "prefill" if "prefill" in metric else "decode" if "decode" in metric else "training"
            each = row["ratios"][metric]
            rows.append(
                [row["rung"], what, f"{ratio:.2f}×", f"{min(each):.2f} to {max(each):.2f} in {len(each)} rounds"]
            )
    head = ["rung", "", f"{report['commits']['now']} / {report['commits']['before']}", "in each round"]
    return markdown(head, rows, left=2)


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
    if "commits" in report:
        return versions(report)
    if "losses" in report:
        return beside_nanogpt(report)
    if "share_of_rate" in report.get("median", {}):
        return evaluation(report)
    raise SystemExit(f"{name}.json is no report that there is a table for")


def with_tables(page: str) -> str:
    """The page with each table made anew."""
    return TABLE.sub(lambda found: f"{found[1]}\n{render(found[2], found[3] or '')}\n\n{found[4]}", page)


def stale() -> Iterator[Path]:
    """The pages in which a table is not its JSON's."""
    for page in PAGES:
        text = page.read_text()
        if with_tables(text) != text:
            yield page


def main() -> None:
    """Write all pages, or with --check name those that differ."""
    pages = list(stale())
    if sys.argv[1:] == ["--check"]:
        if pages:
            names = ", ".join(str(page.relative_to(ROOT)) for page in pages)
            raise SystemExit(f"tables differ from benchmarks/results in {names}: run python benchmarks/tables.py")
        return
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    for page in pages:
        page.write_text(with_tables(page.read_text()))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
