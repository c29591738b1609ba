"""Make a change in a module's code, and run tests on it in a fork: what mutants.py does with each change.

A change within a function is made in a process that has collected the tests: each fork gives the module's functions
their new code and runs tests at once. A change outside of functions, or in one that runs while modules are imported, is
made in a process without hasten, which then imports the changed module. Only those tests run that pass through the
changed statement.
"""

import ast
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from hasten.measure.script import Report

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hasten"
# What an operator becomes. cosmic-ray has eleven others for each: most fail at once, and the few here find as much.
BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "LShift_RShift")
BINARY += ("RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr")
COMPARISON = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")
COMPARISON += ("Is_IsNot", "IsNot_Is")
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{name}" for name in BINARY),
    *(f"core/ReplaceComparisonOperator_{name}" for name in COMPARISON),
    *(f"core/ReplaceUnaryOperator_{name}" for name in ("USub_UAdd", "Invert_Not")),
    *("core/ReplaceUnaryOperator_Delete_Not", "core/AddNot", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd"),
    *("core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/NumberReplacer", "core/RemoveDecorator"),
    *("core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak", "core/ZeroIterationForLoop"),
    "core/ExceptionReplacer",
)
KILLED, TIMED_OUT, SURVIVED, UNSEEN = "killed", "timed_out", "survived", "unseen"
OPTIONS = (
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow and not gpu",
    "-k",
    "not ranks_agree_and_learn",  # which starts processes
    "--hypothesis-seed=0",
    "--hypothesis-profile=mutants",
)
PATIENCE = 20.0  # seconds that tests may take beside three times those that they took without a change


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change. nth: among those of its operator in the file. before: the changed line. at: among the same operator's
    changes of equal lines, so that a mutant is found again after other lines have changed.
    """

    operator: str
    nth: int
    line: int
    before: str
    at: int

    @property
    def key(self) -> str:
        """What it is called by, whatever else is in the file."""
        return f"{self.operator} {self.at}: {self.before}"

    def of(self, source: str) -> str:
        """The file with the change."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        changed: str = mutate_code(source, get_operator(f"core/{self.operator}")(), self.nth)
        return changed


def mutants_of(source: str) -> list[Mutant]:
    """The changes of a file, but for those of messages, annotations, assertions and options of decorators."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    nodes, left_out, lines = list(ast_nodes(get_ast(source))), spans(source), source.splitlines()
    found: list[Mutant] = []
    same: Counter[str] = Counter()
    for name in OPERATORS:
        operator = get_operator(name)()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for nth, (line, column) in enumerate(places):
            keyword_only = lines[line - 1][column:].startswith("*,")
            if keyword_only or any(start <= (line, column) < end for start, end in left_out):
                continue
            short, before = name.removeprefix("core/"), lines[line - 1].strip()
            at = same[f"{short} {before}"]
            same[f"{short} {before}"] += 1
            found.append(Mutant(operator=short, nth=nth, line=line, before=before, at=at))
    return found


def function_lines(source: str) -> set[int]:
    """The lines of the bodies of functions, which run when these are called."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {line for one in functions for line in range(one.body[0].lineno, (one.end_lineno or 0) + 1)}


def spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where nothing is changed, from (line, column) to (line, column)."""
    lines = source.splitlines()

    def column(line: int, byte: int) -> int:
        return len(lines[line - 1].encode()[:byte].decode())

    left_out: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            left_out.append(node)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            left_out.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            left_out.append(node.returns)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            left_out += [one for one in node.decorator_list if isinstance(one, ast.Call)]
    ends: list[Any] = left_out
    return [
        ((one.lineno, column(one.lineno, one.col_offset)), (one.end_lineno, column(one.end_lineno, one.end_col_offset)))
        for one in ends
    ]


def statement_lines(source: str) -> Callable[[int], range]:
    """A function that gives the lines of the statement that a line is in: of a compound one, those of its head."""
    found: dict[int, range] = {}
    for node in ast.walk(ast.parse(source)):  # from the outside in: what is inside overwrites
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            end = body[0].lineno if isinstance(body, list) else (node.end_lineno or node.lineno) + 1
            lines = range(first, max(end, node.lineno + 1))
            found |= dict.fromkeys(lines, lines)
    return lambda line: found.get(line, range(line, line + 1))


class MutatedModule(SourceFileLoader):
    """Finds and loads one module from another text; messages and inspect show the file's own."""

    def __init__(self, path: Path, text: str) -> None:
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        super().__init__(".".join(parts[:-1] if parts[-1] == "__init__" else parts), str(path))
        self.text = text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Serve as a finder of `sys.meta_path`."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        """Compile the text in place of the file."""
        return compile(self.text, self.path, "exec", dont_inherit=True)


def functions_of(path: Path) -> list[FunctionType]:
    """All functions there are whose code is in a file."""
    gc.unfreeze()  # the tests' conftest.py freezes what was imported, which hides it
    found = [one for one in gc.get_objects() if type(one) is FunctionType]
    return [one for one in found if one.__code__.co_filename == str(path)]


def patch(functions: Sequence[FunctionType], path: Path, text: str) -> bool:
    """Give functions the code that they have in another text of their file.

    False where that is not possible: the function around one has another number of its variables there.
    """
    new: dict[tuple[str, int], CodeType] = {}
    rest = [compile(text, path, "exec", dont_inherit=True)]
    while rest:
        inner = [one for one in rest.pop().co_consts if isinstance(one, CodeType)]
        new |= {(one.co_qualname, one.co_firstlineno): one for one in inner}
        rest += inner
    with suppress(ValueError):
        for function in functions:
            function.__code__ = new[function.__code__.co_qualname, function.__code__.co_firstlineno]
        return True
    return False


def forked(work: Callable[[], int], limit: float) -> int | None:
    """Do it in a fork: its exit status, or None where it took longer than `limit` seconds. All that it starts ends."""
    if (pid := os.fork()) == 0:
        status = 70
        try:
            os.setsid()
            status = work()
        finally:
            os._exit(status)
    end, found = time.monotonic() + limit, None
    while found is None and time.monotonic() < end:
        done, code = os.waitpid(pid, os.WNOHANG)
        found = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.005)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if found is None:
        os.waitpid(pid, 0)
    return found


class TestsOfModule:
    """A plugin of pytest that runs the collected tests for each of some changes of a module instead of once.

    lines: the tests that pass each line. A line that is passed while tests are collected belongs to "", and one passed
    in a fixture, which others may share, to the test's whole file.
    """

    __test__ = False

    def __init__(self, path: Path, source: str, mutants: Sequence[Mutant], folder: Path) -> None:
        self.path, self.source, self.mutants, self.folder = path, source, mutants, folder
        self.now, self.failed = "", False
        self.seconds: Counter[str] = Counter()
        self.lines: defaultdict[int, set[str]] = defaultdict(set)
        self._trace(True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute what follows to the file."""
        self.now = nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Attribute what follows the fixtures to the test."""
        self.seconds[report.nodeid] += report.duration
        self.failed |= report.failed
        self.now = report.nodeid if report.when == "setup" else report.nodeid.partition("::")[0]

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run the tests twice without a change, for their seconds and lines; then those of each change."""
        self._trace(False)
        self.functions = functions_of(self.path)
        clean, traced = self.folder / "clean.json", self.folder / "traced.json"
        for place in (clean, traced):
            if forked(lambda place=place: self._look(session, place, place is traced), 3000) != 0:
                raise RuntimeError("the tests fail without a change")
        self.usual: dict[str, float] = json.loads(clean.read_text())["seconds"]
        found, libraries = (json.loads(traced.read_text())[name] for name in ("lines", "libraries"))
        import_all(libraries)
        outcomes = self._outcomes(session, {int(line): tests for line, tests in found.items()})
        report = {"seconds": self.usual, "lines": found, "outcomes": outcomes, "libraries": libraries}
        (self.folder / "found.json").write_text(json.dumps(report))
        return True

    def _outcomes(self, session: Any, lines: dict[int, list[str]]) -> dict[str, str]:
        found = {}
        inside = function_lines(self.source)
        tests_of = tests_by_statement(self.source, lines, self.usual)
        for mutant in self.mutants:
            tests = tests_of(mutant)
            if mutant.line not in inside or "" in tests:
                continue
            found[mutant.key] = UNSEEN
            if tests:
                limit = 3 * sum(self.usual[test] for test in tests) + PATIENCE
                text = mutant.of(self.source)
                status = forked(lambda text=text, tests=tests: self._try(session, text, tests), limit)
                found[mutant.key] = TIMED_OUT if status is None else SURVIVED if status == 0 else KILLED
                if status == 71:  # it could not be patched
                    del found[mutant.key]
        return found

    def _look(self, session: Any, place: Path, traced: bool) -> int:
        self._trace(traced)
        status = self._run(session.items)
        self._trace(False)
        lines = {line: sorted(tests) for line, tests in self.lines.items()}
        libraries = [
            name for name, one in list(sys.modules.items()) if "site-packages" in str(getattr(one, "__file__", ""))
        ]
        place.write_text(json.dumps({"seconds": self.seconds, "lines": lines, "libraries": libraries}))
        return status

    def _try(self, session: Any, text: str, tests: set[str]) -> int:
        if not patch(self.functions, self.path, text):
            return 71
        items = [item for item in session.items if item.nodeid in tests]
        return self._run(sorted(items, key=lambda item: self.usual[item.nodeid]))  # what fails soon first

    def _run(self, items: Sequence[Any]) -> int:
        """Run tests up to the first that fails; 1 if one did."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed:
                return 1
        return 0

    def _trace(self, on: bool) -> None:
        def trace(frame: Any, event: str, argument: Any) -> Any:
            return passed if frame.f_code.co_filename == str(self.path) else None

        def passed(frame: Any, event: str, argument: Any) -> Any:
            self.lines[frame.f_lineno].add(self.now)
            return passed

        threading.settrace(trace if on else None)  # type: ignore[arg-type]
        sys.settrace(trace if on else None)


def tests_by_statement(
    source: str, lines: dict[int, list[str]], seconds: dict[str, float]
) -> Callable[[Mutant], set[str]]:
    """A function that gives the tests that pass through a change's statement; "" among them: it runs in imports."""
    statement = statement_lines(source)

    def tests_of(mutant: Mutant) -> set[str]:
        marks = {mark for line in statement(mutant.line) for mark in lines.get(line, ())}
        if "" in marks:
            return {"", *seconds}
        return {test for test in seconds if test in marks or test.partition("::")[0] in marks}

    return tests_of


