"""Two processes that train one model over a slow link: bytes, time of a step and loss against wall time, by method.

    sudo python benchmarks/slow_link.py --megabits 100 1000 --output benchmarks/results/slow-link.json \\
        --picture benchmarks/results/slow-link.png
    python benchmarks/slow_link.py --megabits 10000 --steps 1500 --output benchmarks/results/slow-link-long.json \\
        --times benchmarks/results/slow-link.json --picture benchmarks/results/slow-link-long.png

Each process has a network of its own (`ip netns`), joined by a pair of virtual interfaces whose rate is bounded in
both directions (`tc … tbf`); that takes root. Bytes are those of the interfaces. A step cannot be faster than what it
computes plus what has to travel: `bound` is that, from the time of a step over a link of 10 Gbit/s, less what its bytes
take there, and the bytes of a step over the rate. Losses do not depend on the rate, so only the slowest link sees all
steps.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hasten.bench.train import StepOptions
from hasten.machine import describe
from hasten.measure.draw import draw_curves
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.table import machine_line
from hasten.planning.cost import parameters

NAMES = tuple(f"hasten-{os.getpid()}-{number}" for number in range(2))  # another run has others
PORT = 29533
FAST = 10_000  # Mbit/s
MASTERS = ["--parallel.policy", "float32-masters", "--techniques.precision", "bfloat16"]
BETA2 = ["--optimizer.beta2", "0.999"]
SEED = ["--run.seed", "1"]


def methods(steps: int) -> dict[str, list[str]]:
    """The recipe's options of each; the one-bit warm-up is 16.4% of the steps, as in the paper of 1-bit LAMB."""
    warm = ["--optimizer.freeze-after", str(round(0.164 * steps))]
    return {
        "adamw": BETA2,
        "adamw, bf16 gradients": [*BETA2, *MASTERS],
        "onebit-adam": ["--optimizer.kind", "onebit-adam", *BETA2, *warm],
        "lamb": ["--optimizer.kind", "lamb", "--optimizer.learning-rate", "1e-2", *BETA2],
        "onebit-lamb": ["--optimizer.kind", "onebit-lamb", "--optimizer.learning-rate", "1e-2", *BETA2, *warm],
        "adamw, seed 1": [*BETA2, *SEED],
        "onebit-adam, seed 1": ["--optimizer.kind", "onebit-adam", *BETA2, *warm, *SEED],
    }


@dataclass(frozen=True, kw_only=True)
class SlowLink(Script):
    """Train over slow links. Of an output of the same settings, the rows of other methods stay."""

    result = "slow-link"
    megabits: tuple[int, ...] = (100, 1000)
    """Rates of the link, Mbit/s."""
    methods: tuple[str, ...] = ()
    """Only these."""
    recipe: str = "demo"
    """That is trained."""
    steps: int = 300
    """Steps of every method over the slowest link."""
    rows: int = 2
    """Rows of a step on both processes together, of 256 tokens each."""
    fewer: int = 120
    """Steps over the faster links, and over one of 10 Gbit/s, for the time that computing takes."""
    times: Path | None = None
    """A report of fewer steps over a slower link: the rows of the same methods get their wall time there, computed from
    its clock, times how many more steps they took (a warm-up is the same share of both)."""
    picture: Path | None = None
    """Where to draw loss against wall time."""
    only_draw: bool = False
    """Measure nothing: only `times` and `picture`."""

    def measure(self) -> Report:
        names = () if self.only_draw else self.methods or tuple(methods(self.steps))
        settings = {"recipe": self.recipe, "steps": self.steps, "fewer": self.fewer, "rows": self.rows}
        before, rows = self.before(), list[dict[str, Any]]()
        if before.get("settings") == settings:
            rows += [row for row in before["rows"] if row["method"] not in names]
        found: Report = {"settings": settings, "rows": rows}
        for name in names:
            free = self.over(FAST, name, self.steps if self.megabits == (FAST,) else self.fewer)
            computing = free["mean_step_seconds"] - free["bytes_a_step"] * 8 / (FAST * 1e6)
            for rate in sorted(self.megabits):
                steps = self.steps if rate == min(self.megabits) else self.fewer
                row = free if rate == FAST else self.over(rate, name, steps)
                row |= {"computing_seconds": computing, "bound": computing + row["bytes_a_step"] * 8 / (rate * 1e6)}
                rows.append(row)
                print({key: value for key, value in row.items() if key != "losses"}, flush=True)
                self.write(found)  # what there is stays, should a later run fail
        if self.times is not None:
            take_times(found, json.loads(self.times.read_text()))
        if self.picture is not None:
            draw_losses(found | {"machine": describe().to_json()}, self.picture)
        return found

    def over(self, rate: int, name: str, steps: int) -> dict[str, Any]:
        """One method over one link."""
        with link(rate):
            row = trained(self.recipe, methods(steps)[name], steps, self.rows)
        return {"method": name, "megabits": rate, "steps": steps} | row


