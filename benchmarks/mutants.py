"""Change the code in one place at a time, and see whether a test fails: mutation testing, on a sample of the changes.

    python benchmarks/mutants.py --output benchmarks/results/mutants.json         # all of TESTS; an hour or two
    python benchmarks/mutants.py --modules ops/picker.py --sample 0               # one of them, every change
    python benchmarks/mutants.py --again --output benchmarks/results/mutants.json # only what no test noticed before

A change that no test notices is a survivor: write a test that fails, remove code that has no effect, or write into the
report, as its "why", what makes both versions the same. Later runs keep what is written there.

The changes are cosmic-ray's (pip install cosmic-ray), used as a library: its own runner starts Python for each change, and
importing torch takes longer than most tests. Here each change is made in a fork. One within a function: of a process that
has imported everything, whose functions get the new code. One outside of functions: of a process without hasten, which then
imports the changed module. Only tests that passed through the changed statement run there.
"""

import ast
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from types import CodeType, FunctionType
from typing import Any

from hasten.errors import ConfigError
from hasten.measure.script import Report, Script, Table, columns, main

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hasten"
# Modules of src/hasten -> the files of tests/ that are about them and run within their process.
TESTS: dict[str, str] = {
    "checks.py": "training/test_recipe.py engine/test_sampling.py training/test_optimizers.py ops/test_pattern_text.py",
    "engine/block_table.py": "engine/test_cache.py engine/test_paged.py engine/test_blocks.py",
    "engine/blocks.py": "engine/test_blocks.py engine/test_blocks_machine.py engine/test_scheduler.py",
    "engine/sampling.py": "engine/test_sampling.py",
    "engine/scheduler.py": "engine/test_scheduler.py engine/test_blocks_machine.py engine/test_snapshots.py",
    "engine/state_slots.py": "engine/test_snapshots.py engine/test_states.py",
    "engine/stopping.py": "engine/test_stopping.py",
    "ops/attention/checks.py": "ops/test_attention_checks.py ops/test_attention.py",
    "ops/attention/inputs.py": "ops/test_attention.py ops/test_train_attention.py",
    "ops/attention/pattern_layout.py": "ops/test_patterns.py ops/test_pattern_text.py",
    "ops/attention/patterns.py": "ops/test_patterns.py ops/test_pattern_text.py",
    "ops/attention/regroup.py": "ops/test_regroup.py",
    "ops/attention/sdpa_rules.py": "ops/test_attention.py ops/test_train_attention_picks.py",
    "ops/attention/spec.py": "ops/test_attention.py ops/test_attention_checks.py ops/test_cache_rows.py",
    "ops/delta/rule.py": "ops/test_delta.py",
    "ops/draw/operator.py": "ops/test_draw.py engine/test_sampling.py",
    "ops/linear/operator.py": "ops/test_linear.py ops/test_measured_picks.py ops/test_linear_layers.py",
    "ops/linear/weights.py": "ops/test_linear_formats.py ops/test_linear_refused.py ops/test_linear_layers.py",
    "ops/loss/chunked.py": "ops/test_loss.py",
    "ops/pages.py": "ops/test_large_pages.py",
    "ops/picker.py": "ops/test_picker.py",
    "quantization/gptq.py": "quantization/test_gptq.py quantization/test_native_rounding.py",
    "quantization/qat.py": "quantization/test_qat.py",
    "quantization/rounding.py": "quantization/test_rounding.py quantization/test_native_rounding.py",
    "quantization/schemes.py": "quantization/test_formats_by_layer.py quantization/test_quantize.py",
    "training/lamb.py": "training/test_optimizers.py",
    "training/muon.py": "training/test_optimizers.py",
    "training/onebit.py": "distributed/test_onebit.py training/test_optimizers.py",
    "training/optimizers.py": "training/test_optimizers.py",
    "training/schedules.py": "training/test_schedules.py",
}
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
CANNOT_PATCH = 71  # exit status of a child


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


# -- the child: a run of the tests ------------------------------------------------------------------------------------


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


def patch(path: Path, text: str) -> None:
    """Give the functions of an imported module the code that they have in another text.

    Raises ValueError where the function around one has another number of its variables there.
    """
    new: dict[tuple[str, int], CodeType] = {}
    rest = [compile(text, path, "exec", dont_inherit=True)]
    while rest:
        inner = [one for one in rest.pop().co_consts if isinstance(one, CodeType)]
        new |= {(one.co_qualname, one.co_firstlineno): one for one in inner}
        rest += inner
    for function in [one for one in gc.get_objects() if isinstance(one, FunctionType)]:
        if function.__code__.co_filename == str(path):
            function.__code__ = new[function.__code__.co_qualname, function.__code__.co_firstlineno]


