"""Speeds beside a program that uses a core, of hasten and of others.

    python benchmarks/busy.py busy --output benchmarks/results/busy.json
    python benchmarks/busy.py busy --rounds 3 --seconds 5 --formats int8 --no-training
    python benchmarks/busy.py follow --output benchmarks/results/busy-follow.json
    python benchmarks/busy.py peers --output benchmarks/results/busy-peers.json

`busy`: SmolLM2-135M-Instruct, as the published file holds it and in bf16, int8 and int4, in processes that stay. A
round asks each of them in turn: quiet, beside a loop, beside one pinned to each core, beside one that comes and goes
each second, on one thread, and twice at once. Every speed of decoding is divided by the mean of the quiet ones before
and after it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from compare import PEERS, Living, Program, peer_command

import hasten
from hasten.checkpoints.gguf.write import write_gguf
from hasten.machine import configure, contention
from hasten.machine.contention import SharedCores, shared_cores
from hasten.machine.measure import limited_threads, read_bandwidth
from hasten.machine.threads import SHORT_WAIT
from hasten.measure.options import say
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import Worker, child_command, reply

MODEL = "smollm2-135m"
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. "
LOOPS = {
    "loop": "while True: pass",
    "comes and goes": "import time\nwhile True:\n e = time.time() + 1\n while time.time() < e: pass\n time.sleep(1)",
}
FOLLOWED = 0.3  # seconds within which a change has to be followed: from then on two at once count


@dataclass(frozen=True, kw_only=True)
class Busy(Script):
    """Speeds beside a busy program, as shares of the quiet ones."""

    result = "busy"
    model: str = MODEL
    """A short name, a folder or a file."""
    formats: tuple[str, ...] = ("file", "bf16", "int8", "int4")
    training: bool = True
    """Also train the demo's smallest model."""
    rounds: int = 10
    seconds: float = 6.0
    """Length of each measurement."""

    def measure(self) -> Report:
        report: Report = {"sides": {}}
        for name in self.formats:
            say(name)
            report["sides"][name] = self._generating(name)
            say(str(report["sides"][name]["median"]))
        if self.training:
            say("training")
            report["sides"]["training"] = self._training()
        return report

    def _generating(self, name: str) -> Report:
        one, two = (Worker(name, child_command(__file__, "generate", self.model, name)) for _ in range(2))
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        try:
            two.ask("2 1")  # what a first text prepares is no part of a round
            rounds = [self._round(one, two, cores) for _ in range(self.rounds)]
        finally:
            one.close()
            two.close()
        return summary(rounds)

    def _round(self, one: Worker, two: Worker, cores: Sequence[int]) -> dict[str, float]:
        """Shares of the quiet rates just before and after.

        quiet: tokens/s. bandwidth: what two threads read of the memory between the measurements, in GB/s; it may change
        within a round. "two at once, limit": half of that over what one thread reads.
        """
        one.ask("2 1")
        quiet, bandwidth = [], []

        def look() -> None:
            bandwidth.append(one.ask("bandwidth 2")["bandwidth"])
            quiet.append(rate(one.ask(f"2 {self.seconds}")))

        def share(measured: float) -> float:
            look()
            return measured / mean(quiet[-2:])

        look()
        found = {}
        with busy("loop"):
            measured = rate(one.ask(f"2 {self.seconds}"))
        found["loop"] = share(measured)
        with busy("loop"):
            found["prompt"] = one.ask("prompt")["seconds"]
        found["prompt"] = one.ask("prompt")["seconds"] / found["prompt"]
        for core in cores:
            with busy("loop", core):
                measured = rate(one.ask(f"2 {self.seconds}"))
            found[f"loop on core {core}"] = share(measured)
        with busy("comes and goes"):
            measured = rate(one.ask(f"2 {self.seconds}"))
        found["comes and goes"] = share(measured)
        alone = [rate(one.ask(f"1 {self.seconds}"))]
        one.send(f"2 {self.seconds + 1}")
        both = [two.ask(f"2 {self.seconds + 1}")["times"], one.answer()["times"]]
        start, end = max(times[0] for times in both) + FOLLOWED, min(times[-1] for times in both)
        together = min(rate({"times": between(times, start, end)}) for times in both)
        limit = one.ask("bandwidth 2")["bandwidth"] / one.ask("bandwidth 1")["bandwidth"] / 2
        alone.append(rate(one.ask(f"1 {self.seconds}")))
        found["one thread"] = share(mean(alone))
        found |= {"two at once, of one thread": together / mean(alone), "two at once, limit": limit}
        found |= {"bandwidth, lowest": min(bandwidth) / 1e9, "bandwidth, highest": max(bandwidth) / 1e9}
        return found | {"quiet": median(quiet)}

    def _training(self) -> Report:
        worker = Worker("training", child_command(__file__, "train"), SHORT_WAIT)  # as `hasten train`
        rounds = []
        try:
            worker.ask("1")
            for _ in range(self.rounds):
                quiet = worker.ask(f"{self.seconds}")["rate"]
                with busy("loop"):
                    rounds.append({"quiet": quiet, "loop": worker.ask(f"{self.seconds}")["rate"] / quiet})
        finally:
            worker.close()
        return summary(rounds)


