"""Measures a ladder: every rung in a process of its own, in interleaved rounds, with the machine's limits beside.

    round 1:  limits, rung A, rung B, rung C
    round 2:  limits, rung A, rung B, rung C ...

A shared machine changes its speed two-fold within minutes. Rounds that interleave the rungs let every rung see the same
weather; ratios and utilisation are formed within a round and only then is the median taken over the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hasten.bench.report import build_report
from hasten.bench.rounds import InterleavedRounds
from hasten.bench.worker import Task
from hasten.errors import ConfigError
from hasten.machine import Threads, thread_count
from hasten.machine.progress import bars

if TYPE_CHECKING:
    pass

LIMITS = "limits"  # their name among the rungs
LIMITS_SETUP = "hasten.bench.worker:LimitsProbe"
LIMITS_MEMORY = 1 << 30  # bytes the limits' own process needs at most for its buffer and matrices


def say(text: str) -> None:
    """To standard error: standard output may be carrying the report."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What every benchmark of training and generation takes. The text below a field is its help on the command line."""

    title: ClassVar[str]
    rungs: tuple[str, ...] = ()
    """Only these rungs, separated by commas; all by default."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    seed: int = 0
    """Decides the random weights and tokens."""

    def __post_init__(self) -> None:
        thread_count(self.threads)  # refused now, not after the text is prepared

    def pictures(self, name: str) -> tuple[str, ...]:
        """The files that `draw` writes for --picture NAME."""
        return (name,)


@dataclass(frozen=True, kw_only=True)
class Ladder(BenchmarkOptions):
    """Rungs that are measured in interleaved rounds."""

    rounds: int = 5
    """Every rung is measured once in each round; medians are taken over the rounds."""
    warmup: int = 1
    """Rounds before them that are not counted."""
    limit_seconds: float = 0.3
    """How long each of the machine's limits is measured in each round."""

    def measure(self, rungs: Sequence[Rung], **options: Any) -> dict[str, Any]:
        """`run_ladder` with this ladder's own settings."""
        return run_ladder(
            rungs,
            threads=thread_count(self.threads),
            seed=self.seed,
            rounds=self.rounds,
            **{"warmup": self.warmup, "limit_seconds": self.limit_seconds} | options,
        )

    def draw(self, report: Mapping[str, Any], path: str | Path) -> None:
        """The report as a PNG."""
        from hasten.bench.draw import draw_ladder

        draw_ladder(report, path, title=self.title)

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print the table to standard error; whether any rung could be measured."""
        from hasten.bench.table import print_ladder

        say(f"{self.title}: {report['settings']['model']}")
        print_ladder(report)
        return any("error" not in row for row in report["rows"])


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of a ladder.

    `setup` names a function as "module:function"; called with `arguments` in a fresh process it returns an object with
    `measure() -> dict[str, float]` and, if it likes, `describe() -> dict`: facts such as bytes_per_token,
    flops_per_token and matrix_dtype, from which the utilisation is formed. `techniques` are all that are switched on,
    in their order. `memory_bytes` is an estimate of what the rung keeps while it waits for its turn.

    A rung may have further rows, such as the same model with more sequences at once: "rows" in what it describes holds
    for each ending of a name the facts of that row, and metrics named "ending|metric" are that row's.

    `twice`: the set-up leaves something behind (compiled code), so it is done in two processes, one after the other;
    the report has the seconds of both, and the second is measured.
    """

    name: str
    techniques: tuple[str, ...]
    setup: str
    arguments: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None
    twice: bool = False


def run_ladder(
    rungs: Sequence[Rung],
    *,
    kind: str,
    settings: Mapping[str, Any] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    seed: int = 0,
    rounds: int = 5,
    warmup: int = 1,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    limit_seconds: float = 0.3,
    timeout: float = 3600.0,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Runs the rungs and returns the report (see hasten.bench.report) as plain JSON values.

    `kind` is "generate" or "train" and decides which metric is the speed. `warmup` rounds come first and are not
    counted. `dtypes` are those whose matrix rate is measured, `limit_seconds` each, in every round. A rung that fails
    or does not answer within `timeout` seconds becomes a row with "error"; the others go on. Where all rungs together
    need more memory than is free, each is started anew for each round.

    Raises ConfigError for a ladder without rungs, rungs of the same name, rounds or threads < 1, and ResourceError for
    a device that is not there.
    """
    names = [rung.name for rung in rungs]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"a ladder needs rungs with names of their own; found {names}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; it must be at least 1")
    if rounds < 1 or warmup < 0:
        raise ConfigError(f"a ladder needs at least 1 round and no negative warm-up; found {rounds} and {warmup}")
    import torch

    from hasten.machine import available_cores, available_memory, describe, resolve_device

    device = str(resolve_device(device))
    if threads is None:  # settled here, so that the report says it and every child has the same
        threads = min(torch.get_num_threads(), available_cores().physical)
    needed = sum(rung.memory_bytes or 0 for rung in rungs) + LIMITS_MEMORY
    limits = {"device": device, "dtypes": tuple(dtypes), "seconds": limit_seconds}
    tasks = {LIMITS: Task(LIMITS_SETUP, limits, device, threads, seed)}
    tasks |= {rung.name: Task(rung.setup, rung.arguments, device, threads, seed) for rung in rungs}
    turns = InterleavedRounds(
        tasks,
        timeout=timeout,
        keep=needed <= available_memory(device),
        twice=[rung.name for rung in rungs if rung.twice],
        warm=[LIMITS],
    )
    machine = describe().to_json()
    with bars("count", "elapsed", shown=show_progress) as progress:
        bar = progress.add_task("", total=len(tasks) * (rounds + (1 + warmup) * turns.keep))
        outcomes = turns.run(
            rounds=rounds, warmup=warmup, tell=lambda text: progress.update(bar, description=text, advance=1)
        )
    return build_report(
        kind=kind,
        machine=machine,
        settings={
            **(settings or {}),
            "device": device,
            "threads": threads,
            "seed": seed,
            "rounds": rounds,
            "warmup": warmup,
            "interleaving": "processes kept" if turns.keep else "processes restarted",
        },
        rungs=[(rung.name, rung.techniques) for rung in rungs],
        limits=outcomes.pop(LIMITS),
        outcomes=list(outcomes.values()),
        device=device,
    )
