"""What a plan says of ranks and replicas, beside what they do: order and numbers.

    python benchmarks/plan_ranks.py --shape llama-1.1b --layers 4 --json benchmarks/results/plan-ranks.json

Each format of the weights and batch as one process of all cores, as ranks of one thread that share the model, and as as
many independent processes of one thread (replicas). All processes stay alive; in each round the plan is made, then all
are measured, so that they see the same states of a shared machine; and all formats and batches have their turn in each
pass, because such a state lasts seconds to minutes. Memory here is 1.6 times as fast at one time as at another, which
no plan can foresee: its rate is read before and after each plan and each measurement, and a round counts where all four
are within 15%. What is compared is the median over these rounds of predicted over measured; `quickest` is each one's
best round, where the machine was least disturbed.
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

import torch.distributed as dist
import tyro
from tensor_parallel import answer, start, write_model

from hasten.bench import predict
from hasten.bench.choices import choose_plan
from hasten.bench.plan import PlanOptions
from hasten.machine import configure, describe
from hasten.machine.files import write_json
from hasten.machine.measure import read_bandwidth

Round = dict[str, dict[str, float]]
Case = tuple[str, int, int, int]  # format, batch, ranks, replicas
WARMUP = 1
GLANCE = 0.15  # seconds of reading memory
STEADY = 1.15  # times the least rate that was seen around a plan and its measurement
CLEAR = 1.05  # of two predictions; what lies closer has no order to be right


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRanks:
    """Compare the plans for ranks and replicas with measurements."""

    shape: str = "llama-1.1b"
    layers: int = 4
    ranks: int = 2
    formats: tuple[Literal["bf16", "int8", "int4"], ...] = ("bf16", "int8", "int4")
    batches: tuple[int, ...] = (1, 4)
    prompt: int = 256
    tokens: int = 32
    rounds: int = 4
    """Of a pass."""
    passes: int = 3
    runs: tuple[Path, ...] = ()
    """Measure nothing: write the medians over these reports of earlier runs."""
    json: Path | None = None
    """Where the results are written."""

    def run(self) -> None:
        """Measure, compare and write."""
        if self.runs:
            report = combined([json.loads(path.read_text()) for path in self.runs])
            write_json("-", report["order"])
            write_json(self.json, report)
            return
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
        report = {"schema": 1, "machine": describe().to_json(), **settings, "rows": rows, "order": order(rows)}
        write_json("-", report["order"])
        write_json(self.json, report)

    def compared(self, folder: str, batch: int) -> dict[tuple[int, int], list[Round]]:
        """Of each layout (ranks, replicas), what was predicted and what was measured in each round of a pass."""
        options = PlanOptions(
            goal="throughput",
            gpus=self.ranks,
            device="cpu",
            batch_size=batch,
            length=self.prompt + self.tokens,
            new_tokens=self.tokens,
        )
        arguments = [folder, str(self.prompt), str(self.tokens)]
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        common |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.ranks)]
        groups = {  # (ranks, replicas) -> its processes
            (1, 1): [start([*arguments, str(self.ranks), str(batch)], {})],
            (self.ranks, 1): [start([*arguments, "1", str(batch)], one) for one in environments],
            (1, self.ranks): [start([*arguments, "1", str(batch)], {}) for _ in range(self.ranks)],
        }
        found: dict[tuple[int, int], list[Round]] = {layout: [] for layout in groups}
        try:
            for processes in groups.values():
                for one in processes:
                    answer(one)
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
                    one.kill()
        return found

    def measured(self, processes: list[Any], batch: int, replicas: int) -> dict[str, float]:
        """A round of processes that work at the same time: the mean of their times; of tokens the median's."""
        for one in processes:
            one.stdin.write("go\n")
            one.stdin.flush()
        told = [answer(one) for one in processes]
        prompt, token = (sum(one[name] for one in told) / len(told) for name in ("prefill", "token"))
        speed = replicas * batch * self.tokens / (prompt + self.tokens * token)
        least = sum(one["least_token"] for one in told) / len(told)
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
    """The model whose steps a plan measures, kept from round to round: its steps are measured anew."""
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
    """Of all pairs whose predictions are clearly apart, those measured the other way round; and what is far off."""
    told: dict[str, Any] = {}
    for metric in rows[0]["predicted"]:
        pairs, wrong = 0, []
        for one, other in combinations(rows, 2):
            predicted, measured = (one[kind][metric] / other[kind][metric] for kind in KINDS)
            if not 1 / CLEAR < predicted < CLEAR:
                pairs += 1
                if (predicted > 1) != (measured > 1):
                    wrong.append([name(one), name(other), predicted, measured])
        off = [name(one) for one in rows if far(one[RATIO][metric])]
        told[metric] = {"pairs": pairs, "in the wrong order": wrong, "off by more than 20%": off}
    return told


def name(row: dict[str, Any]) -> str:
    """Of a row, for people."""
    of = [f"{row[name]} {name[: -1 if row[name] == 1 else None]}" for name in ("ranks", "replicas")]
    return ", ".join([row["format"], f"batch {row['batch']}", *of])


if __name__ == "__main__":
    os.environ["HASTEN_MEASURE"] = "1"
    tyro.cli(PlanRanks).run()
