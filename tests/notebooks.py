"""Runs a notebook from top to bottom in an empty folder, as Jupyter does, and compares its outputs with those it holds.

python tests/notebooks.py examples/11_train_and_attention.ipynb            # the differences; exit status 1 if any
python tests/notebooks.py examples/11_train_and_attention.ipynb --write    # store this run's outputs in the notebook

A cell tagged "example" may print other words (what a model wrote); all others the same words, with other numbers.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from command_pages import ROOT, environment, shape

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SECONDS = 300  # limit for a cell
EXAMPLE = "example"


def executed(path: Path, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run in the folder. Raises nbclient's CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment())
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    return notebook


def printed(cell: NotebookNode) -> str:
    """The text that a cell printed, and a line for each picture."""
    parts = []
    for output in cell.outputs:
        data: Any = output.get("data", {})
        parts.append("(picture)" if "image/png" in data else output.get("text") or data.get("text/plain", ""))
    return "\n".join(part.strip("\n") for part in parts)


def differences(held: NotebookNode, ran: NotebookNode) -> list[str]:
    """Lines in which a notebook's outputs are not what a run printed."""
    found: list[str] = []
    for cell, other in zip(held.cells, ran.cells, strict=True):
        if cell.cell_type != "code":
            continue
        before, now = printed(cell), printed(other)
        if EXAMPLE in cell.metadata.get("tags", []):
            found += [] if bool(before) == bool(now) else [f"a cell tagged {EXAMPLE!r} prints nothing: {cell.source}"]
        else:
            found += difflib.unified_diff(shape(before), shape(now), "the notebook", "printed", lineterm="", n=1)
    return found


def main() -> None:
    """Run the notebook that the command line names."""
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        ran = executed(path, Path(folder))
    if sys.argv[2:] == ["--write"]:
        nbformat.write(ran, path)
    elif found := differences(nbformat.read(path, as_version=4), ran):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
