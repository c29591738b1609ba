"""The frame of a benchmark that is a script: its options, its report as JSON, its tables, its command line.

A file of benchmarks/ is a subject. Each of its benchmarks is a dataclass of options with `measure()`; TABLES has the
functions that turn reports into the tables of the pages, by the name of the JSON and, after a space, of the table:

    python benchmarks/SUBJECT.py BENCHMARK --output benchmarks/results/NAME.json
    python benchmarks/tables.py                                         # the pages' tables from all JSON
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import tyro

from hasten.errors import HastenError
from hasten.machine import configure, describe
from hasten.machine.files import require_writable, write_json

Report = dict[str, Any]
Table = Callable[[Report], str]
Cell = str | Callable[[Any], str]  # a format string over a row's values, or a function of the row


@dataclass(frozen=True, kw_only=True)
class Script:
    """Options of every script. `measure` returns what its report holds beside the machine and the settings.

    A report with "passed": false makes the command fail, after it was written.
    """

    result: ClassVar[str] = ""  # the name of its JSON, by which TABLES has its tables
    of_this_machine: ClassVar[tuple[str, ...]] = ()  # options that name files here, which a report leaves out
    output: Path | None = None
    """Write the report to this file, as JSON; its tables are printed in any case."""

    def measure(self) -> Report:
        raise NotImplementedError

    def run(self) -> Report:
        """Measure, and write the report."""
        require_writable(None if self.output is None else str(self.output))
        return self.write(self.measure())

    def write(self, found: Mapping[str, Any]) -> Report:
        """Add the machine and the settings to what was found; written at once, so a longer run may be stopped."""
        report = {"schema": 1, "machine": describe().to_json(), "settings": self.settings(), **found}
        write_json(self.output, report)
        return report

    def show(self, report: Report) -> None:
        """Print what a reader should see beside the tables."""

    def before(self) -> Report:
        """The report that an earlier run left in `output`, {} without one."""
        if self.output is None or not self.output.exists():
            return {}
        found: Report = json.loads(self.output.read_text())
        return found

    def settings(self) -> Report:
        """All options but paths, as JSON has them."""
        names = [one.name for one in fields(self) if "Path" not in str(one.type)]
        values = {name: getattr(self, name) for name in names if name not in self.of_this_machine}
        found: Report = json.loads(json.dumps(values))
        return found


@dataclass(frozen=True, kw_only=True)
class TimedScript(Script):
    """What is timed in this process, in interleaved rounds."""

    rounds: int = 15
    """Everything once in each, after one that warms up; medians count."""
    threads: int = 2
    """CPU threads of torch."""

    def run(self) -> Report:
        configure(threads=self.threads)
        return super().run()


def main(
    benchmarks: Mapping[str, Any],
    tables: Mapping[str, Table] | None = None,
    children: Mapping[str, Callable[..., None]] | None = None,
) -> None:
    """Run the benchmark that the command line names, or the only one. children: by name, for `child_command`."""
    if sys.argv[1:2] == ["--child"]:
        (children or {})[sys.argv[2]](*sys.argv[3:])
        return
    about = sys.modules["__main__"].__doc__
    if len(benchmarks) == 1:
        chosen: Any = tyro.cli(*benchmarks.values(), description=about)
    else:
        chosen = tyro.extras.subcommand_cli_from_dict(dict(benchmarks), description=about)
    try:
        report = chosen.run()
    except HastenError as error:
        raise SystemExit(f"error: {error}") from None
    if isinstance(chosen, Script):
        chosen.show(report)
    for name, table in (tables or {}).items():
        if name.split(" ")[0] == getattr(chosen, "result", None):
            with suppress(KeyError):  # of a part that was not measured this time
                print(table(report), end="\n\n")
    if isinstance(chosen, Script) and report.get("passed") is False:
        raise SystemExit("FAILED")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are text and the others numbers."""
    align = "|---" * left + "|---:" * (len(head) - left) + "|"
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], align, *lines[1:]])


def columns(rows: Sequence[Mapping[str, Any]], cells: Mapping[str, Cell], *, left: int = 1) -> str:
    """A table with a line for each row: the heading of each column, and how its cell is made."""
    body = [[cell(row) if callable(cell) else cell.format_map(row) for cell in cells.values()] for row in rows]
    return markdown(list(cells), body, left=left)
