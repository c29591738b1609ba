"""What a plan predicts of ranks and replicas, beside what they do: order and numbers.

    python benchmarks/plan_ranks.py --layers 4 --output benchmarks/results/plan-ranks.json

Plans of one device: plan.py.
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any, Literal

from parallel import places, together, worker, write_model

from hasten.bench import predict
from hasten.bench.choices import choose_plan
from hasten.bench.plan import PlanOptions
from hasten.machine import configure
from hasten.machine.measure import read_bandwidth
from hasten.measure.script import Report, Script, Table, main, markdown

Round = dict[str, dict[str, float]]
Case = tuple[str, int, int, int]  # format, batch, ranks, replicas
WARMUP = 1
GLANCE = 0.15  # seconds of reading memory
STEADY = 1.15  # times the least rate that was seen around a plan and its measurement
CLEAR = 1.05  # of two predictions; what lies closer has no order to be right


@dataclass(frozen=True, kw_only=True)
class PlanRanks(Script):
    """Plans for ranks and replicas beside measurements.

    Each format of the weights and batch as one process of all cores, as ranks of one thread that share the model, and
    as as many independent processes of one thread (replicas). All processes stay alive; in each round the plan is made,
    then all are measured; and all formats and batches have their turn in each pass, because a state of a shared machine
    lasts seconds to minutes. Memory here is 1.6 times as fast at one time as at another, which no plan can foresee: its
    rate is read before and after each plan and each measurement, and a round counts where all four are within 15%. What
    is compared is the median over these rounds of predicted over measured; `quickest` is each one's best round.
    """

    result = "plan-ranks"
    shape: str = "llama-1.1b"
    layers: int = 4
    ranks: int = 2
    formats: tuple[Literal["bf16", "int8", "int4"], ...] = ("bf16", "int8", "int4")
    batches: tuple[int, ...] = (1, 4)
    prompt: int = 256
    tokens: int = 32
    rounds: int = 4
    """Rounds of a pass."""
    passes: int = 3
    runs: tuple[Path, ...] = ()
    """Measure nothing: write the medians over these reports of earlier runs."""

    def measure(self) -> Report:
        if self.runs:
            return combined([json.loads(path.read_text()) for path in self.runs])
        os.environ["HASTEN_MEASURE"] = "1"
        configure()
        predict.random_model = made_once(predict.random_model)
        found: dict[Case, list[Round]] = {}
        with tempfile.TemporaryDirectory(prefix="hasten-plan-ranks-") as folder:
            for name in self.formats:
                write_model(Path(folder, name), self.shape, self.layers, name)
            for _ in range(self.passes):
                for name, batch in product(self.formats, self.batches):
                    for (ranks, replicas), rounds in self.compared(str(Path(folder, name)), batch).items():
                        found.setdefault((name, batch, ranks, replicas), []).extend(rounds)
        rows = [dict(zip(CASE, case, strict=True)) | summary(rounds) for case, rounds in found.items()]
        settings = {name: getattr(self, name) for name in ("shape", "layers", "prompt", "tokens", "rounds", "passes")}
        return settings | {"rows": rows, "order": order(rows)}

    def compared(self, folder: str, batch: int) -> dict[tuple[int, int], list[Round]]:
        """What was predicted and measured for each layout (ranks, replicas) in each round of a pass."""
        options = PlanOptions(
            goal="throughput",
            gpus=self.ranks,
            device="cpu",
            batch_size=batch,
            length=self.prompt + self.tokens,
            new_tokens=self.tokens,
        )
        arguments = [folder, self.prompt, self.tokens]
        groups = {  # (ranks, replicas) -> its processes
            (1, 1): [worker([*arguments, self.ranks, batch])],
            (self.ranks, 1): [worker([*arguments, 1, batch], place) for place in places(self.ranks)],
            (1, self.ranks): [worker([*arguments, 1, batch]) for _ in range(self.ranks)],
        }
        found: dict[tuple[int, int], list[Round]] = {layout: [] for layout in groups}
        try:
            for processes in groups.values():
                for one in processes:
                    one.answer()
            for number in range(WARMUP + self.rounds):
                planned = [read_bandwidth(seconds=GLANCE)]
                predicted = {
                    (one.use.degree, one.replicas): {
                        "prompt": one.plan.phases[0].seconds(one.plan.device),
                        "token": one.token_seconds,
                        "tokens_per_second": one.tokens_per_second,
                    }
                    for one in choose_plan(folder, options).rows
                    if not one.rounded  # to what the folder's weights could be
                }
                planned.append(read_bandwidth(seconds=GLANCE))
                before = planned[-1]
                for layout, processes in groups.items():
                    measured = self.measured(processes, batch, layout[1])
                    seen = [*planned, before, before := read_bandwidth(seconds=GLANCE)]
                    if number >= WARMUP:
                        one = {"predicted": predicted[layout], "measured": measured}
                        found[layout].append(one | {"bandwidth": dict(enumerate(seen))})
        finally:
            for processes in groups.values():
                for one in processes:
                    one.close()
        return found

    def measured(self, processes: list[Any], batch: int, replicas: int) -> dict[str, float]:
        """A round of processes that work at the same time: the mean of their times; of tokens the median's."""
        answers = together(processes)
        prompt, token = (sum(one[name] for one in answers) / len(answers) for name in ("prefill", "token"))
        speed = replicas * batch * self.tokens / (prompt + self.tokens * token)
        least = sum(one["least_token"] for one in answers) / len(answers)
        return {"prompt": prompt, "token": token, "tokens_per_second": speed, "least_token": least}


