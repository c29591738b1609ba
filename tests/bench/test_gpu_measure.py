"""benchmarks/gpu without a GPU: its tables, and a run of a few jobs with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu import gpu_tests, plan, report, status  # noqa: E402


def test_every_job_is_measured_once_and_prepared_by_then():
    measured = [name for phase in plan.PHASES for group in phase.groups for name in group.names]
    assert len(measured) == len(set(measured))
    assert {name for phase in plan.PHASES for name in phase.names()} == set(measured) <= set(plan.JOBS)
    shares = [share for phase in plan.PHASES for share in (phase.prepare, phase.measure)]
    assert shares == sorted(shares)


def test_tables_of_what_was_measured():
    measured = {"waited": 160.0, "queued": 165.0, "bytes_per_token": 13.5e9}
    rows = [[4096, 4096, "int8", 1, 12.8, 1310.0], [4096, 4096, "int8", 4, "RuntimeError: no", None]]
    results = {
        "baseline": {"measure": [{"copy_bytes_per_s": 2.86e12, "flops": {"bfloat16": 7.9e14}}]},
        "hasten-7b-bf16": {"measure": [measured], "user": [{"second": {"decode": 150.0}}]},
        "gptfast-7b-bf16": {"measure": [{"queued": 168.0, "user": 155.0}]},
        "engine-bf16": {"measure 64": [{"decode_tokens_per_s": 27_000.0, "whole_tokens_per_s": 21_000.0}]},
        "static-bf16": {"measure 64": [{"decode_tokens_per_s": 36_000.0}]},
        "products": {"measure": [{"rows": rows}]},
        "experts": {"measure": [{"rows": [["bf16", 1, 33.0, 2288.0, 2.29]]}]},
        "hasten-12": {"measure": [{"error": "out of memory"}], "failed": {"error": "out of memory"}},
    }
    text = report.tables(results)
    assert "failed hasten-12: out of memory" in text
    assert dict(zip(*[report.decode(results)[0], report.decode(results)[1][0]], strict=True))["of gpt-fast"] == "0.98"
    assert report.serving(results)[1] == [["bf16", "64", "27,000", "", "36,000", "75%", "21,000", "58%"]]
    assert report.products(results)[1] == [["4096 × 4096", "1", "12.8 (46%)"], ["4096 × 4096", "4", ""]]
    assert report.experts(results)[1] == [["bf16", "1", "33.0", "80%", "2"]]
    rows = status.status({"results": results}, {"rows": []})[1]
    assert rows[0][1] == "**165 / - / -** tokens/s; gpt-fast 168 / - / -; limit 212 / - / -"
    json.dumps(report.compact({"results": results}))


def test_tests_are_logged_at_once_and_resumed(tmp_path):
    """A second run leaves out what passed, and what a kill cut short costs one line only."""
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.xfail\ndef test_known(): assert False\n"
    )
    log = tmp_path / gpu_tests.LOG
    log.write_text('{"id": "test_three.py::test_cut')
    paths = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"GPU_TESTS_LOG": str(log), "PYTHONPATH": paths}
    environment.pop("PYTEST_XDIST_WORKER", None)  # this test may run in one, that one does not
    command = [sys.executable, "-m", "pytest", "-p", "gpu.log_tests", "-p", "no:xdist", "test_three.py"]

    def once():
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    once()
    found = gpu_tests.summary(log, collected=4)
    assert (found["PASSED"], found["FAILED"], found["XFAIL"], found["left"]) == (1, 1, 1, 1)
    assert found["reasons"] == ["test_three.py::test_bad: assert 1 == 2"]
    assert gpu_tests.passed(log) == {"test_three.py::test_good", "test_three.py::test_known"}
    assert "1 failed, 2 deselected" in once()
    assert "tests/ops/test_flash_triton.py" in gpu_tests.files()


@pytest.mark.slow
def test_a_run_without_a_gpu(tmp_path):
    """Jobs are prepared and measured; one that fails does not end the others, and absent peers are left out."""
    command = [sys.executable, str(BENCHMARKS / "gpu" / "measure.py"), "--out", str(tmp_path), "--device", "cpu"]
    command += ["--tiny", "--budget", "150", "--jobs", "2", "--no-commands"]
    command += ["--only", "baseline,experts,7b-bf16,static-bf16,32-fp8"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    assert found["baseline"]["measure"][0]["copy_bytes_per_s"] > 0
    assert [row[:2] for row in found["experts"]["measure"][0]["rows"]] == [["bf16", 1], ["bf16", 4]]
    assert len(found["hasten-7b-bf16"]["measure"]) == 2
    assert found["hasten-7b-bf16"]["user"][0]["second"]["decode"] > 0
    assert found["static-bf16"]["measure 1"][0]["decode_tokens_per_s"] > 0
    assert "gptfast-7b-bf16" not in found
    assert "one stream" in (tmp_path / "tables.txt").read_text()