@dataclass(frozen=True, kw_only=True)
class Follow(Script):
    """Seconds until a loop's begin and end are followed: until there is a thread less, and until all are back."""

    result = "busy-follow"
    model: str = MODEL
    """A short name, a folder or a file."""
    formats: tuple[str, ...] = ("bf16", "int8", "int4")
    rounds: int = 10
    seconds: float = 2.0
    """Length of the loop, and of what is generated after it."""

    def measure(self) -> Report:
        found: Report = {"sides": {}}
        for name in self.formats:
            worker = Worker(name, child_command(__file__, "generate", self.model, name))
            try:
                worker.ask("2 1")
                found["sides"][name] = summary([self._round(worker) for _ in range(self.rounds)])
            finally:
                worker.close()
            say(f"{name}: {found['sides'][name]['median']}")
        return found

    def _round(self, worker: Worker) -> dict[str, float]:
        """A loop that begins a second after the generating; a change that is not followed counts as 9 s."""
        worker.send(f"2 {2 * self.seconds + 1}")
        time.sleep(1)
        with busy("loop"):
            begun = time.perf_counter()
            time.sleep(self.seconds)
            ended = time.perf_counter()
        answer = worker.answer()
        steps = list(zip(answer["times"], answer["given_up"], strict=True))
        return {
            "seconds until followed": next((at - begun for at, fewer in steps if begun <= at <= ended and fewer), 9.0),
            "seconds until back": next((at - ended for at, fewer in steps if ended <= at and not fewer), 9.0),
        }


