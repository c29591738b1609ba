"""Every page for newcomers runs from top to bottom as printed, and prints what it shows."""

import pytest

from command_pages import PAGES, differences

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_printed(page, smollm2, tmp_path):
    assert differences(page.read_text(), tmp_path) == []
