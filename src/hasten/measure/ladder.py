"""Measures a ladder: every rung in a process of its own, in interleaved rounds, with the machine's limits beside.

    round 1:  limits, rung A, rung B, rung C
    round 2:  limits, rung A, rung B, rung C ...

A shared machine changes its speed two-fold within minutes. In interleaved rounds every rung meets the same conditions;
ratios and utilisation are formed within a round and only then is the median taken over the rounds.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from hasten.effects import ON_CPU
from hasten.errors import ConfigError
from hasten.machine import available_cores, available_memory, describe, resolve_device, thread_count
from hasten.machine.progress import bars
from hasten.measure.draw import draw_ladder
from hasten.measure.options import BenchmarkOptions, check_finite, check_least, say
from hasten.measure.process import Rung, run_interleaved
from hasten.measure.report import build_report
from hasten.measure.table import print_ladder

LIMITS_SETUP = "hasten.measure.process:LimitsProbe"
LIMITS_MEMORY = 1 << 30  # bytes the limits' own process needs at most for its buffer and matrices


@dataclass(frozen=True, kw_only=True)
class Ladder(BenchmarkOptions):
    """Rungs that are measured in interleaved rounds."""

    title: ClassVar[str]
    rungs: tuple[str, ...] = ()
    """Only these rungs, separated by commas; all by default."""
    rounds: int = 5
    """Every rung is measured once in each round; medians are taken over the rounds."""
    warmup: int = 1
    """Rounds before them that are not counted."""
    limit_seconds: float = 0.3
    """How long each of the machine's limits is measured in each round."""
    time_budget: Annotated[float, ON_CPU] = math.inf
    """On a CPU: seconds for all of it, about. Rungs and rounds that would exceed it are left out, which is said."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("--limit-seconds", self.limit_seconds)
        check_least("--rounds", self.rounds)
        if not self.time_budget > 0:
            raise ConfigError(f"--time-budget is {self.time_budget:g}; it must be above 0")
        check_least("--warmup", self.warmup, 0)

    def measure(
        self,
        rungs: Sequence[Rung],
        *,
        kind: str,
        settings: Mapping[str, Any] | None = None,
        dtypes: Sequence[str] = ("float32", "bfloat16"),
        shared_cache: bool = False,
    ) -> dict[str, Any]:
        """Runs the rungs and returns the report (see hasten.measure.report) as plain JSON values.

        `kind` is "generate" or "train" and decides which metric is the speed. `dtypes` are those whose matrix rate is
        measured in every round. shared_cache: let rungs find what others have compiled. A rung that fails or does not
        answer within an hour becomes a row with "error"; the others go on. Where all rungs together need more memory
        than is free, each is started again for each round. On a GPU as many as fit its memory are set up and warmed up
        side by side, measured in turns, and end before the next ones start.

        Raises ConfigError for no rungs, and ResourceError for a device that is not there.
        """
        names = [rung.name for rung in rungs]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a ladder needs rungs with names of their own; found {names}")
        import torch

        device = str(resolve_device(self.device))
        # Settled here, so that the report says it and every child has the same.
        threads = thread_count(self.threads) or min(torch.get_num_threads(), available_cores().physical)
        process: dict[str, Any] = {"device": device, "threads": threads, "seed": self.seed}
        free = available_memory(device)
        room = None if device == "cpu" else free
        keep = room is not None or sum(rung.memory_bytes for rung in rungs) + LIMITS_MEMORY <= free
        limits = {"device": device, "dtypes": tuple(dtypes), "seconds": self.limit_seconds}
        probe = Rung("limits", (), LIMITS_SETUP, limits, LIMITS_MEMORY)
        machine = describe().to_json()
        with tempfile.TemporaryDirectory(prefix="hasten-compile-") as place, bars("count", "elapsed") as progress:
            # Folders of their own: compiled for the first time, as on a machine that has never run them.
            # By number: a compiler does not take every character of a name.
            each = enumerate((probe, *rungs))
            ready = [
                replace(rung, **process, compile_cache=place if shared_cache else f"{place}/{number}")
                for number, rung in each
            ]
            bar = progress.add_task("", total=len(ready) * (self.rounds + (1 + self.warmup) * keep))
            measured_limits, *runs = run_interleaved(
                ready,
                rounds=self.rounds,
                warmup=self.warmup,
                keep=keep,
                room=room,
                seconds=self.time_budget,
                tell=lambda text: progress.update(bar, description=text, advance=1),
            )
        return build_report(
            kind=kind,
            machine=machine,
            settings={
                **(settings or {}),
                **process,
                "rounds": max((len(run.rounds) for run in runs), default=0),
                "warmup": self.warmup,
                "interleaving": "processes kept" if keep else "processes restarted",
            },
            runs=runs,
            limits=measured_limits,
        )

    def draw(self, report: Mapping[str, Any], path: str | Path) -> None:
        """The report as a PNG."""
        draw_ladder(report, path, title=self.title)

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print the table to standard error; whether any rung could be measured."""
        say(f"{self.title}: {report['settings']['model']}")
        print_ladder(report)
        return any("error" not in row for row in report["rows"])
