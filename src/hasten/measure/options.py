"""Options of every benchmark, their checks, and what is said while it runs."""

import math
import sys
from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.machine.threads import Threads, thread_count


def check_least(option: str, value: int | None, least: int = 1) -> None:
    """Raise ConfigError where an option is given and below `least`."""
    if value is not None and value < least:
        raise ConfigError(f"{option} is {value}; it must be at least {least}")


def check_finite(option: str, value: float, unit: str = "") -> None:
    """Raise ConfigError where an option is no finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} is {value:g}{unit}; it must be a finite number above 0")


def say(text: str) -> None:
    """To standard error: standard output may be carrying the report."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What `hasten bench` runs. The text below a field is its help on the command line.

    A benchmark has `run()`, which measures and returns the report, `draw(report, *paths)`, and `show(report)`, which
    prints it for people, to standard error, and says whether anything could be measured.
    """

    json: str | None = None
    """Write the report as JSON to this file; "-": to standard output, and nothing else there."""
    picture: str | None = None
    """Draw the report into this PNG."""

    def pictures(self, name: str) -> tuple[str, ...]:
        """The files that `draw` writes for --picture NAME."""
        return (name,)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(Benchmark):
    """What every benchmark but the server's takes."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    seed: int = 0
    """Decides all that is random: weights, tokens, the order of the data."""

    def __post_init__(self) -> None:
        thread_count(self.threads)  # refused now, not after the text is prepared
