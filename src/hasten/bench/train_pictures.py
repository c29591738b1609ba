"""The pictures of `hasten bench race` and `hasten bench batch`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.bench.draw import draw_bars, draw_curves
from hasten.bench.table import machine_line


def draw_race(report: Mapping[str, Any], path: str | Path) -> None:
    """Validation loss over the seconds of training, a curve for each contestant."""
    series = {
        row["name"]: (
            [entry["training_seconds"] for entry in row["rounds"]],
            [entry["validation_loss"] for entry in row["rounds"]],
        )
        for row in report["rows"]
        if row.get("rounds")
    }
    settings = report["settings"]
    draw_curves(
        series,
        path,
        title="Validation loss against wall time",
        subtitle=f"{settings['model']}; {machine_line(report['machine'], settings['device'])}",
        x_label="seconds of training, compiling left out",
        y_label="validation loss, nats a token",
    )


def draw_batches(report: Mapping[str, Any], path: str | Path) -> None:
    """The largest batch of each rung as a bar."""
    settings = report["settings"]
    draw_bars(
        {row["name"]: row["largest_batch"] for row in report["rows"]},
        path,
        title=f"The largest batch in {settings['memory_bytes'] / 2**30:g} GiB",
        subtitle=f"{settings['model']}; {machine_line(report['machine'], settings['device'])}",
        x_label="rows in a batch",
    )
