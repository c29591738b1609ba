"""The runner of notebooks itself, and what the notebooks hold; tests/real/test_notebooks.py runs them."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from notebooks import EXAMPLE, NOTEBOOKS, differences, executed, printed


def written(path, *sources, tags=()):
    cells = [new_code_cell(source, metadata={"tags": list(tags)}) for source in sources]
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize("tags", [(), (EXAMPLE,)])
def test_a_notebook_runs_in_order_and_numbers_may_differ(tmp_path, tags):
    path = written(tmp_path / "one.ipynb", "x = 3", "print('one', x, 'of 5')\n'two'", tags=tags)
    ran = executed(path, tmp_path)
    assert [printed(cell) for cell in ran.cells] == ["", "one 3 of 5\n'two'"]
    assert [cell.execution_count for cell in ran.cells] == [1, 2]
    assert differences(ran, ran) == []
    assert differences(nbformat.read(path, as_version=4), ran) != []  # it holds no outputs yet
    held = nbformat.from_dict(ran)
    held.cells[1].outputs[0].text = "one 4 of 17\n"
    assert differences(held, ran) == []
    held.cells[1].outputs[0].text = "two 4 of 17\n"
    assert ("+one # of #" in differences(held, ran)) is not bool(tags)


def test_a_picture_is_compared_by_being_one(tmp_path):
    source = "import matplotlib.pyplot as plt\nfigure, axis = plt.subplots(figsize=(1, 1))\nprint('drawn')"
    ran = executed(written(tmp_path / "one.ipynb", source), tmp_path)
    assert printed(ran.cells[0]).splitlines() == ["drawn", "(picture)"]


def test_a_cell_that_fails_ends_the_notebook(tmp_path):
    with pytest.raises(CellExecutionError, match="no such thing"):
        executed(written(tmp_path / "one.ipynb", "raise ValueError('no such thing')"), tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert not any(output.output_type == "error" for output in cell.outputs)
        assert "print(" not in cell.source or printed(cell), cell.source
    assert path.stat().st_size < 200_000