def outcomes_of(path: Path, source: str, mutants: Sequence[Mutant], files: Sequence[str]) -> dict[str, str]:
    """What the tests of these files do to each change, by its key."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run() -> int:
            begin(folder)
            plugin = TestsOfModule(path, source, mutants, folder)
            return pytest_run(folder, [f"tests/{file}" for file in files], [plugin])

        if forked(run, 24 * 3600) != 0:
            raise SystemExit(f"{path}: its tests do not run:\n{(folder / 'output').read_text()[-3000:]}")
        report: Report = json.loads((folder / "found.json").read_text())
        import_all(report["libraries"])
        found: dict[str, str] = report["outcomes"]
        lines = {int(line): tests for line, tests in report["lines"].items()}
        tests_of = tests_by_statement(source, lines, report["seconds"])
        for mutant in [one for one in mutants if one.key not in found]:
            tests = tests_of(mutant) - {""} or set(report["seconds"])

            def run_one(text: str = mutant.of(source), tests: set[str] = tests) -> int:
                begin(folder)
                for imported in [one for one in sys.modules if one.partition(".")[0] == "hasten"]:
                    del sys.modules[imported]
                module: Any = MutatedModule(path, text)
                sys.meta_path.insert(0, module)
                return pytest_run(folder, ["-x", *sorted(tests)], [])

            limit = 3 * sum(report["seconds"][test] for test in tests) + PATIENCE
            status = forked(run_one, limit)
            found[mutant.key] = TIMED_OUT if status is None else SURVIVED if status == 0 else KILLED
    return found


def import_all(libraries: Sequence[str]) -> None:
    """Import what tests have imported, so that no fork need do it again."""
    for library in libraries:
        with suppress(Exception):
            importlib.import_module(library)


def begin(folder: Path) -> None:
    """Prepare a fork for tests: its output goes to a file."""
    import hypothesis
    import torch

    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    torch.set_num_threads(1)
    hypothesis.settings.register_profile(  # the first example that fails is enough
        "mutants", deadline=None, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    )


def pytest_run(folder: Path, arguments: Sequence[str], plugins: Sequence[Any]) -> int:
    """Run pytest in this process; its exit status."""
    import pytest

    return int(pytest.main([*OPTIONS, "--basetemp", str(folder / "tmp"), *arguments], plugins=list(plugins)))
