"""`make bench`: every result has a command or a reason, and one that fails is neither lost nor the end."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "renew.py"


@pytest.fixture
def renew():
    spec = importlib.util.spec_from_file_location("renew", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_result_has_a_command_or_a_reason_of_its_own(renew):
    found = {path.stem for path in renew.RESULTS.glob("*.json")}
    assert [name for name in found - {*renew.COMMANDS} if not renew.reason_of(name)] == []
    assert [name for name in renew.COMMANDS if renew.reason_of(name)] == []
    for name in renew.COMMANDS:
        script = next((word for word in renew.command_of(name) if word.endswith(".py")), None)
        assert script is None or (renew.ROOT / script).exists(), name


def test_what_most_readers_see_comes_first(renew):
    names = renew.order()
    assert sorted(names) == sorted(renew.COMMANDS)
    assert names[0] == "generate-smollm2-135m", "the README's picture"
    assert names.index("attention-bfloat16") < names.index("linear") < names.index("grammar-pause")


def test_a_failure_keeps_the_old_figures_and_the_next_run_goes_on(renew, monkeypatch, tmp_path, capsys):
    script = "import json, sys; print(sys.argv); open(sys.argv[-1], 'w').write('{}'); sys.exit('bad' in sys.argv[-1])"
    (tmp_path / "measure.py").write_text(script)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/tables.py").write_text("")
    for name in ("bad", "good"):
        (tmp_path / f"benchmarks/results/{name}.json").write_text('{"old": 1}')
    monkeypatch.setattr(renew, "ROOT", tmp_path)
    monkeypatch.setattr(renew, "RESULTS", tmp_path / "benchmarks/results")
    monkeypatch.setattr(renew, "DONE", tmp_path / "runs/renewed.json")
    monkeypatch.setattr(renew, "COMMANDS", {"bad": "measure.py", "good": "measure.py", "far": "measure.py runs/none"})
    monkeypatch.setattr(renew, "order", lambda: ["bad", "good", "far"])
    monkeypatch.setattr(renew.fresh, "today", lambda name: "of today")
    monkeypatch.setattr(sys, "argv", ["renew.py"])
    with pytest.raises(SystemExit, match=r"failed, with the old figures kept: bad$"):
        renew.main()
    results = tmp_path / "benchmarks/results"
    assert [json.loads((results / f"{name}.json").read_text()) for name in ("bad", "good")] == [{"old": 1}, {}]
    assert "far: runs/none not there" in capsys.readouterr().out
    (results / "good.json").write_text('{"again": 0}')
    with pytest.raises(SystemExit, match="bad"):
        renew.main()
    assert json.loads((results / "good.json").read_text()) == {"again": 0}, "it was measured with this code"
    monkeypatch.setattr(renew.fresh, "today", lambda name: "of tomorrow")
    with pytest.raises(SystemExit, match="bad"):
        renew.main()
    assert json.loads((results / "good.json").read_text()) == {}