@dataclass(frozen=True, kw_only=True)
class Peers(Script):
    """hasten, llama.cpp (the `xllamacpp` wheel) and transformers, quiet and beside a loop.

    SmolLM2-135M as a GGUF file in Q8_0, and as a folder in bf16, in processes that stay. hasten generates with
    `hasten.stream`, as in the other measurements.
    """

    result = "busy-peers"
    rounds: int = 3
    seconds: float = 3.0
    """Length of each measurement of hasten; a peer takes three turns of 64 tokens."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-busy-") as place, ExitStack() as opened:
            folder, file = Path(place) / MODEL, Path(place) / "Q8_0.gguf"
            hasten.save(hasten.load(MODEL, dtype="bfloat16"), folder, dequantize=True)
            write_gguf(hasten.load(folder, dtype="stored"), file, "Q8_0")
            sides: dict[str, Callable[[], float]] = {}
            for name, model in (("Q8_0", file), ("bf16", folder)):
                worker = Worker(name, child_command(__file__, "generate", model, "file"))
                opened.callback(worker.close)
                worker.ask("2 1")
                sides[f"hasten {name}"] = partial(self._rate, worker)
            others = [
                Program(
                    name="llama.cpp Q8_0",
                    ours="Q8_0",
                    model=file,
                    command=peer_command("llama.cpp", Path(place) / "wheel"),
                ),
                Program(
                    name="transformers bf16",
                    ours="bf16",
                    model=folder,
                    command=(sys.executable, str(PEERS / "run_transformers.py")),
                ),
            ]
            for one in others:
                peer = opened.enter_context(closing(Living(one, threads=2, timeout=600)))
                sides[one.name] = partial(decoded, peer)
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for _ in range(self.rounds):
                for name, speed in sides.items():
                    quiet = speed()
                    with busy("loop"):
                        beside = speed()
                    rounds[name].append({"quiet": quiet, "beside": beside, "share": beside / quiet})
                    say(f"{name}: {rounds[name][-1]}")
            own = {"step_microseconds": looking(contention.WINDOW), "looking_microseconds": looking(0.0)}
            return own | {"sides": {name: summary(found) for name, found in rounds.items()}}

    def _rate(self, worker: Worker) -> float:
        return rate(worker.ask(f"2 {self.seconds}"))


@contextmanager
def busy(kind: str, core: int | None = None) -> Iterator[None]:
    """A program beside us that uses a core, on the one named if it is."""
    loop = subprocess.Popen([sys.executable, "-c", LOOPS[kind]])
    if core is not None:
        os.sched_setaffinity(loop.pid, {core})
    try:
        yield
    finally:
        loop.send_signal(signal.SIGKILL)
        loop.wait()


def looking(window: float, steps: int = 20_000) -> float:
    """Microseconds that a step takes longer because it shares cores, with a look each `window` seconds."""
    with patch.object(contention, "WINDOW", window):
        cores, begun = SharedCores(), time.perf_counter()
        for _ in range(steps):
            with cores:
                pass
        return (time.perf_counter() - begun) / steps * 1e6


def decoded(peer: Living) -> float:
    """The tokens per second that a peer decodes, the median of three turns."""
    found = [peer.turn() for _ in range(3)]
    if peer.error:
        raise SystemExit(f"{peer.program.name}: {peer.error}")
    return median(one["decode"] for one in found)


def summary(rounds: Sequence[Mapping[str, float]]) -> Report:
    """Medians over the rounds, and the worst of each: the lowest share, the longest wait."""
    names = rounds[0].keys()
    judged = [name for name in names if "bandwidth" not in name]
    worst = {name: (max if "until" in name else min)(one[name] for one in rounds) for name in judged}
    return {"median": {name: median(one[name] for one in rounds) for name in names}, "worst": worst, "rounds": rounds}


def between(times: Sequence[float], start: float, end: float) -> list[float]:
    return [at for at in times if start <= at <= end]


def rate(answer: Mapping[str, Any]) -> float:
    """Tokens per second between the first and the last one."""
    times = answer["times"]
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def as_format(model: str, name: str) -> Any:
    """The model as its file holds it ("file"), in bf16, or that rounded to int8 or int4."""
    if name == "file":
        return hasten.load(model)
    with tempfile.TemporaryDirectory(prefix="hasten-busy-") as place:
        hasten.save(hasten.load(model, dtype="bfloat16"), place, dequantize=True)
        plain = hasten.load(place)
        if name == "bf16":
            return plain
        return hasten.quantize(plain, hasten.Int8() if name == "int8" else hasten.Int4())


def generate(model: str, name: str) -> None:
    """Answers "THREADS SECONDS" with the time at which each token came and the threads given up by then, "prompt" with
    what 512 tokens take, and "bandwidth THREADS" with what these threads read of the memory, in bytes/s."""
    loaded = as_format(model, name)
    ids = loaded.tokenizer.encode(PROMPT * 64)
    cores = shared_cores()  # of this thread, in which everything runs
    assert isinstance(cores, SharedCores)
    for line in sys.stdin:
        if line.strip() == "prompt":
            started = time.perf_counter()
            # Another beginning each time, and not a prefix of one before.
            next(iter(hasten.stream(loaded, [int(started * 1e3) % 4096, *ids[:511]], max_new_tokens=1)))
            reply({"seconds": time.perf_counter() - started})
            continue
        threads, seconds = line.split()[-2:]
        if threads == "bandwidth":
            with limited_threads(int(seconds)):
                reply({"bandwidth": read_bandwidth(seconds=0.1)})
            continue
        configure(threads=int(threads))
        times: list[float] = []
        given_up: list[int] = []
        ends = time.perf_counter() + float(seconds)
        while time.perf_counter() < ends:
            for _ in hasten.stream(loaded, PROMPT, max_new_tokens=256, temperature=0.8, seed=1, ignore_eos=True):
                times.append(time.perf_counter())
                given_up.append(cores.given_up)
                if times[-1] > ends:
                    break
        reply({"times": times, "given_up": given_up})


def train() -> None:
    """Answers SECONDS with the tokens per second of training."""
    from dataclasses import replace

    from hasten.training.precision import choose_precision
    from hasten.training.recipes import DEMO_SIZES, RECIPES
    from hasten.training.setup import set_up

    recipe = choose_precision(DEMO_SIZES[-1].of(RECIPES["demo"]))[0]
    setup = set_up(replace(recipe, run=replace(recipe.run, minutes=None, steps=1000)), progress=False)
    number = 0
    for line in sys.stdin:
        begun, tokens = time.perf_counter(), 0
        while time.perf_counter() - begun < float(line):
            result = setup.step.run([setup.batches.batch(number)], learning_rate=1e-4)
            assert result is not None
            result.read()
            tokens, number = tokens + result.tokens, number + 1
        reply({"rate": tokens / (time.perf_counter() - begun)})


def shares(report: Report) -> str:
    """Shares of the quiet speed."""
    head = ["", "quiet, tokens/s", "beside a loop", "worst", "loop on a core", "worst", "comes and goes", "worst"]
    head += ["prompt", "two at once", "worst"]
    rows = []
    for name, side in report["sides"].items():
        mid, worst = side["median"], side["worst"]

        def pinned(of: Report) -> float | None:
            return min((share for what, share in of.items() if what.startswith("loop on core")), default=None)

        cells = [mid["loop"], worst["loop"], pinned(mid), pinned(worst)]
        cells += [of.get("comes and goes") for of in (mid, worst)] + [mid.get("prompt")]
        cells += [of.get("two at once, of one thread") for of in (mid, worst)]
        rows.append([name, f"{mid['quiet']:,.0f}", *("" if cell is None else f"{cell:.2f}" for cell in cells)])
    return markdown(head, rows)


def waits(report: Report) -> str:
    """How fast a change is followed."""
    rows = []
    for name, side in report["sides"].items():
        waited = [
            f"{side[kind][f'seconds until {what}']:.2f}"
            for what in ("followed", "back")
            for kind in ("median", "worst")
        ]
        rows.append([name, *waited])
    head = ["", "fewer threads after, s", "worst", "all threads again after, s", "worst"]
    return markdown(head, rows)


def beside_peers(report: Report) -> str:
    """hasten and others, quiet and beside a loop."""
    rows = [
        [
            name,
            *(f"{side['median'][what]:.0f}" for what in ("quiet", "beside")),
            *(f"{side[of]['share']:.2f}" for of in ("median", "worst")),
        ]
        for name, side in report["sides"].items()
    ]
    return markdown(["", "quiet, tokens/s", "beside a loop", "share", "worst"], rows)


TABLES: dict[str, Table] = {"busy": shares, "busy-follow": waits, "busy-peers": beside_peers}


if __name__ == "__main__":
    main({"busy": Busy, "follow": Follow, "peers": Peers}, TABLES, {"generate": generate, "train": train})
