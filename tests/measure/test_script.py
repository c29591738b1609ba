"""The frame of the scripts in benchmarks/: options become a command, what it finds a report with tables."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hasten.measure.script import Script, columns, main
from hasten.measure.timing import interleaved, median_ratio
from hasten.measure.workers import Worker, child_command, last_json


@dataclass(frozen=True, kw_only=True)
class Example(Script):
    """An example."""

    result, of_this_machine = "example", ("models",)
    rounds: int = 2
    models: tuple[str, ...] = ()
    folder: Path | None = None
    good: bool = True

    def measure(self):
        return {"rows": [{"name": "a", "seconds": 0.25}], "passed": self.good}


TABLES = {
    "example": lambda report: columns(report["rows"], {"": "{name}", "ms": lambda row: f"{1e3 * row['seconds']}"})
}
TABLES |= {"example more": lambda report: report["not measured"], "other": lambda report: "never shown"}


def run(monkeypatch, *words, children=None):
    monkeypatch.setattr(sys, "argv", ["example.py", *map(str, words)])
    main({"example": Example}, TABLES, children)


def test_a_command_writes_its_report_and_prints_its_tables(monkeypatch, capsys, tmp_path):
    file = tmp_path / "example.json"
    run(monkeypatch, "--rounds", 3, "--models", "bf16=/home/me", "--folder", "/home", "--output", file)
    report = json.loads(file.read_text())
    assert report["settings"] == {"rounds": 3, "good": True}, "no path of this machine"
    assert report["machine"]["cpu"]
    assert capsys.readouterr().out.strip() == "|  | ms |\n|---|---:|\n| a | 250.0 |"
    assert Example(output=file).before() == report
    assert Example(output=tmp_path / "none.json").before() == {}


def test_what_did_not_pass_fails_after_it_is_written(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="FAILED"):
        run(monkeypatch, "--no-good", "--output", tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["passed"] is False


def test_what_cannot_be_written_is_refused_first(monkeypatch, tmp_path):
    monkeypatch.setattr(Example, "measure", lambda self: pytest.fail("measured in vain"))
    with pytest.raises(SystemExit, match=r"error: .* there is no folder"):
        run(monkeypatch, "--output", tmp_path / "none" / "x.json")


def test_a_child_is_called_with_its_arguments(monkeypatch):
    given = []
    command = child_command("example.py", "rank", 3, "x")
    assert command[:2] == [sys.executable, "example.py"]
    run(monkeypatch, *command[2:], children={"rank": lambda *arguments: given.append(arguments)})
    assert given == [("3", "x")]


def test_a_worker_answers_in_json_and_its_end_is_noticed():
    code = (
        "import sys\nprint('noise')\nfor line in sys.stdin:\n print('{\"double\": %d}' % (2 * int(line)), flush=True)"
    )
    worker = Worker("an example", [sys.executable, "-c", code])
    assert [worker.ask("2")["double"], worker.ask("4")["double"]] == [4, 8]
    with pytest.raises(SystemExit, match="an example ended with status 1"):
        worker.ask("none")
    worker.close()
    with pytest.raises(SystemExit, match="ended with status 3"):
        last_json([sys.executable, "-c", "raise SystemExit(3)"])


def test_calls_take_turns_and_the_warm_up_does_not_count():
    order = []
    times = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == list("ababab")
    assert [len(own) for own in times.values()] == [2, 2]
    assert median_ratio([1, 4, 9], [2, 2, 3]) == 2
