"""--help: what most people need first, every option once, the rest in groups; --help-all explains everything."""

import io
import sys
from contextlib import suppress

import pytest

from command_classes import FLAT, KINDS
from hasten.cli.bench import LADDERS
from hasten.cli.help import FIRST, WIDTH
from hasten.cli.main import COMMANDS, main
from hasten.effects import Reads, options_of


def screen(capsys, command: str) -> str:
    words = command.replace("profile train RECIPE", "profile train demo").split()
    with suppress(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", FIRST)
def test_the_first_screen_explains_what_most_people_need(capsys, command):
    lines = screen(capsys, command).splitlines()
    assert lines[0].startswith(f"usage: hasten {command} ")
    assert max(map(len, lines)) <= WIDTH
    first = lines[: next((i for i, line in enumerate(lines) if line.startswith("More options")), None)]
    assert len(first) <= 32
    for path in FIRST[command].split():
        flag = f"--{path.replace('_', '-')}"
        assert sum(line.replace("[no-]", "").split()[:1] == [flag] for line in first) == 1, flag


def test_prompt_comes_first(capsys):
    lines = screen(capsys, "generate").splitlines()
    assert next(line for line in lines if line.startswith("  --")).startswith("  --prompt TEXT")


def test_the_usage_of_a_ladder_names_the_model_that_may_follow(capsys):
    for name in LADDERS:
        usage = screen(capsys, f"bench {name}").splitlines()[0]
        model = "[MODEL] " if name in ("generate", "serve") else ""
        assert usage == f"usage: hasten bench {name} {model}[options]"


@pytest.mark.parametrize("command", KINDS)
def test_every_option_is_named_once(capsys, command):
    shown = screen(capsys, command).replace("[no-]", "no-").replace("\n", " ").replace(",", " ").split()
    for option in options_of(KINDS[command], flat=command in FLAT).values():
        if any(isinstance(one, Reads) for one in option.conditions):
            continue
        section, _, name = option.path.replace("_", "-").rpartition(".")
        prefix = f"--{section}." if section else "--"
        written = {f"{prefix}{name}", f"{prefix}no-{name}", f"{prefix}max-{name}", name.upper()}
        assert written & set(shown), option.path


def test_options_that_are_on_are_shown_by_what_turns_them_off(capsys):
    found = screen(capsys, "demo")
    assert "  --[no-]published " in found
    assert "--no-ladder" in found
    assert "--no-prefix-cache" in screen(capsys, "serve")
    assert "--techniques.compile," in screen(capsys, "plan")  # off there, on in hasten train


@pytest.mark.parametrize("command", ["generate", "bench generate", "explain", "profile train demo"])
def test_help_all_explains_everything(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help-all"])
    assert not ended.value.code
    assert len(capsys.readouterr().out.splitlines()) > 40


def test_every_command_is_in_a_group(capsys):
    main(["--help"])
    found = capsys.readouterr().out
    assert all(f"  {name:<10} " in found for name in COMMANDS)
    assert found.index("run a model:") < found.index("make one:") < found.index("measure and explain:")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_that_is_gone_is_no_error(monkeypatch, option):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    main([option])
