"""The tables of docs/profiling.md; `tables.py` calls them."""

from collections.abc import Callable
from typing import Any

from renderers import Report, markdown


def tree(name: str) -> Callable[[Report], str]:
    """`hasten profile`: the tree of one kind of step."""

    def render(report: Report) -> str:
        from hasten.profiling.show import HEAD, cells, in_the_tree
        from hasten.profiling.tree import PartTime, folded, ordered

        phase: dict[str, Any] = next(one for one in report["phases"] if one["name"] == name)
        rows = ordered(folded(PartTime(**row) for row in phase["rows"]), "tree")
        body = [[in_the_tree(row).replace("  ", "&emsp;"), *cells(row, rows[0])] for row in rows]
        rate, bandwidth = phase["limits"]["rates"][phase["dtype"]], phase["limits"]["bandwidth"]
        end = f"Limits: {rate / 1e9:,.0f} GFLOP/s in {phase['dtype']}, {bandwidth / 1e9:.1f} GB/s."
        traced = {name: f"{1e3 * phase['traced'][name]:.3g} ms" for name in ("seconds", "outside")}
        end += f" A traced step took {traced['seconds']}, {traced['outside']} of it outside of all kernels."
        return f"{markdown([*HEAD, 'ms above it'], body)}\n\n{end}"

    return render


def overhead(report: Report) -> str:
    """`profile_overhead.py`: what watching costs, and parts beside their own timers."""
    rows = []
    for step in report["profile_overhead"]:
        found = step["parts"].items()
        parts = [f"`{name}` {1e3 * part['watched']:.3g} / {1e3 * part['timed']:.3g}" for name, part in found]
        costs = f"{step['overhead']:+.1%}", f"{step['overhead_of_the_fastest']:+.1%}"
        rows.append([step["step"], f"{1e3 * step['seconds']:.3g}", str(step["rounds"]), *costs, "; ".join(parts)])
    head = [
        "step",
        "ms",
        "rounds",
        "watched, it takes (median)",
        "(the fastest)",
        "parts, the fastest: watched / timed alone, ms",
    ]
    return markdown(head, rows)


def tokens(report: Report) -> str:
    """`token_overhead.py`: a token's time, and how much of it lies outside of all kernels."""
    body = [
        [
            one["shape"],
            one["way"],
            *(f"{1e3 * one[name]:.3g} ms" for name in ("seconds", "traced_seconds", "outside_seconds")),
            f"{one['outside_share']:.0%}",
        ]
        for one in report["tokens"]
    ]
    return markdown(["shape", "", "a token", "traced", "outside of all kernels", "share"], body, left=2)


def prompts(report: Report) -> str:
    """`token_overhead.py`: prompts by eager and by compiled blocks."""
    body = [
        [
            *(one["way"], str(one["tokens"]), f"{1e3 * one['seconds']:.3g} ms"),
            *(f"{one['ratio']:.2f}×", f"{one['first_seconds']:.1f} s"),
        ]
        for one in report["prompts"]
    ]
    return markdown(["blocks", "tokens", "a prompt", "speed", "the first"], body)


TABLES = {
    "token-overhead tokens": tokens,
    "token-overhead prompts": prompts,
    "profile-demo-train tree": tree("step"),
    "profile-demo-generate decode": tree("decode"),
    "profile-overhead": overhead,
}
