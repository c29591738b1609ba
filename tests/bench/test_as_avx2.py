"""benchmarks/as_avx2.sh and what `make test-avx2` checks under it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SWITCH = BENCHMARKS / "as_avx2.sh"


def test_it_runs_a_command_with_everybodys_switch_and_a_cache_of_its_own(tmp_path):
    environment = {**os.environ, "HASTEN_CACHE": str(tmp_path)}
    answer = subprocess.run([SWITCH, "env"], env=environment, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
    wanted = {
        "HASTEN_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor-avx2"),
    }
    assert {name: found[name] for name in wanted} == wanted
    assert subprocess.run([SWITCH, "sh", "-c", "exit 7"], check=False).returncode == 7
    assert "usage" in subprocess.run([SWITCH], capture_output=True, text=True, check=False).stderr


def test_a_run_far_below_the_rate_of_float32_is_refused(tmp_path, tiny_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import training_figures

    def line(step):
        return json.dumps({"step": step, "tokens_per_second": 10.0**step}) + "\n"

    (tmp_path / "model").symlink_to(tiny_folder)
    (tmp_path / "recipe.json").write_text(json.dumps({"data": {"context": 32}}))
    (tmp_path / "train.jsonl").write_text("".join(map(line, range(1, 4))))
    monkeypatch.setattr(training_figures, "configure", lambda: None)
    monkeypatch.setattr(training_figures, "matrix_rate", lambda dtype: 1e9)
    training_figures.CheckSpeed(run_folder=tmp_path, at_least=0.01).run()
    assert "of float32's 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="below 1000%"):
        training_figures.CheckSpeed(run_folder=tmp_path, at_least=10).run()
