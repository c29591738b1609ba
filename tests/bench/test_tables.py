"""The pages' tables are those of the committed JSON."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "tables.py"
spec = importlib.util.spec_from_file_location("tables", FILE)
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_json_holds(page):
    text = page.read_text()
    assert tables.with_tables(text) == text, "run python benchmarks/tables.py"


def test_a_table_that_differs_is_noticed_and_mended(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- table: compare-avx2 -->\n| 9.99× |\n<!-- /table -->\n\nAfter.\n")
    monkeypatch.setattr(tables, "PAGES", [page])
    assert list(tables.stale()) == [page]
    page.write_text(tables.with_tables(page.read_text()))
    text = page.read_text()
    assert "9.99" not in text
    assert text.count("ik_llama.cpp") >= 3
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert list(tables.stale()) == []
