"""The public API as a user's tools see it: `dir`, an import without torch, and a type checker."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hasten

RIGHT = """
import hasten
from hasten.training import RECIPES

model = hasten.load("folder", dtype="bfloat16", device="cpu")
pieces: list[str] = list(hasten.stream(model, "Once upon", max_new_tokens=8))
hasten.quantize(model, hasten.Int4(group_size=32))
params = hasten.SamplingParams(temperature=0.0, max_new_tokens=8)
texts = [output.text for output in hasten.generate(model, ["Once upon"], params)]
outputs = hasten.LLM(model, max_num_seqs=4).generate(["Once upon"], params)
hasten.save(model, "folder")
loss: float | None = hasten.train(RECIPES["demo"], progress=False).loss
version: str = hasten.__version__
"""
WRONG = {
    'hasten.lode("folder")': "attr-defined",
    "hasten.load(3)": "arg-type",
    'hasten.load("folder", dtipe="bfloat16")': "call-arg",
    'hasten.SamplingParams(temperature="hot")': "arg-type",
    "hasten.generate(hasten.load('folder'), 5)": "arg-type",
    "hasten.train(5)": "arg-type",
}


def test_importing_hasten_imports_no_torch():
    code = "import sys, hasten; dir(hasten); hasten.HastenError; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_every_public_name_is_listed_and_found():
    assert set(hasten.__all__) <= set(dir(hasten))
    for name in hasten.__all__:
        assert getattr(hasten, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        hasten.lode  # noqa: B018


@pytest.mark.parametrize("package", ["hasten", "hasten.training"])
def test_the_names_for_type_checkers_are_those_at_run_time(package):
    """`__all__`, the imports under TYPE_CHECKING and `_MODULES` are one list written three times."""
    imported_package = importlib.import_module(package)
    module = ast.parse(Path(imported_package.__file__).read_text())
    typed = next(node for node in module.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == imported_package._MODULES
    assert set(imported_package.__all__) - {"__version__"} == set(imported)


def test_the_reference_page_has_every_public_name_once():
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: hasten\.(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(set(hasten.__all__) - {"__version__"})


def test_every_public_function_and_class_has_a_docstring():
    public = [getattr(hasten, name) for name in hasten.__all__ if name != "__version__"]
    assert [each for each in public if not inspect.getdoc(each)] == []


@pytest.mark.slow  # 60 s: mypy reads torch's types first
@pytest.mark.timeout(600)
def test_mypy_checks_a_script_that_uses_hasten(tmp_path):
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text("import hasten\n\n" + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    command += ["--no-error-summary", f"--cache-dir={tmp_path / 'cache'}", str(right), str(wrong)]
    environment = os.environ | {"MYPYPATH": str(Path(hasten.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = [(Path(line.split(":")[0]).name, line.split(":")[1], line.rpartition("[")[2][:-1]) for line in errors]
    wanted = [("wrong.py", str(row), kind) for row, kind in enumerate(WRONG.values(), start=3)]
    assert found == wanted, done.stdout + done.stderr
