"""Figures that are older than the code that they measure."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "fresh.py"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The script in a repository of one kernel and one result, which was measured with it."""
    spec = importlib.util.spec_from_file_location("fresh", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, place in {"ROOT": tmp_path, "RESULTS": tmp_path / "results", "HELD": tmp_path / "results/held"}.items():
        monkeypatch.setattr(module, name, place)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "linear.json").write_text(json.dumps({"speed": 1}))
    kernel = tmp_path / "src/hasten/ops/linear/kernel.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text('"""A kernel."""\n\ndef product(x):\n    return 2 * x\n')
    who = ["-c", "user.name=x", "-c", "user.email=x@y.z"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "Measure"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return module, kernel


def changed(module):
    module.digest.cache_clear()
    return [(name, folders) for name, _, folders in module.outdated()]


def test_a_result_is_outdated_by_other_code_and_not_by_other_words(fresh, monkeypatch):
    module, kernel = fresh
    assert changed(module) == []
    kernel.write_text('"""Another word."""\n\n\ndef product(x):  # here too\n    return 2 * x\n')
    assert changed(module) == []
    kernel.write_text(kernel.read_text().replace("2 * x", "x + x"))
    assert changed(module) == [("linear", ["ops/linear"])]
    monkeypatch.setattr("sys.argv", ["fresh.py", "--hold", "linear", "the same sum"])
    module.main()
    assert changed(module) == []
    kernel.write_text(kernel.read_text().replace("x + x", "x + x + 0"))
    assert changed(module) == [("linear", ["ops/linear"])], "the reason was about other code"


def test_what_was_measured_again_is_not_outdated_before_it_is_committed(fresh, monkeypatch):
    module, kernel = fresh
    kernel.write_text(kernel.read_text().replace("2 * x", "x + x"))
    monkeypatch.setattr("sys.argv", ["fresh.py", "--check"])
    with pytest.raises(SystemExit, match="1 results are older than their code"):
        module.main()
    (module.RESULTS / "linear.json").write_text(json.dumps({"speed": 2}))
    assert changed(module) == []
    module.main()


def test_every_folder_that_a_result_measures_is_there():
    spec = importlib.util.spec_from_file_location("fresh", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = {folder for folders in module.CODE.values() for folder in folders}
    assert [folder for folder in code if not (FILE.parents[1] / "src/hasten" / folder).is_dir()] == []
