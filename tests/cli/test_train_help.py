"""`hasten train RECIPE --help` is one screen whose flags exist; `--help-all` is everything; typos are still told."""

import pytest
import tyro

from hasten.cli.main import main
from hasten.cli.train import command_type
from hasten.cli.train_help import COMMANDS_OWN, USUAL, first_screen
from hasten.training.recipe import flat
from hasten.training.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_the_help_of_a_recipe_is_one_screen_with_its_own_defaults(name, capsys):
    main(["train", name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert f"--optimizer.learning-rate {RECIPES[name].optimizer.learning_rate}" in "\n".join(lines)
    assert all(f"  --{group}." in "\n".join(lines) for group in ("model", "data", "schedule", "run"))


def test_the_help_without_a_recipe_has_a_line_for_each(capsys):
    main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: hasten train RECIPE ")
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(RECIPES)


def test_every_flag_on_the_first_screen_is_taken_with_the_default_that_it_shows():
    recipe = RECIPES["demo"]
    values = flat(recipe)
    arguments = [
        word
        for flag, (field, _) in USUAL.items()
        for word in (flag, str(COMMANDS_OWN[flag] if field is None else values[field]))
    ]
    assert tyro.cli(command_type(), args=["demo", *arguments]).recipe == recipe


def test_a_long_group_is_cut_between_names():
    line = next(line for line in first_screen(RECIPES["demo"]).splitlines() if line.startswith("  --techniques. "))
    assert line.endswith(", ...")
    assert "pad-vocabulary-to" in line


def test_help_all_explains_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo", "--help-all"])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "--techniques.layer-drop-decay" in out
    assert len(out.splitlines()) > 100


def test_an_unknown_option_is_still_told_with_what_was_meant(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo", "--optimiser.clip", "3"])
    assert ended.value.code == 2
    assert "--optimizer.clip" in capsys.readouterr().err
