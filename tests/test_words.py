"""Words that made sentences hard to read stay out of the packages that were rewritten, and out of the pages.

The rule is not the list: docstrings begin with a verb or a noun phrase that says what a thing is, in the field's terms.
The list keeps out what had to be rewritten most often. A package that is not in CLEAN has not been rewritten yet.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hasten"
CLEAN = [
    "bench",
    "checkpoints",
    "cli",
    "data",
    "distributed",
    "engine",
    "evaluation",
    "machine",
    "measure",
    "model",
    "ops",
    "planning",
    "profiling",
    "quantization",
    "replicas",
    "server",
    "text",
    "training",
]
WORDS = {  # what is refused, and an example of what to write instead
    r"\bso many\b": "name the number: `batch` prompts, N processes",
    r"\bstands?\b": "is, is stored, is listed, represents",
    r"\btold\b": "passed, called with, reported, sent",
    r"\banew\b": "again",
    r"\bmend(s|ed|ing)?\b": "fix",
}
FRAGMENTS = {  # in code only
    r'"""(Of|As) (?!the same)': "say what it is: a verb or a noun phrase",
    r"(#|//) Of ": "say what it is: a verb or a noun phrase",
}


def found(text: str, patterns: dict[str, str]) -> list[str]:
    lines = text.splitlines()
    return [
        f"{number}: {line.strip()[:100]} ({instead})"
        for number, line in enumerate(lines, 1)
        for pattern, instead in patterns.items()
        if re.search(pattern, line)
    ]


def offenders(files, patterns):
    return [f"{file.relative_to(ROOT)}:{hit}" for file in files for hit in found(file.read_text(), patterns)]


@pytest.mark.parametrize("package", CLEAN)
def test_rewritten_packages_stay_plain(package):
    files = sorted(file for file in (SOURCE / package).rglob("*") if file.suffix in (".py", ".h", ".cpp"))
    assert files, f"{package} is no package any more: change CLEAN"
    assert offenders(files, WORDS | FRAGMENTS) == []


def test_modules_of_the_library_itself_stay_plain():
    assert offenders(sorted(SOURCE.glob("*.py")), WORDS | FRAGMENTS) == []


def test_benchmarks_stay_plain():
    files = [file for file in (ROOT / "benchmarks").rglob("*.py") if file.parent.name != "gpu"]
    assert offenders(sorted(files), WORDS | FRAGMENTS) == []


def test_pages_stay_plain():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    examples = sorted(file for file in (ROOT / "examples").iterdir() if file.suffix in (".py", ".ipynb"))
    assert offenders([*pages, *examples], WORDS) == []


@pytest.mark.parametrize(
    "line", ['"""Of a plain parameter: a copy."""', "so many tokens", "it stands there", "made anew"]
)
def test_the_words_are_found(line):
    assert found(line, WORDS | FRAGMENTS)
