"""A day's traffic over 64 replicas, simulated: what routing by held blocks gives beside other ways.

    python benchmarks/replica_routing.py --output benchmarks/results/replica-routing.json
    python benchmarks/replica_routing.py --hours 1 --replicas 8

What is real: the routing (`hasten.replicas.routing`), the cache of each replica (`BlockManager`, with its evictions),
and the cost of a step by its rows and context, measured here with an engine of the shape (--costs takes those of
earlier reports). What is simulated: time, and the scheduler (decodes first, prompts in chunks in the order of arrival;
a request begins when the blocks of its longest text are free, so none is preempted). Replicas report what they hold at
most once a second, as the server's do.

Traffic: conversations begin as a Poisson process whose rate follows a day, four times as many at its peak as at night.
Each has one of many long system prompts, of which a few are frequent (Zipf), and asks several times, each time
with all that was said before. Every way of routing gets the same requests.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import statistics
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import hasten
from hasten.bench.predict import random_model
from hasten.engine.blocks import BlockManager
from hasten.engine.engine import Engine
from hasten.engine.request import Request
from hasten.engine.settings import EngineSettings
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.timing import timed
from hasten.planning.shapes import shape_config
from hasten.replicas.routing import Ask, Board, ReplicaState, soonest


@dataclass(frozen=True, kw_only=True)
class ReplicaRouting(Script):
    """Simulate a day."""

    result = "replica-routing"
    replicas: int = 64
    hours: float = 24.0
    requests_per_second: float = 2.0
    """The mean of a day."""
    prompts: int = 400
    """Different system prompts."""
    blocks: int = 2048
    """Blocks of each replica's cache."""
    shape: str = "llama-1.1b"
    bits: Literal[4, 8, 16] = 4
    threads: int = 2
    rounds: int = 7
    seed: int = 0
    costs: tuple[Path, ...] = ()
    """Earlier reports whose measured costs are taken: the least."""

    def measure(self) -> Report:
        if self.costs:
            costs = least([json.loads(path.read_text())["costs"] for path in self.costs])
        else:
            costs = measured_costs(self.shape, self.bits, threads=self.threads, rounds=self.rounds)
        jobs = traffic(self.hours, per_second=self.requests_per_second, prompts=self.prompts, seed=self.seed)
        # A step of fewer rows takes no longer than one of more: where it did, something else ran here.
        base = [min(costs["base"][index:]) for index in range(len(costs["base"]))]
        seconds = Costs(costs["rows"], base, costs["per_token"])
        how = {"replicas": self.replicas, "blocks": self.blocks, "seed": self.seed}
        ways = [replay(jobs, seconds, way, **how) for way in WAYS]
        workload = self.settings() | {"requests": len(jobs)}
        return {"kind": "replica-routing", "workload": workload, "costs": costs, "ways": ways}


BLOCK, BUDGET, SLOTS = 16, 512, 32  # tokens of a block and of a step; sequences at once
SECRET = b"simulated"
REPORT_EVERY = 1.0  # seconds, hasten.replicas' own
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(slots=True)
class Costs:
    """Seconds of a step: a table by rows at little context, and what each token of context adds to each row."""

    rows: list[int]
    base: list[float]
    per_token: float

    def step(self, rows: int, context: float) -> float:
        """context: the sum over all rows of the tokens that each looks back at."""
        at = bisect_left(self.rows, rows)
        if self.rows[at] == rows:
            seconds = self.base[at]
        else:
            low, high = self.rows[at - 1], self.rows[at]
            seconds = self.base[at - 1] + (self.base[at] - self.base[at - 1]) * (rows - low) / (high - low)
        return seconds + context * self.per_token


@dataclass(slots=True, eq=False)
class Job:
    """One request: when it comes, what is asked, and how many tokens of answer."""

    number: int
    arrival: float
    prompt: array[int]
    answer: array[int]
    ask: Ask | None = None
    held: int = 0  # found in the cache
    computed: int = 0
    given: int = 0
    first: float = 0.0
    end: float = 0.0

    @property
    def reading(self) -> bool:
        return self.computed < len(self.prompt)


