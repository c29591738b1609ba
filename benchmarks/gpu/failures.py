"""A pytest plugin that prints why a test failed at once: a run that is interrupted never gets to pytest's summary."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        reasons = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print(f"\nE   {report.nodeid}: {' '.join(reasons[:3])[:400]}", flush=True)