@dataclass
class Plugin:
    """Runs the chosen tests (None: all), and notes each one's seconds and, if `traced`, which lines it passes.

    A line that is passed while modules are imported belongs to "", one passed in a fixture to the test's whole file.
    """

    chosen: set[str] | None
    traced: str | None
    now: str = ""
    seconds: Counter[str] = field(default_factory=Counter)
    lines: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave the others away."""
        if self.chosen is not None:
            items[:] = [item for item in items if item.nodeid in self.chosen]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute what follows to the file."""
        self.now = nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Attribute what follows the fixtures to the test."""
        self.seconds[report.nodeid] += report.duration
        self.now = report.nodeid if report.when == "setup" else report.nodeid.partition("::")[0]

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        """Follow the functions of one file."""
        return self.passed if frame.f_code.co_filename == self.traced else None

    def passed(self, frame: Any, event: str, argument: Any) -> Any:
        """Note a line."""
        self.lines[frame.f_lineno].add(self.now)
        return self.passed


@dataclass(frozen=True)
class TestRun:
    """What a child does: the tests of these files, some or all, with a change or none."""

    path: Path
    text: str
    files: Sequence[str]
    folder: Path
    chosen: set[str] | None = None
    traced: bool = False
    patched: bool = False  # the functions of what is imported; else everything of hasten is imported again

    def start(self) -> int:
        """Fork; the child's process id."""
        if pid := os.fork():
            return pid
        status = 70
        try:
            status = self._run()
        finally:
            os._exit(status)

    def _run(self) -> int:
        import hypothesis
        import pytest
        import torch

        os.setsid()  # what a test starts ends with it
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        torch.set_num_threads(1)
        os.environ.setdefault("TMPDIR", str(self.folder))
        hypothesis.settings.register_profile(  # the first example that fails is enough
            "mutants", deadline=None, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
        )
        if self.patched:
            try:
                patch(self.path, self.text)
            except ValueError:
                return CANNOT_PATCH
        else:
            for name in [name for name in sys.modules if name.partition(".")[0] == "hasten"]:
                del sys.modules[name]
            module: Any = MutatedModule(self.path, self.text)
            sys.meta_path.insert(0, module)
        plugin = Plugin(self.chosen, str(self.path) if self.traced else None)
        if self.traced:
            threading.settrace(plugin.trace)
            sys.settrace(plugin.trace)
        options = ["-x", "-p", "no:cacheprovider", "--basetemp", str(self.folder / "tmp"), "-m", "not slow and not gpu"]
        options += ["--hypothesis-seed=0", "--hypothesis-profile=mutants"]
        status = int(pytest.main([*options, *(f"tests/{file}" for file in self.files)], plugins=[plugin]))
        sys.settrace(None)
        found = {
            "seconds": plugin.seconds,
            "lines": {line: sorted(tests) for line, tests in plugin.lines.items()},
            "imported": [name for name, one in list(sys.modules.items()) if getattr(one, "__file__", None)],
        }
        (self.folder / "found.json").write_text(json.dumps(found))
        return status


def wait(pid: int, limit: float) -> int | None:
    """The exit status of a child; None where it took longer than `limit` seconds. Its own children end with it."""
    end = time.monotonic() + limit
    status: int | None = None
    while time.monotonic() < end:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


# -- the parent -------------------------------------------------------------------------------------------------------


def installed(name: str) -> bool:
    """Whether a module is a library's, and neither hasten's nor the tests'."""
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name.partition(".")[0])
        return spec is not None and spec.origin is not None and "site-packages" in spec.origin
    return False