@dataclass(slots=True, eq=False)
class Replica:
    """An engine in simulated time. It is asked to `start` a step, and to `finish` it when its time has come."""

    costs: Costs
    blocks: BlockManager
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    plan: list[tuple[Job, int]] = field(default_factory=list)  # of the step that runs: tokens of each
    steps: int = 1  # alike, that run as one
    seconds: float = 0.0  # of each
    started: float = 0.0
    version: int = 0  # of the plan: events of others are void
    busy: float = 0.0
    changed: bool = False  # what it holds, since it reported

    def start(self, now: float) -> float | None:
        """Plan a step, or as many alike as there may be; when it ends, or None where there is nothing to do."""
        while self.waiting and len(self.running) < SLOTS:
            job = self.waiting[0]
            job.held = job.computed = self.blocks.begin(job.number, job.prompt)
            whole = len(job.prompt) + len(job.answer)
            if self.blocks.needs(job.number, whole) > self.blocks.free:
                self.blocks.release(job.number)
                break
            self.blocks.reserve(job.number, whole)
            self.running.append(self.waiting.popleft())
        if not self.running:
            self.plan = []
            return None
        left = BUDGET - sum(not job.reading for job in self.running)
        self.plan, context = [], 0.0
        for job in self.running:
            count = 1
            if job.reading:
                count = min(left, len(job.prompt) - job.computed)
                left -= count
            if count:
                self.plan.append((job, count))
                context += count * (job.computed + job.given + count / 2)
        decoding = all(not job.reading for job, _ in self.plan)
        self.steps = min(len(job.answer) - job.given for job, _ in self.plan) if decoding else 1
        rows = sum(count for _, count in self.plan)
        self.seconds = self.costs.step(rows, context + rows * (self.steps - 1) / 2)
        self.started, self.version = now, self.version + 1
        return now + self.steps * self.seconds

    def interrupt(self, now: float) -> float:
        """Somebody came: of steps alike, those that have begun are the last. When they end."""
        self.steps = min(self.steps, max(1, math.ceil((now - self.started) / self.seconds)))
        self.version += 1
        return self.started + self.steps * self.seconds

    def finish(self, now: float) -> list[Job]:
        """The step has run; those that got their first token, or their last."""
        self.busy += now - self.started
        ready = []
        for job, count in self.plan:
            if job.reading:
                job.computed += count
                self.blocks.written(job.number, job.prompt[: job.computed])
                self.changed = True
                if job.reading:
                    continue
                job.given, job.first = 1, now
                ready.append(job)
            else:
                job.given += self.steps
        self.blocks.computed()
        for job, _ in self.plan:
            if job.given >= len(job.answer):
                self.blocks.written(job.number, job.prompt + job.answer[:-1])
                self.blocks.computed()
                self.blocks.release(job.number)
                self.running.remove(job)
                job.end = now
                self.changed = True
                ready.append(job)
        return ready


def traffic(hours: float, *, per_second: float, prompts: int, seed: int) -> list[Job]:
    """The requests in the order of their arrival. per_second: requests at the mean of the day."""
    draw = random.Random(seed)

    def text(tokens: float) -> array[int]:
        return array("H", draw.choices(range(32_000), k=int(tokens)))

    system = [text(draw.randrange(512, 2048)) for _ in range(prompts)]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    turns_mean, end, now = 3.0, hours * 3600, 0.0
    peak = 1.6 * per_second / turns_mean
    jobs: list[Job] = []
    while (now := now + draw.expovariate(peak)) < end:
        # from 1 at the peak in the afternoon to a quarter in the small hours; the mean is 1 / 1.6
        if draw.random() > 0.625 + 0.375 * math.cos(2 * math.pi * (now / 86_400 - 15 / 24)):
            continue
        said, moment = draw.choices(system, weights)[0], now
        while True:
            said = said + text(min(400, 16 + draw.expovariate(1 / 80)))
            answer = text(min(300, 8 + draw.expovariate(1 / 72)))
            if len(said) + len(answer) > 4096:
                break
            jobs.append(Job(0, moment, said, answer))
            said = said + answer
            moment += 20 + draw.expovariate(1 / 40)
            if draw.random() < 1 / turns_mean or moment > end:
                break
    jobs.sort(key=lambda job: job.arrival)
    for number, job in enumerate(jobs):
        job.number = number
    return jobs


def fewest(state: ReplicaState, ask: Ask) -> float:
    """The fewest requests."""
    return state.running


def anywhere(state: ReplicaState, ask: Ask) -> float:
    """Any replica: the board orders equals at random."""
    return 0.0


WAYS: dict[str, Callable[[ReplicaState, Ask], float]] = {
    "random": anywhere,
    "least loaded": fewest,
    "held blocks": soonest,
}


