"""How many files and functions a reader passes on each walk does not grow unseen."""

import json
import re
from pathlib import Path

import pytest

from walks.run import TABLE, all_walks

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PARTS = {  # of the page, and the walks that make them
    "**A training step**": ("training set-up", "training step"),
    "**A prompt**": ("load", "decode"),
    "**A chat request**": ("chat request",),
}

SOMETIMES = {  # In some runs or steps only, or on a GPU.
    "training/teacher.py",
    "training/layer_drop.py",
    "training/checkpoints.py",
    "engine/ahead.py",
    "engine/batch_runner.py",
}


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return all_walks(tmp_path_factory.mktemp("walks"))


def test_no_walk_grows_by_three_files(walks):
    committed = json.loads(TABLE.read_text())
    longer = {
        name: f"{len(walk.files)} files, committed {committed[name]['files']}: {', '.join(sorted(set(walk.files)))}"
        for name, walk in walks.items()
        if len(walk.files) >= committed[name]["files"] + 3
    }
    assert not longer, "shorten the walk, or commit it with `python tests/walks/run.py --write` and say why"


@pytest.mark.parametrize("title", PARTS)
def test_the_stops_of_the_page_are_passed(walks, title):
    text = PAGE.read_text().split(title, 1)[1].split("\n**", 1)[0].split("\n## ", 1)[0]
    stops = {file for file in re.findall(r"`([\w/]+\.py):[\w.]+`", text) if not file.startswith("cli/")}
    passed = {file for walk in PARTS[title] for file in walks[walk].files}
    assert len(stops) > 5
    assert stops - passed <= SOMETIMES
