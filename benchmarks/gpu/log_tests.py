"""A pytest plugin that logs how each test ended, at once: a run that is interrupted never gets to pytest's summary.

A line of JSON for each test goes to $GPU_TESTS_LOG. A run that finds a log there leaves out the tests that passed, so
that it goes on where the last one ended. Tests whose names contain one of $GPU_TESTS_FIRST (by commas) begin, in its
order. Reasons of failures are printed too.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpu.gpu_tests import passed

LOG = Path(os.environ["GPU_TESTS_LOG"])
_seen: dict[str, dict[str, Any]] = {}  # tests that are not over


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = passed(LOG)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    first = os.environ.get("GPU_TESTS_FIRST", "").split(",")

    def rank(item: pytest.Item) -> int:
        return next((i for i, part in enumerate(first) if part in item.nodeid), len(first))

    items[:] = sorted((item for item in items if item.nodeid not in done), key=rank)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # its parent gets the report too
        return
    one = _seen.setdefault(report.nodeid, {"id": report.nodeid, "state": "PASSED", "seconds": 0.0})
    one["seconds"] = round(one["seconds"] + report.duration, 2)
    if report.failed:
        one["state"] = "FAILED" if report.when == "call" else "ERROR"
        lines = report.longreprtext.splitlines()
        reasons = [line[1:].strip() for line in lines if line.startswith("E ")]
        one["reasons"] = [line[:300] for line in (reasons or lines[-1:])[:3]]
        one["where"] = next((line for line in reversed(lines) if ": in " in line or ".py:" in line), "")[:160]
        print(f"\nE   {report.nodeid}: {' '.join(one['reasons'])[:400]}", flush=True)
    elif report.skipped and report.when != "teardown":
        one["state"] = "XFAIL" if hasattr(report, "wasxfail") else "SKIPPED"
    elif report.when == "call" and hasattr(report, "wasxfail"):
        one["state"] = "XPASS"
    if report.when not in ("setup", "call"):  # torn down, or its worker crashed
        with LOG.open("a") as file:
            file.write("\n" + json.dumps(_seen.pop(report.nodeid)))  # after whatever a kill cut short