KINDS = ("predicted", "measured")
RATIO = "predicted / measured"
CASE = ("format", "batch", "ranks", "replicas")


def steady(one: Round) -> bool:
    """Whether memory was as fast while a round was measured as while its plan was made."""
    seen = one["bandwidth"].values()
    return max(seen) <= STEADY * min(seen)


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Medians over the steady rounds, of predicted over measured too, and of each number its best round."""
    calm = [one for one in rounds if steady(one)]
    counted = {"rounds": len(rounds), "counted": len(calm)}
    rounds = calm or rounds
    names = rounds[0]["predicted"]
    return (
        counted
        | {kind: {name: median(one[kind][name] for one in rounds) for name in rounds[0][kind]} for kind in KINDS}
        | {
            RATIO: {name: median(one["predicted"][name] / one["measured"][name] for one in rounds) for name in names},
            "quickest": {
                kind: {
                    name: (max if name == "tokens_per_second" else min)(one[kind][name] for one in rounds)
                    for name in rounds[0][kind]
                }
                for kind in KINDS
            },
        }
    )


def made_once(make: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """The model whose steps a plan measures, kept from round to round: its steps are measured again."""
    kept: dict[tuple[int, str], Any] = {}

    def model(config: Any, weights: str) -> Any:
        key = len(config.layers), weights
        if key not in kept:
            kept.clear()
            kept[key] = make(config, weights)
        return kept[key]

    return model


def combined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """A report of the medians over the runs; of predicted over measured, each run's stay too."""
    rows = []
    for case in zip(*(one["rows"] for one in reports), strict=True):
        (named,) = {tuple(one[name] for name in CASE) for one in case}
        row: dict[str, Any] = dict(zip(CASE, named, strict=True))
        for kind in (*KINDS, RATIO):
            row[kind] = {name: median(one[kind][name] for one in case) for name in case[0][kind]}
        row["runs"] = [one[RATIO] for one in case]
        rows.append(row)
    same = {name: reports[-1][name] for name in ("schema", "machine", "shape", "layers", "prompt", "tokens")}
    off = [sum(far(ratio) for row in one["rows"] for ratio in row[RATIO].values()) for one in reports]
    settings = [{name: one[name] for name in ("rounds", "passes") if name in one} for one in reports]
    return same | {"runs": settings, "off by more than 20% in each run": off, "rows": rows, "order": order(rows)}


def far(ratio: float) -> bool:
    """Whether a prediction is off by more than 20%."""
    return not 1 / 1.2 <= ratio <= 1.2


def order(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The pairs whose predictions are clearly apart and were measured the other way round; and what is far off."""
    found: dict[str, Any] = {}
    for metric in rows[0]["predicted"]:
        pairs, wrong = 0, []
        for one, other in combinations(rows, 2):
            predicted, measured = (one[kind][metric] / other[kind][metric] for kind in KINDS)
            if not 1 / CLEAR < predicted < CLEAR:
                pairs += 1
                if (predicted > 1) != (measured > 1):
                    wrong.append([name(one), name(other), predicted, measured])
        off = [name(one) for one in rows if far(one[RATIO][metric])]
        found[metric] = {"pairs": pairs, "in the wrong order": wrong, "off by more than 20%": off}
    return found


def name(row: dict[str, Any]) -> str:
    """The name of a row, for people."""
    of = [f"{row[name]} {name[: -1 if row[name] == 1 else None]}" for name in ("ranks", "replicas")]
    return ", ".join([row["format"], f"batch {row['batch']}", *of])


SPEED = 0.20  # how far a prediction may be off


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


def _ratio(ratio: float, most: float) -> str:
    return f"{ratio:.2f}" if abs(ratio - 1) <= most else f"**{ratio:.2f}**"


TABLES: dict[str, Table] = {
    "plan-ranks": plan_ranks,
    "plan-70b": plan_70b,
}


if __name__ == "__main__":
    main({"compare": PlanRanks}, TABLES)
