"""Every notebook in examples/ runs from top to bottom, and prints what it holds."""

import nbformat
import pytest

from notebooks import NOTEBOOKS, differences, executed

pytestmark = [pytest.mark.real(minutes=2), pytest.mark.timeout(900)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_holds(path, smollm2, tmp_path):
    assert differences(nbformat.read(path, as_version=4), executed(path, tmp_path)) == []