@contextmanager
def link(megabits: int) -> Iterator[None]:
    """Two networks and a link between them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "hl0", "netns", NAMES[0], "type", "veth", "peer", "name", "hl1", "netns", NAMES[1])
        for number, name in enumerate(NAMES):
            inside = ["netns", "exec", name]
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"hl{number}")
            for one in ("lo", f"hl{number}"):
                ip("-n", name, "link", "set", one, "up")
            shape = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "400ms"]
            ip(*inside, "tc", "qdisc", "add", "dev", f"hl{number}", "root", *shape)
        yield
    finally:
        remove()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def sent(number: int) -> int:
    """Bytes that an interface has sent."""
    read = ["ip", "netns", "exec", NAMES[number], "cat", f"/sys/class/net/hl{number}/statistics/tx_bytes"]
    return int(subprocess.run(read, check=True, capture_output=True, text=True).stdout)


def trained(recipe: str, options: list[str], steps: int, rows: int) -> dict[str, Any]:
    """What a run did; of the bytes those of the busier direction, from the end of the first step."""
    with tempfile.TemporaryDirectory(prefix="hasten-slow-link-") as place:
        common = ["--name", "run", "--run.folder", place, "--run.minutes", "None", "--run.steps", str(steps)]
        common += ["--data.batch-size", str(rows), "--run.validate-every", str(max(2, steps // 10))]
        common += ["--run.checkpoint-every", str(10 * steps), "--run.threads", "1", "--run.export", "last"]
        processes = []
        for rank, name in enumerate(NAMES):
            env = os.environ | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
            env |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": f"hl{rank}"}
            command = [sys.executable, "-m", "hasten", "train", recipe, *common, *options]
            out = None if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command], env=env, stdout=subprocess.DEVNULL, stderr=out
                )
            )
        journal = Path(place) / "run/train.jsonl"
        while not (journal.exists() and journal.stat().st_size) and processes[0].poll() is None:
            time.sleep(0.02)
        before = [sent(number) for number in range(2)]  # the weights, which DDP makes equal
        for process in processes:
            if process.wait():
                raise SystemExit(f"a process ended with status {process.returncode}")
        found = max(sent(number) - before[number] for number in range(2))
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
    # A line is written before its validation, which so falls into the next step; it does not count as time.
    paused = ["validation_loss" in line for line in lines]
    seconds = [after["seconds"] - before["seconds"] for before, after in pairwise(lines)]
    plain = [one for one, pause in zip(seconds, paused, strict=False) if not pause]
    mean = sum(plain) / len(plain)
    own = [mean if pause else one for one, pause in zip(seconds, paused, strict=False)]
    clock = list(accumulate(own, initial=mean))
    losses = [
        [time, line["validation_loss"]] for time, line in zip(clock, lines, strict=True) if "validation_loss" in line
    ]
    return {
        "bytes_a_step": found / (steps - 1),
        "mean_step_seconds": mean,
        "seconds": clock[-1],
        "validation_loss": losses[-1][1],
        "losses": losses,
    }


def take_times(report: dict[str, Any], slower: dict[str, Any]) -> None:
    """`losses` of each row in the wall time of another link, as `losses_there`, where it was measured over it."""
    rate = report["link_there"] = min(row["megabits"] for row in slower["rows"])
    clocks = {row["method"]: row for row in slower["rows"] if row["megabits"] == rate}
    for row in report["rows"]:
        if (there := clocks.get(row["method"])) is not None:
            longer = row["steps"] / there["steps"]
            pairs = zip(there["losses"], row["losses"], strict=True)
            row["losses_there"] = [[longer * seconds, loss] for (seconds, _), (_, loss) in pairs]


UNCOMPRESSED = {  # whose loss a method's is compared with, if not AdamW's
    "onebit-lamb": "lamb",
    "onebit-adam, seed 1": "adamw, seed 1",
}


def seconds_to(row: dict[str, Any], loss: float, losses: str = "losses") -> float | None:
    """Wall time to a validation loss, on straight lines between what was measured; None: never."""
    for (before, higher), (after, lower) in pairwise(row[losses]):
        if lower <= loss < higher:
            return before + (after - before) * (higher - loss) / (higher - lower)
    return None


def formula(report: dict[str, Any], row: dict[str, Any]) -> float:
    """Bytes that one of two ranks sends in a step, by the formulas of docs/results/distributed.md."""
    recipe, config = StepOptions(recipe=report["settings"]["recipe"]).recipe_and_config(None)
    count = parameters(config.padded_to(recipe.techniques.pad_vocabulary_to)).total
    name, warm = row["method"], round(0.164 * row["steps"]) / row["steps"]
    if name.startswith("onebit"):
        return count * (4 * warm + (1 - warm) / 8)
    return count * (2 if name.endswith("bf16 gradients") else 4)


def link_table(report: Report) -> str:
    """Bytes, steps and losses of each method."""
    slowest = min(row["megabits"] for row in report["rows"])
    full = {row["method"]: row for row in report["rows"] if row["megabits"] == slowest}
    others = sorted({row["megabits"] for row in report["rows"]} - {slowest})
    goal = 1.01 * full["adamw"]["validation_loss"]
    head = ["", "sent in a step", "formula"]
    for rate in (slowest, *others):
        head += [f"step at {rate:,} Mbit/s", "of what the bytes allow"]
    head += ["loss", "beside its optimizer's", f"to {goal:.2f}"]
    rows = []
    for name in methods(0):
        if name not in full:
            continue
        row = full[name]
        steps = [row, *(one for one in report["rows"] if one["method"] == name and one["megabits"] != slowest)]
        reached = seconds_to(row, goal)
        rows.append(
            [name, f"{row['bytes_a_step'] / 1e6:.2f} MB", f"{formula(report, row) / 1e6:.2f} MB"]
            + [part for one in steps for part in (f"{one['mean_step_seconds']:.2f} s", share(one))]
            + losses(full, name)
            + ["not reached" if reached is None else f"{reached:.0f} s"]
        )
    return markdown(head, rows)


def long_table(report: Report) -> str:
    """A run over one link: losses, and wall times over the slower one."""
    found = {row["method"]: row for row in report["rows"]}
    goal, rows = 1.01 * found["adamw"]["validation_loss"], []
    for name in methods(0):
        if name in found:
            reached = seconds_to(found[name], goal, "losses_there") if "losses_there" in found[name] else math.nan
            shown = "not reached" if reached is None else "" if math.isnan(reached) else f"{reached / 60:.0f} min"
            rows.append([name, *losses(found, name), shown])
    head = ["", f"loss after {report['settings']['steps']:,} steps", "beside its optimizer's"]
    return markdown([*head, f"to {goal:.2f} over {report['link_there']} Mbit/s, computed"], rows)


def losses(rows: dict[str, Any], name: str) -> list[str]:
    """A method's loss, and how it compares with its uncompressed optimizer's."""
    own = name if name in UNCOMPRESSED.values() else "adamw"
    loss, base = (rows[one]["validation_loss"] for one in (name, UNCOMPRESSED.get(name, own)))
    return [f"{loss:.3f}", f"{loss / base - 1:+.1%}"]


def share(row: dict[str, Any]) -> str:
    return f"{row['bound'] / row['mean_step_seconds']:.0%}"


def draw_losses(report: dict[str, Any], path: Path) -> None:
    """Loss against wall time, over the slowest link."""
    there = report.get("link_there")
    slowest, losses = there or min(row["megabits"] for row in report["rows"]), "losses_there" if there else "losses"
    curves = {
        row["method"]: ([time for time, _ in row[losses]], [loss for _, loss in row[losses]])
        for row in report["rows"]
        if row["method"] in methods(0) and losses in row and (there or row["megabits"] == slowest)
    }
    draw_curves(
        curves,
        path,
        title=f"Two processes, {report['settings']['steps']:,} steps, a link of {slowest} Mbit/s"
        + (", times computed" if there else ""),
        subtitle=f"{report['settings']['recipe']} model, {machine_line(report['machine'])}",
        x_label="seconds",
        y_label="validation loss, nats a token",
        log_x=True,
    )


TABLES: dict[str, Table] = {
    "slow-link": link_table,
    "slow-link-long": long_table,
}


if __name__ == "__main__":
    main({"train": SlowLink}, TABLES)
