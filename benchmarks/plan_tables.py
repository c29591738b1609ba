"""The planner's predictions beside what was measured (`plan.py`), as tables."""

from statistics import median
from typing import Any

from renderers import Report, markdown

from hasten.planning.devices import REACHED

MEMORY, SPEED = 0.15, 0.20  # how far a prediction may be off


def plan_memory(report: Report) -> str:
    """Peaks of the resident set, in MB."""
    rows, within = [], []
    for name, found in report["cases"].items():
        memory = found.get("memory", {})
        if "measured_bytes" not in memory:
            continue
        predicted, measured = memory["predicted_bytes"], memory["measured_bytes"]
        within.append(abs(predicted / measured - 1) <= MEMORY)
        numbers = [f"{predicted / 1e6:,.0f}", f"{measured / 1e6:,.0f}", _ratio(predicted / measured, MEMORY)]
        rows.append([name, found["use"], *numbers])
    head = ["", "use", "predicted, MB", "measured, MB", "ratio"]
    return f"{markdown(head, rows, left=2)}\n\n{sum(within)} of {len(within)} within {MEMORY:.0%}."


def plan_speed(report: Report) -> str:
    """Seconds of a step, of prompts and of tokens, medians of the rounds; and what the roofline alone would predict."""
    rows, within, alone = [], list[bool](), list[bool]()
    for name, found in report["cases"].items():
        for phase, ratio in found.get("speed", {}).get("ratios", {}).items():
            within.append(abs(ratio - 1) <= SPEED)
            each = [one["predicted"][phase] / one["measured"][phase] for one in found["speed"]["rounds"]]
            spread = f"{min(each):.2f} to {max(each):.2f}"
            limit = median(one["limits"][phase] / one["measured"][phase] for one in found["speed"]["rounds"])
            roofline = limit / REACHED["cpu"][phase]
            alone.append(abs(roofline - 1) <= SPEED)
            numbers = [_milliseconds(found["speed"], phase), _ratio(ratio, SPEED), spread, _ratio(roofline, SPEED)]
            rows.append([name, phase, *numbers])
    if not rows:
        return "Not measured yet."
    head = ["", "phase", "measured, ms", "predicted / measured", "in each round", "roofline alone / measured"]
    counts = f"{sum(within)} of {len(within)} within {SPEED:.0%}; by the roofline alone {sum(alone)}."
    return f"{markdown(head, rows, left=2)}\n\n{counts}"


def plan_ranks(report: Report) -> str:
    """`plan_ranks.py`: a token of each layout, predicted beside measured, and what was in the wrong order."""
    rows = []
    for one in report["rows"]:
        layout = f"{one['ranks']} × {one['replicas']}"
        row = [one["format"], str(one["batch"]), layout]
        for metric in ("prompt", "token"):
            times = [f"{1e3 * one[kind][metric]:,.1f}" for kind in ("predicted", "measured")]
            row += [" / ".join(times), _ratio(one["predicted / measured"][metric], SPEED)]
        speeds = " / ".join(f"{one[kind]['tokens_per_second']:,.1f}" for kind in ("predicted", "measured"))
        rows.append([*row, speeds, _ratio(one["predicted / measured"]["tokens_per_second"], SPEED)])
    head = ["", "batch", "ranks × replicas", "prompt, ms", "ratio", "token, ms", "ratio", "tokens/s", "ratio"]
    found = report["order"]["tokens_per_second"]
    wrong = [f"{one} and {other}" for one, other, *_ in found["in the wrong order"]]
    right = f"{found['pairs'] - len(wrong)} of {found['pairs']} pairs whose predicted tokens/s are 5% apart"
    end = f"{right} were measured in that order" + (f"; not: {'; '.join(wrong)}." if wrong else ".")
    return f"{markdown(head, rows, left=1)}\n\n{end}"


ARTICLE = {("int8", 8): 55}  # tokens/s, https://pytorch.org/blog/accelerating-generative-ai-2/


def plan_70b(report: Report) -> str:
    """A 70 B model on GPUs that we have not: tokens/s of one stream as planned, and what the article measured."""
    alone = [one for one in report["candidates"] if one["replicas"] == 1]
    degrees, formats = (sorted({one[key] for one in alone}) for key in ("tensor_parallel", "weights"))
    rows = []
    for weights in formats:
        row = [weights]
        for degree in degrees:
            one = next(one for one in alone if (one["weights"], one["tensor_parallel"]) == (weights, degree))
            fits = one["peak_bytes"] <= one["free_bytes"]
            row.append(f"{1 / one['token_seconds']:,.0f}" if fits else "does not fit")
        rows.append([*row, str(ARTICLE.get((weights, degrees[-1]), ""))])
    counts = (f"{degree} GPU{'s' * (degree > 1)}" for degree in degrees)
    head = ["tokens/s, predicted", *counts, "measured by the article"]
    return markdown(head, rows, left=1)


def _milliseconds(speed: dict[str, Any], phase: str) -> str:
    times = sorted(one["measured"][phase] for one in speed["rounds"])
    return f"{1e3 * times[len(times) // 2]:,.1f}"


def _ratio(ratio: float, most: float) -> str:
    return f"{ratio:.2f}" if abs(ratio - 1) <= most else f"**{ratio:.2f}**"
