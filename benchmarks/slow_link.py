"""Two processes that train one model over a slow link: bytes, time of a step and loss against wall time, by method.

    sudo python benchmarks/slow_link.py --megabits 100 1000 --output benchmarks/results/slow-link.json \\
        --picture benchmarks/results/slow-link.png

Each process has a network of its own (`ip netns`), joined by a pair of virtual interfaces whose rate is bounded in
both directions (`tc … tbf`); that takes root. Bytes are those of the interfaces. A step cannot be faster than what it
computes plus what has to travel: `bound` is that, from the time of a step over a fast link and the bytes of a step over
the rate.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

NAMES = ("hasten-link-0", "hasten-link-1")
PORT = 29533
MASTERS = ["--parallel.policy", "float32-masters", "--techniques.precision", "bfloat16"]
BETA2 = ["--optimizer.beta2", "0.999"]


def methods(steps: int) -> dict[str, list[str]]:
    """The recipe's options of each; the one-bit warm-up is 16.4% of the steps, as in the paper of 1-bit LAMB."""
    warm = ["--optimizer.freeze-after", str(round(0.164 * steps))]
    return {
        "adamw": BETA2,
        "adamw, bf16 gradients": [*BETA2, *MASTERS],
        "onebit-adam": ["--optimizer.kind", "onebit-adam", *BETA2, *warm],
        "lamb": ["--optimizer.kind", "lamb", "--optimizer.learning-rate", "1e-2", *BETA2],
        "onebit-lamb": ["--optimizer.kind", "onebit-lamb", "--optimizer.learning-rate", "1e-2", *BETA2, *warm],
        "diloco 30": ["--diloco.sync-every", "30", *BETA2],
        "diloco 30, 8 bits": ["--diloco.sync-every", "30", "--diloco.should-quantize", *BETA2],
        "diloco 100": ["--diloco.sync-every", "100", *BETA2],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """Train over slow links."""

    megabits: tuple[int, ...] = (100, 1000)
    """Rates of the link, Mbit/s."""

    methods: tuple[str, ...] = ()
    """Only these."""

    recipe: str = "demo"
    """That is trained."""

    steps: int = 600
    """Of every method."""

    rows: int = 2
    """Of a step on both processes together, of 256 tokens each."""

    free: int = 40
    """Steps over a link of 10 Gbit/s, for the time that computing takes."""

    output: Path | None = None
    """Where to write the JSON; a line a run is printed in any case."""

    picture: Path | None = None
    """Where to draw loss against wall time."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        found, chosen = [], methods(self.steps)
        for name in self.methods or tuple(chosen):
            with link(10_000):
                free = trained(self.recipe, chosen[name], self.free, self.rows)["step_seconds"]
            for rate in self.megabits:
                with link(rate):
                    row = {"method": name, "megabits": rate} | trained(self.recipe, chosen[name], self.steps, self.rows)
                bytes_a_step = row["bytes"] / self.steps
                row |= {"bytes_a_step": bytes_a_step, "computing_seconds": free}
                row["bound"] = free + bytes_a_step * 8 / (rate * 1e6)
                found.append(row)
                print(
                    f"{name:<22} {rate:>5} Mbit/s  {row['mean_step_seconds']:.3f} s a step (bound {row['bound']:.3f}), "
                    f"{bytes_a_step / 1e6:.2f} MB a step, loss {row['validation_loss']:.4f} in {row['seconds']:.0f} s",
                    flush=True,
                )
        settings = {"recipe": self.recipe, "steps": self.steps, "rows": self.rows}
        report = {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": found}
        if self.output is not None:
            write_json(self.output, report)
        if self.picture is not None:
            draw(report, self.picture)


@contextmanager
def link(megabits: int) -> Iterator[None]:
    """Two networks and a link between them."""
    remove()
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
    """What a run did; of the bytes those of the busier direction."""
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
        for process in processes:
            if process.wait():
                raise SystemExit(f"a process ended with status {process.returncode}")
        found = max(sent(0), sent(1))
        lines = [json.loads(line) for line in (Path(place) / "run/train.jsonl").read_text().splitlines()]
    seconds = [after["seconds"] - before["seconds"] for before, after in pairwise(lines)]
    plain = [s for s, line in zip(seconds, lines[1:], strict=True) if "validation_loss" not in line]
    losses = [[line["seconds"], line["tokens"], line["validation_loss"]] for line in lines if "validation_loss" in line]
    return {
        "bytes": found,
        "step_seconds": median(plain),
        "mean_step_seconds": sum(plain) / len(plain),
        "seconds": lines[-1]["seconds"],
        "validation_loss": losses[-1][2],
        "losses": losses,
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """Loss against wall time, over the slowest link."""
    from hasten.bench.draw import draw_curves
    from hasten.bench.table import machine_line

    slowest = min(row["megabits"] for row in report["rows"])
    curves = {
        row["method"]: ([time for time, _, _ in row["losses"]], [loss for _, _, loss in row["losses"]])
        for row in report["rows"]
        if row["megabits"] == slowest
    }
    draw_curves(
        curves,
        path,
        title=f"Two processes, a link of {slowest} Mbit/s",
        subtitle=f"{report['settings']['recipe']} model, {machine_line(report['machine'])}",
        x_label="seconds",
        y_label="validation loss, nats a token",
        log_x=True,
    )


if __name__ == "__main__":
    import tyro

    tyro.cli(SlowLink).run()