class Module:
    """A module of src/hasten, its tests, and what they do to changes of it."""

    def __init__(self, name: str) -> None:
        if name not in TESTS:
            raise ConfigError(f"there are no tests listed for {name}; known: {', '.join(TESTS)}")
        self.name, self.path, self.files = name, SOURCE / name, TESTS[name].split()
        self.source = self.path.read_text()
        self.mutants = mutants_of(self.source)

    def look(self) -> None:
        """Run the tests twice without a change: for their times, and for the lines that each passes."""
        clean = self._clean(traced=False)
        self.seconds: dict[str, float] = clean["seconds"]
        self.imported = [name for name in clean["imported"] if not name.startswith("test")]
        for name in self.imported:  # what the next children need not import again: the libraries
            if name.partition(".")[0] in sys.stdlib_module_names or installed(name):
                with suppress(Exception):
                    importlib.import_module(name)
        traced = self._clean(traced=True)
        self.lines = {int(line): tests for line, tests in traced["lines"].items()}
        self.statement, self.in_functions = statement_lines(self.source), function_lines(self.source)

    def _clean(self, *, traced: bool) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            run = TestRun(self.path, self.source, self.files, Path(folder), traced=traced)
            status = wait(run.start(), 1800)
            if status != 0:
                output = (Path(folder) / "output").read_text()[-2000:]
                raise SystemExit(f"{self.name}: its tests fail without a change ({status}):\n{output}")
            found: Report = json.loads((Path(folder) / "found.json").read_text())
        return found

    def tests_of(self, mutant: Mutant) -> set[str]:
        """The tests that pass through the changed statement."""
        marks = {mark for line in self.statement(mutant.line) for mark in self.lines.get(line, ())}
        if "" in marks:
            return {*self.seconds}
        return {test for test in self.seconds if test in marks or test.partition("::")[0] in marks}

    def outcomes(self, mutants: Sequence[Mutant]) -> list[str]:
        """What the tests do to each change."""
        found = dict.fromkeys(mutants, UNSEEN)
        seen = [one for one in mutants if self.tests_of(one)]
        inside = [one for one in seen if one.line in self.in_functions]
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "outcomes.json"
            if (pid := os.fork()) == 0:  # has everything imported, and forks again for each change
                status = 70
                try:
                    for name in self.imported:
                        with suppress(Exception):
                            importlib.import_module(name)
                    place.write_text(json.dumps([self._outcome(one, patched=True) for one in inside]))
                    status = 0
                finally:
                    os._exit(status)
            outside = [one for one in seen if one.line not in self.in_functions]
            found |= {one: self._outcome(one, patched=False) for one in outside}
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"{self.name}: the process of its changes ended with {status}"
            found |= dict(zip(inside, json.loads(place.read_text()), strict=True))
        for one in [one for one in inside if found[one] == UNSEEN]:  # it could not be patched
            found[one] = self._outcome(one, patched=False)
        return [found[one] for one in mutants]

    def _outcome(self, mutant: Mutant, *, patched: bool) -> str:
        chosen = self.tests_of(mutant)
        folder = Path(tempfile.mkdtemp())
        try:
            files = [file for file in self.files if any(test.startswith(f"tests/{file}::") for test in chosen)]
            run = TestRun(self.path, mutant.of(self.source), files, folder, chosen, patched=patched)
            status = wait(run.start(), 3 * sum(self.seconds[test] for test in chosen) + 20)
        finally:
            rmtree(folder, ignore_errors=True)
        if status == CANNOT_PATCH:
            return UNSEEN
        return TIMED_OUT if status is None else SURVIVED if status == 0 else KILLED

    def survivor(self, mutant: Mutant, outcome: str, whys: dict[str, str]) -> Report:
        """A mutant in the report. seen: some test passes through its statement."""
        new = mutant.of(self.source).splitlines()
        after = new[mutant.line - 1].strip() if len(new) == len(self.source.splitlines()) else ""
        shown = {"line": mutant.line, "operator": mutant.operator, "before": mutant.before, "after": after}
        why = {"why": whys[mutant.key]} if mutant.key in whys else {}
        return shown | {"key": mutant.key, "seen": outcome != UNSEEN} | why

    def chosen(self, sample: int) -> list[Mutant]:
        """So many of the mutants, by a hash of each: a change elsewhere in the file does not choose others."""
        by_hash = sorted(self.mutants, key=lambda one: hashlib.sha256(one.key.encode()).digest())
        return sorted(by_hash[: sample or None], key=lambda one: (one.line, one.key))


