"""The articles' figures (`training_figures.py`, `sharing_speed.py`) and QAT (`qat.py`), as tables."""

from statistics import mean, median
from typing import Any

from renderers import Report, markdown


def rungs(report: Report) -> str:
    """Milliseconds of a batch, ours and the article's, each beside the rung before it."""
    known = {row["name"]: row for row in report["rows"] if row.get("milliseconds_per_batch")}
    rows, before, published = [], None, None
    for name, row in known.items():
        theirs = row["published_milliseconds"]
        gain = "" if before is None else f"{_gain(before, row):.2f}×"
        their_gain = "" if not (theirs and published) else f"{published / theirs:.2f}×"
        rows.append(
            [f"`{name}`", row["techniques"][-1], f"{row['milliseconds_per_batch']:,.0f}", gain, f"{row['mfu']:.0%}"]
        )
        rows[-1] += [str(theirs or ""), their_gain]
        before, published = row, theirs
    head = [
        "rung",
        "new in it",
        "ms a batch",
        "to the one before",
        "MFU",
        "the article's ms, A100",
        "to the one before",
    ]
    return markdown(head, rows, left=2)


def _gain(before: dict[str, Any], row: dict[str, Any]) -> float:
    """How much faster than the rung before, the median over the rounds."""
    key = "milliseconds_per_batch"
    return median(a[key] / b[key] for a, b in zip(before["rounds"], row["rounds"], strict=True))


