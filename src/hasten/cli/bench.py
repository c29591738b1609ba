"""`hasten bench LADDER`: a benchmark, as a table, JSON and a picture. Its options are the benchmark's own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hasten.bench.attention import AttentionGrowth
from hasten.bench.generate import GenerateLadder
from hasten.bench.heads import HeadsLadder
from hasten.bench.largest_batch import LargestBatch
from hasten.bench.race import Race
from hasten.bench.train import TrainLadder
from hasten.cli.bench_serve import ServeBenchmark
from hasten.errors import ConfigError
from hasten.machine.files import require_writable, write_json


class Benchmark(Protocol):
    """What all benchmarks can do."""

    def run(self) -> dict[str, Any]:
        """Measure and return the report."""
        ...

    def pictures(self, name: str) -> tuple[str, ...]:
        """The files that are drawn for --picture NAME."""
        ...

    def draw(self, report: dict[str, Any], *paths: str) -> None: ...

    def show(self, report: dict[str, Any]) -> bool:
        """Print the report for people, to standard error; whether anything could be measured."""
        ...


Kind = TypeVar("Kind", bound=Benchmark)


@dataclass(frozen=True, kw_only=True)
class Measure(Generic[Kind]):
    """A benchmark, and where its report goes."""

    benchmark: Kind
    """What is measured."""
    json: str | None = None
    """Write the report as JSON to this file; "-": to standard output, and nothing else there."""
    picture: str | None = None
    """Draw the report into this PNG; attention into two, NAME-time.png and NAME-memory.png, for NAME or NAME.png."""

    def run(self) -> None:
        pictures = () if self.picture is None else self.benchmark.pictures(self.picture)
        for path in (self.json, *pictures):
            require_writable(path)
        report = self.benchmark.run()
        if self.json is not None:
            write_json(self.json, report)
        if pictures:
            self.benchmark.draw(report, *pictures)
        if not self.benchmark.show(report):
            raise SystemExit(1)


LADDERS: dict[str, Any] = {
    "generate": GenerateLadder,
    "train": TrainLadder,
    "race": Race,
    "batch": LargestBatch,
    "heads": HeadsLadder,
    "attention": AttentionGrowth,
    "serve": ServeBenchmark,
}


class Bench:
    """Dispatches to one of the ladders."""

    @staticmethod
    def main(arguments: list[str]) -> None:
        """Parse what follows `hasten bench` and run it."""
        if not arguments or arguments[0] in ("-h", "--help"):
            lines = [f"  {name:<10} {kind.__doc__}" for name, kind in LADDERS.items()]
            print("\n".join(["usage: hasten bench LADDER [options]      (LADDER --help for its options)", "", *lines]))
            return
        name = arguments[0]
        if name not in LADDERS:
            raise ConfigError(f"there is no ladder {name!r}; known: {', '.join(LADDERS)}")
        from hasten.cli.options import parse

        kind = LADDERS[name]
        command: Any = Measure
        parse(command[kind], arguments[1:], prog=f"hasten bench {name}", description=kind.__doc__).run()