@dataclass(frozen=True, kw_only=True)
class Mutants(Script):
    """Mutation testing of a sample."""

    result = "mutants"
    of_this_machine = ("modules", "again")
    modules: tuple[str, ...] = tuple(TESTS)
    """Of src/hasten."""
    sample: int = 40
    """Changes of each module; 0: all."""
    again: bool = False
    """Try only those that survived, according to the report in `output`."""

    def measure(self) -> Report:
        os.chdir(ROOT)
        import pytest  # noqa: F401  all forks have them
        import torch  # noqa: F401

        before = self.before()
        rows: dict[str, Report] = {row["module"]: row for row in before.get("rows", ())}
        for name in self.modules:
            earlier = rows.get(name, {})
            if self.again and not earlier.get("survivors"):
                continue
            module = Module(name)
            row = self.tried_again(module, earlier) if self.again else self.tried(module, earlier)
            rows[name] = row
            print(name, {key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)
            found = {"rows": [rows[one] for one in TESTS if one in rows]}
            tool = {"tool": f"cosmic-ray {version('cosmic-ray')}", "commit": before.get("commit") or commit()}
            self.write(tool | found)
        return tool | found

    def tried(self, module: Module, earlier: Report) -> Report:
        """A row of a module that was not tried, or is tried once more."""
        begun = time.monotonic()
        module.look()
        whys = {one["key"]: one["why"] for one in earlier.get("survivors", ()) if "why" in one}
        chosen = module.chosen(self.sample)
        outcomes = list(zip(chosen, module.outcomes(chosen), strict=True))
        count = Counter(outcome for _, outcome in outcomes)
        return {
            "module": module.name,
            "tests": module.files,
            "mutants": len(module.mutants),
            "tried": len(chosen),
            KILLED: count[KILLED],
            TIMED_OUT: count[TIMED_OUT],
            SURVIVED: count[SURVIVED] + count[UNSEEN],
            UNSEEN: count[UNSEEN],
            "killed_since": 0,
            "removed_since": 0,
            "seconds": round(time.monotonic() - begun),
            "survivors": [module.survivor(*one, whys) for one in outcomes if one[1] in (SURVIVED, UNSEEN)],
        }

    def tried_again(self, module: Module, earlier: Report) -> Report:
        """The row after its survivors were tried once more: killed by tests, or their code removed, since."""
        module.look()
        now = {mutant.key: mutant for mutant in module.mutants}
        row = earlier | {"tests": module.files, "survivors": []}
        left = [now[one["key"]] for one in earlier["survivors"] if one["key"] in now]
        whys = {one["key"]: one["why"] for one in earlier["survivors"] if "why" in one}
        for mutant, outcome in zip(left, module.outcomes(left), strict=True):
            if outcome in (SURVIVED, UNSEEN):
                row["survivors"].append(module.survivor(mutant, outcome, whys))
            else:
                row["killed_since"] += 1
        row["removed_since"] += len(earlier["survivors"]) - len(left)
        return row

    def show(self, report: Report) -> None:
        """Print the survivors that nobody has explained."""
        for row in report["rows"]:
            for one in row["survivors"]:
                if not one.get("why"):
                    seen = "" if one["seen"] else "  (no test comes here)"
                    print(f"{row['module']}:{one['line']}: {one['operator']}{seen}")
                    print(f"    - {one['before']}\n    + {one['after']}")


def commit() -> str:
    """The commit whose code is changed."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def summary(report: Report) -> str:
    """A row for each module, and their sum."""
    counted = ("mutants", "tried", KILLED, TIMED_OUT, SURVIVED, UNSEEN, "killed_since", "removed_since")
    rows = [row | {"left": len(row["survivors"])} for row in report["rows"]]
    total: Report = {name: sum(row[name] for row in rows) for name in (*counted, "left")}
    cells = {
        "module": lambda row: f"`{row['module']}`" if row["module"] else "**all**",
        "changes": "{mutants}",
        "tried": "{tried}",
        "noticed": f"{{{KILLED}}}",
        "timed out": f"{{{TIMED_OUT}}}",
        "survived": f"{{{SURVIVED}}}",
        "of them in code that no listed test runs": f"{{{UNSEEN}}}",
        "noticed since": "{killed_since}",
        "code removed since": "{removed_since}",
        "left": "{left}",
    }
    return columns([*rows, {"module": ""} | total], cells)


def survivors(report: Report) -> str:
    """Each change that is not noticed, and why that is right."""
    rows = [one | {"module": row["module"]} for row in report["rows"] for one in row["survivors"]]

    def code(row: Report) -> str:
        before, after = (row[name].replace("|", "\\|") for name in ("before", "after"))
        return f"`{before}` → `{after}`" if after else f"`{before}`, {row['operator']}"

    cells = {"where": "{module}:{line}", "change": code, "why no test can, or need, notice": "{why}"}
    return columns(rows, cells, left=3)


TABLES: dict[str, Table] = {"mutants": summary, "mutants survivors": survivors}


if __name__ == "__main__":
    main({"mutants": Mutants}, TABLES)
