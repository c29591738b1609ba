"""Every link of the pages leads somewhere: to a file that is there, and to a heading in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^ {4,}[^\s*-].*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def broken(page: Path) -> list[str]:
    wrong = []
    text = page.read_text()
    for target in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() and f"<!-- table: {file.stem}" in text and "Not measured yet." in text:
            continue  # benchmarks/tables.py fills such a table once its JSON is committed
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken(page) == []


def test_code_names_pages_that_are_there():
    """Docstrings, comments, messages and tests name pages by their path from the root."""
    files = [file for folder in ("src", "tests", "benchmarks") for file in (ROOT / folder).rglob("*")]
    missing = []
    for file in [*(file for file in files if file.suffix in (".py", ".cpp", ".h")), ROOT / "Makefile"]:
        for name in re.findall(r"(?<![/\w])docs/[\w/-]+\.(?:md|png)", file.read_text()):
            if not (ROOT / name).exists():
                missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert missing == []
