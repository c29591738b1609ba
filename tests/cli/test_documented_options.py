"""What pages, messages and docstrings say of commands: every option they name exists. Every command has a guide."""

import re
from pathlib import Path

import pytest

from command_classes import FLAT, KINDS
from hasten.cli.main import COMMANDS
from hasten.cli.profile import ProfileTraining
from hasten.cli.serve import Serve
from hasten.cli.train import Train
from hasten.effects import options_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("tutorials/*.md"))]
PAGES = [*GUIDES, *sorted(DOCS.glob("in-depth/*.md")), *sorted(DOCS.glob("results/*.md"))]
ALL = KINDS | {"train": Train, "profile train": ProfileTraining, "start": Serve}  # start passes options on to serve
LINE = re.compile(r"\bhasten (?P<words>[a-z]+(?: [a-z]+)?)(?P<rest>[^`\n|;&#]*)")
OPTION = re.compile(r"(?<![\w-])--([a-z][\w.-]*\w)")
GENERAL = {"help", "help-all", "version", "key", "option"}  # the last two are written for any option
OTHERS = {  # of pip, torchrun, lm-eval and benchmarks/as_avx2.sh
    *("index-url", "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint"),
    *("batch_size", "log_samples", "model", "model_args", "check"),
}


def names_of(command: str) -> set[str]:
    """The options of a command as they are typed, without dashes in front."""
    found = set(GENERAL)
    for option in options_of(ALL[command], flat=command in FLAT).values():
        section, dot, name = option.path.replace("_", "-").rpartition(".")
        found |= {f"{section}{dot}{before}{name}" for before in ("", "no-", "max-")}
        found |= {section, *(alias.removeprefix("--") for alias in option.aliases)}  # "the --parallel options"
    return found


NAMES = {command: names_of(command) for command in ALL}


def unknown(text: str) -> list[str]:
    """Options that the command before them does not have."""
    text, wrong = text.replace("\\\n", " "), []
    for line in LINE.finditer(text):
        words = line["words"].split()
        command = next((one for one in (" ".join(words), words[0]) if one in NAMES), None)
        if command is not None:
            missing = set(OPTION.findall(line["rest"].partition(", ")[0])) - NAMES[command]
            wrong += [f"hasten {command} --{name}" for name in sorted(missing)]
    return wrong


def test_commands_have_the_options_that_they_are_written_with():
    files = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").iterdir()]
    found = {str(page.relative_to(ROOT)): unknown(page.read_text()) for page in files if page.is_file()}
    assert {page: names for page, names in found.items() if names} == {}


def test_every_option_that_a_guide_names_exists():
    known = OTHERS.union(*NAMES.values())
    found = {page.name: set(OPTION.findall(page.read_text())) - known for page in GUIDES}
    assert {page: names for page, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`hasten eval DIR --against MODEL --texts FILE`", ["hasten eval --texts"]),
        ("hasten bench train \\\n  --prompt-tokens 3", ["hasten bench train --prompt-tokens"]),
        ("hasten train demo --techniques.no-compile --data.source FILE --minutes 3", []),
    ],
)
def test_an_option_that_does_not_exist_is_found(text, found):
    assert unknown(text) == found


def test_every_command_has_a_guide():
    guides = (DOCS / "features.md").read_text().partition("## Guides\n")[2]
    rows = [row.split("|")[1:3] for row in guides.splitlines() if row.startswith("| `")]
    listed = {name for commands, pages in rows if "](" in pages for name in re.findall(r"`(\w+)`", commands)}
    assert listed == set(COMMANDS)