def replay(jobs: list[Job], costs: Costs, way: str, *, replicas: int, blocks: int, seed: int) -> dict[str, Any]:
    """The traffic under one way of routing."""
    began = time.process_time()
    board = Board(cost=WAYS[way], draw=random.Random(seed))
    aware = WAYS[way] not in (anywhere, fewest)
    fleet = {
        str(i): Replica(costs, BlockManager(blocks=blocks, block_size=BLOCK, secret=SECRET)) for i in range(replicas)
    }
    board.replace(fleet)
    events: list[tuple[float, int, str, int]] = []  # when, order, replica, version; version -1: it reports
    order = itertools.count()
    reported = dict.fromkeys(fleet, -math.inf)
    coming = set[str]()

    def report_soon(name: str, now: float) -> None:
        if aware and fleet[name].changed and name not in coming:
            coming.add(name)
            heapq.heappush(events, (max(now, reported[name] + REPORT_EVERY), next(order), name, -1))

    def begin(name: str, now: float) -> None:
        if (end := fleet[name].start(now)) is not None:
            heapq.heappush(events, (end, next(order), name, fleet[name].version))

    queue = deque(jobs)
    while queue or events:
        if queue and (not events or queue[0].arrival <= events[0][0]):
            job = queue.popleft()
            job.held = job.computed = job.given = 0
            keys = fleet["0"].blocks.keys(job.prompt) if aware else ()  # the same for all
            job.ask = Ask(len(job.prompt), keys, BLOCK)
            name = board.rank(job.ask)[0]
            board.sent(job.ask, name)
            replica = fleet[name]
            replica.waiting.append(job)
            if not replica.plan:
                begin(name, job.arrival)
            elif replica.steps > 1:
                end = replica.interrupt(job.arrival)
                heapq.heappush(events, (end, next(order), name, replica.version))
            continue
        now, _, name, version = heapq.heappop(events)
        replica = fleet[name]
        if version < 0:
            coming.discard(name)
            reported[name], replica.changed = now, False
            board.states[name].held = frozenset(replica.blocks.cached)  # `report` without the bytes on the way
        elif version == replica.version:
            for job in replica.finish(now):
                assert job.ask is not None
                board.begun(job.ask)
                if job.given >= len(job.answer):
                    board.ended(job.ask)
            report_soon(name, now)
            begin(name, now)
    for replica in fleet.values():
        replica.blocks.check()
        assert replica.blocks.free == blocks, "a block was lost"
    end = max(job.end for job in jobs)
    busy = sorted(replica.busy / end for replica in fleet.values())
    return {
        "routing": way,
        "hit_rate": sum(job.held for job in jobs) / sum(len(job.prompt) for job in jobs),
        "first_token": quantiles([job.first - job.arrival for job in jobs]),
        "whole": quantiles([job.end - job.arrival for job in jobs]),
        "busy": {"mean": sum(busy) / len(busy), "least": busy[0], "most": busy[-1]},
        "evicted_blocks": sum(replica.blocks.stats.evicted_blocks for replica in fleet.values()),
        "simulated_in": time.process_time() - began,
    }


def quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    found = {f"p{share:g}": values[int(share / 100 * (len(values) - 1))] for share in (50, 90, 99, 99.9)}
    return {"mean": sum(values) / len(values)} | found


def measured_costs(shape: str, bits: int, *, threads: int, rounds: int) -> dict[str, Any]:
    """The costs of an engine's steps on this machine: medians."""
    torch.set_num_threads(threads)
    model = random_model(shape_config(shape), {4: "int4", 8: "int8", 16: "bfloat16"}[bits])
    draw = random.Random(0)

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, 30_000) for _ in range(tokens))

    def decoding(rows: int, context: int) -> float:
        """A step of `rows` sequences that hold `context` tokens each."""
        engine = Engine(model, None, EngineSettings(max_sequences=SLOTS, token_budget=BUDGET, prefix_cache=False))
        more = rounds + rows * context // BUDGET + 8
        params = hasten.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=more)
        for number in range(rows):
            engine.add(Request(id=str(number), prompt=prompt(context), params=params))
        while engine.waiting or engine.scheduler.behind:
            engine.step()
        return statistics.median(timed(engine.step) for _ in range(rounds))

    def reading(rows: int, context: int) -> float:
        """A step that reads the next `rows` tokens of a prompt of which `context` are read."""
        times = []
        engine = Engine(model, None, EngineSettings(max_sequences=SLOTS, token_budget=rows, prefix_cache=False))
        params = hasten.SamplingParams(temperature=0, max_new_tokens=1)
        for number in range(rounds):
            engine.add(Request(id=str(number), prompt=prompt(context + rows), params=params))
            for _ in range(context // rows):
                engine.step()
            times.append(timed(engine.step))
            assert engine.idle
        return statistics.median(times)

    decoding(1, 16)  # what is slow the first time
    base = [decoding(rows, 16) if rows <= SLOTS else reading(rows, 0) for rows in ROWS]
    per_token = (decoding(8, 1024) - base[ROWS.index(8)]) / 8 / 1008
    far = reading(256, 1024)  # to compare with what the model of the costs says of it
    of_table = Costs(list(ROWS), base, per_token).step(256, 256 * 1024)
    costs = {"rows": list(ROWS), "base": base, "per_token": per_token, "shape": shape, "bits": bits, "threads": threads}
    return costs | {"checked": {"rows": 256, "context": 1024, "measured": far, "of_the_table": of_table}}


def least(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of several measurements of the same costs, number by number: what else ran here only added to them."""
    base = [min(times) for times in zip(*(one["base"] for one in measured), strict=True)]
    per_token = min(one["per_token"] for one in measured)
    return measured[0] | {"base": base, "per_token": per_token, "least_of": [one["base"] for one in measured]}


def routing_table(report: Report) -> str:
    """What each way of routing gives."""
    head = ["routing", "prompt tokens found", "first token p50", "p99", "p99.9", "whole answer p99", "busy"]
    rows = []
    for one in report["ways"]:
        first, whole = one["first_token"], one["whole"]
        times = [f"{first[name]:.2f} s" for name in ("p50", "p99", "p99.9")] + [f"{whole['p99']:.1f} s"]
        rows.append([one["routing"], f"{one['hit_rate']:.0%}", *times, f"{one['busy']['mean']:.0%}"])
    return markdown(head, rows)


TABLES: dict[str, Table] = {"replica-routing": routing_table}


if __name__ == "__main__":
    main({"simulate": ReplicaRouting}, TABLES)