def attention_alone(report: Report) -> str:
    """One layer's attention, forward and backward, eager and compiled."""
    found = {(one["kernel"], one["compiled"]): one["seconds"] for one in report["attention"]}
    rows = [
        [f"`{name}`", *(f"{1e3 * found[name, compiled]:,.0f}" for compiled in (False, True))]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return markdown(["one layer, 1,024 tokens", "eager, ms", "compiled, ms"], rows)


def attention_by_rows(report: Report) -> str:
    """One layer's attention of figure 3's rows, compiled."""
    found = {(one["rows"], one["kernel"]): one["seconds"] for one in report["attention"] if one["compiled"]}
    counts, kernels = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    rows = [[f"`{name}`", *(f"{1e3 * found[count, name]:.1f}" for count in counts)] for name in kernels]
    return markdown(["one layer, compiled", *(f"{count} × 256 tokens, ms" for count in counts)], rows)


def step_operators(report: Report) -> str:
    """Where the steps of two rungs go; compiled code together."""
    ways = report["operators"]
    sums: dict[str, dict[str, float]] = {}
    for way, found in ways.items():
        for name, took in found["operators"].items():
            kind = "compiled code" if "Compiled" in name else f"`{name.replace('aten::', '')}`"
            own = sums.setdefault(kind, dict.fromkeys(ways, 0.0))
            own[way] += took
    rows = [[kind, *(f"{own[way]:,.0f}" for way in ways)] for kind, own in sums.items()]
    rows.sort(key=lambda row: -float(row[1].replace(",", "")))
    whole = ["a step, not traced", *(f"{found['milliseconds']:,.0f}" for found in ways.values())]
    return markdown(["milliseconds", *(f"`{way}`" for way in ways)], [*rows, whole])


def head_columns(report: Report) -> str:
    """The head's product alone."""
    head = report["head"]
    rows = [
        [one["part"], *(f"{1e3 * s:,.1f}" for s in one["seconds"]), f"{one['ratio']:.2f}×"] for one in head["parts"]
    ]
    names = [f"{columns:,} columns, ms" for columns in head["columns"]]
    return markdown([f"{head['rows']:,} rows, {head['dtype']}", *names, "gain"], rows)


def batches(report: Report) -> str:
    """Each contestant at the end of its time."""
    rows = []
    for name, found in report["contestants"].items():
        losses = found["losses"]
        spread = f"{median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        cells = [str(found["largest_batch"]), str(found["batch_size"]), f"{median(found['tokens_per_second']):,.0f}"]
        rows.append([name, *cells, f"{median(found['steps']):.0f}", spread])
    head = ["", "rows that fit", "of a micro-batch", "tokens/s", "updates", "validation loss"]
    return markdown(head, rows)


def dropping(report: Report) -> str:
    """Where each came to, and when its mean curve had the goal's loss."""
    goal, seeds = report["goal"], dict[str, list[dict[str, Any]]]()
    for row in report["rows"]:
        seeds.setdefault(row["contestant"], []).append(row)
    rows = []
    for name, own in seeds.items():
        last, seconds = [row["rounds"][-1] for row in own], report["seconds_to_goal"][name]
        losses = [one["validation_loss"] for one in last]
        cells = [
            f"{own[0]['rate']:.1e}",
            f"{mean(one.get('kept_blocks', 1) for row in own for one in row['rounds']):.0%}",
            f"{mean(one['step'] for one in last):.0f}",
            f"{1e3 * mean(one['training_seconds'] / one['step'] for one in last):.0f}",
            f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
        ]
        rows.append([name, *cells, "not reached" if seconds is None else f"{seconds:.0f}"])
    head = ["", "rate", "blocks run", "steps", "ms a step", "validation loss", f"seconds to {goal['loss']:.3f}"]
    return markdown(head, rows)


def sharing_speed(report: Report) -> str:
    """Tokens of answers a second of each way."""
    names = list(report["rows"][0]["ways"])
    rows = []
    for row in report["rows"]:
        ways = row["ways"]
        speeds = [f"{ways[name]['tokens_per_second']:,.0f}" for name in names]
        together = "/".join(f"{ways[name]['most_sequences']:.0f}" for name in names[:3])
        ratios = [f"{ratio:.2f}×" for ratio in row["ratios"].values()]
        rows.append([str(row["samples"]), *speeds, together, *ratios])
    return markdown(["n", *names, "at once", *report["rows"][0]["ratios"]], rows)


WAYS = ("trained", "rtn", "gptq", "gptaq", "qat", "qat from gptq", "taught", "taught once")


def qat(report: Report) -> str:
    """Held-out losses, means over the seeds, and what of rounding's loss each way gets back."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in report["rows"]:
        if row["way"] in WAYS:  # the file has ways that hasten had once
            found.setdefault(row["case"], {}).setdefault(row["way"], []).append(row)
    plain = [row["loss"] for row in found["plain"]["trained"]]
    rows = [["plain, trained on", "", f"{sum(plain) / len(plain):.4f}", "", ""]]
    for case, ways in found.items():
        if case == "plain":
            continue
        nearest = {row["seed"]: row["loss"] for row in ways["rtn"]}
        for way, own in ways.items():
            loss = sum(row["loss"] for row in own) / len(own)
            shares = [(nearest[row["seed"]] - row["loss"]) / (nearest[row["seed"]] - row["plain"]) for row in own]
            share = "" if way == "rtn" else f"{sum(shares) / len(shares):.0%}"
            spread = "" if way == "rtn" or len(shares) == 1 else f"{min(shares):.0%} to {max(shares):.0%}"
            rows.append([case, way, f"{loss:.4f}", share, spread])
    return markdown(["weights", "way", "held-out loss", "of rounding's loss got back", "over seeds"], rows, left=2)


def qat_cost(report: Report) -> str:
    """Seconds and memory of training, plain and while rounded: of each the seed that other programs disturbed least.

    All that is taught costs the same, from wherever it begins.
    """
    ways: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["rows"]:
        name = row["case"], row["way"]
        own = "seconds" in row and not row["way"].startswith("taught ")
        if own and (name not in ways or row["seconds"] < ways[name]["seconds"]):
            ways[name] = row
    rows, plain = [], ways["plain", "trained"]
    for (case, way), row in ways.items():
        cells = [f"{case}, {way}"]
        for field, unit in (("seconds", "{:.0f}"), ("peak_memory_bytes", "{:.2f}")):
            size = row[field] / (1 if field == "seconds" else 1e9)
            cells += [unit.format(size), f"{row[field] / plain[field]:.2f}×"]
        rows.append(cells)
    return markdown(["", "seconds", "to plain", "peak, GB", "to plain"], rows)


TABLES = {
    "article-rungs": rungs,
    "article-rungs attention": attention_alone,
    "article-rungs head": head_columns,
    "article-reasons attention": attention_by_rows,
    "article-reasons operators": step_operators,
    "article-batches": batches,
    "layer-dropping": dropping,
    "sharing-speed": sharing_speed,
    "qat": qat,
    "qat-128": qat,
    "qat cost": qat_cost,
}
