"""Mutation testing: changed code is what runs, and what no test noticed is explained."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SOURCE = '''"""A module."""


def outer(n: int = 1) -> int:
    """Add two."""
    return n + 2


class Kept:
    @property
    def middle(self) -> int:
        assert self, "never changed 1"
        return (
            3
            - 1
        )


def make(a):
    def inner():
        return a > 1

    return inner
'''


@pytest.fixture
def mutated(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import mutated

    return mutated


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "changed_by_tests.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("changed_by_tests", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found, path


def test_functions_get_the_code_of_another_text(mutated, module):
    found, path = module
    assert (found.outer(), found.Kept().middle, found.make(1)()) == (3, 2, False)
    functions = mutated.functions_of(path)
    new = SOURCE.replace("n + 2", "n - 2").replace("- 1", "+ 1").replace("a > 1", "a >= 1")
    assert mutated.patch(functions, path, new)
    assert (found.outer(), found.Kept().middle, found.make(1)()) == (-1, 4, True)
    assert mutated.patch(functions, path, SOURCE)
    assert found.outer() == 3


def test_a_function_that_loses_a_variable_of_the_one_around_it_cannot_be_patched(mutated, module):
    found, path = module
    found.kept = found.make(5)
    assert not mutated.patch(mutated.functions_of(path), path, SOURCE.replace("a > 1", "2 > 1"))


def test_a_line_belongs_to_its_statement(mutated):
    lines = SOURCE.splitlines()
    statement, inside = mutated.statement_lines(SOURCE), mutated.function_lines(SOURCE)
    at = 1 + lines.index("            - 1")
    assert [lines[n - 1].strip() for n in statement(at)] == ["return (", "3", "- 1", ")"]
    assert at in inside
    assert 1 + lines.index("class Kept:") not in inside
    assert 1 + lines.index("def outer(n: int = 1) -> int:") not in inside


def test_a_fork_that_takes_too_long_ends(mutated):
    assert mutated.forked(lambda: 3, 60) == 3
    assert mutated.forked(lambda: time.sleep(60) or 0, 0.2) is None


def test_messages_annotations_and_assertions_are_not_changed(mutated):
    pytest.importorskip("cosmic_ray")
    found = {(one.operator, one.before) for one in mutated.mutants_of(SOURCE)}
    assert ("ReplaceBinaryOperator_Add_Sub", "return n + 2") in found
    assert ("NumberReplacer", "def outer(n: int = 1) -> int:") in found
    assert not any("assert" in before or '"' in before for _, before in found)


def test_every_survivor_of_the_committed_run_is_explained():
    report = json.loads((BENCHMARKS / "results" / "mutants.json").read_text())
    for row in report["rows"]:
        assert [one for one in row["survivors"] if not one.get("why")] == [], row["module"]
        left = row["survived"] - row["killed_since"] - row["removed_since"]
        assert len(row["survivors"]) == left, row["module"]
        assert row["killed"] + row["timed_out"] + row["survived"] == row["tried"], row["module"]
