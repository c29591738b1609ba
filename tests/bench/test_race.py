"""Race and largest batch: the search, the limit, and both commands at a tiny size."""

import json
import os
from pathlib import Path

import pytest

from hasten.bench.largest_batch import LargestBatch
from hasten.bench.race import Race
from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.training.recipe import Data, Recipe, Run, Shape
from hasten.training.recipes import RECIPES
from own_cache import make_cache


@pytest.mark.slow
def test_a_process_that_may_take_too_little_does_not_fit(monkeypatch):
    told = []
    monkeypatch.setattr("hasten.bench.largest_batch.say", told.append)
    found = {}
    for memory in (2**-10, 0.5):
        report = LargestBatch(shape="tiny", memory=memory, rungs=("flash",), device="cpu", threads=1, most=1).run()
        found[memory] = report["rows"][0]["largest_batch"]
    assert list(found.values()) == [0, 1]
    assert told == ["flash: a batch of 1 does not fit", "flash: a batch of 1 fits"]
    assert report["settings"]["memory_bytes"] == 512 << 20


@pytest.mark.slow
def test_a_refusal_is_known_by_what_passes_without_the_limit(monkeypatch):
    monkeypatch.setattr("hasten.bench.largest_batch.REFUSALS", ())
    report = LargestBatch(shape="tiny", memory=2**-10, rungs=("flash",), device="cpu", threads=1, most=1).run()
    assert report["rows"][0]["largest_batch"] == 0


@pytest.mark.parametrize("free", [None, "KeyError: 'flash'"])
def test_an_unfamiliar_failure_is_the_limits_only_if_it_goes_away_without_one(free, monkeypatch):
    # CPython has been seen to say this of a refused allocation; it could as well be a fault of ours.
    limited = "SystemError: error return without exception set"
    asked = []

    def failure(search, rung, memory):
        asked.append(memory)
        return limited if memory else free

    monkeypatch.setattr(LargestBatch, "_failure", failure)
    search = LargestBatch(shape="tiny", memory=2**-10, rungs=("flash",), device="cpu", most=1)
    if free is None:
        assert search.run()["rows"][0]["largest_batch"] == 0
    else:
        with pytest.raises(ConfigError, match="flash with a batch of 1 failed, without a limit too: KeyError: 'flash'"):
            search.run()
    assert asked == [1 << 20, None]


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        LargestBatch(shape="tiny", most=0).run()
    with pytest.raises(ConfigError, match="no recipe 'x' to race with; known: demo"):
        Race(recipe="x").run()
    for change, named in (
        ({"seconds": 0}, "--seconds is 0"),
        ({"seconds": float("nan")}, "--seconds is nan"),
        ({"steps": 0}, "--steps is 0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"sequence_length": 1}, "--sequence-length is 1; it must be at least 2"),
    ):
        with pytest.raises(ConfigError, match=named):
            Race(recipe="demo", **change).run()


@pytest.mark.parametrize("memory", ["nan", "inf", "0"])
def test_a_memory_that_is_none_is_one_line(memory, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "batch", "--shape", "tiny", "--memory", memory])
    assert ended.value.code == 2
    assert f"--memory is {memory} GiB" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["batch", "--shape", "tiny"], "--timeout"),
        (["generate", "--shape", "tiny"], "--limit-seconds"),
        (["attention"], "--point-seconds"),
        (["race"], "--seconds"),
    ],
)
def test_a_time_that_is_none_is_one_line(command, option, seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *command, option, seconds])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {option} is {seconds}; it must be a finite number above 0\n"


def test_a_race_on_a_text_that_is_not_there_fails_at_once(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "race", "--source", str(tmp_path / "nofile.txt")])
    assert ended.value.code == 2
    assert "nofile.txt" in capsys.readouterr().err


def test_commands_of_which_nothing_succeeded_say_so(monkeypatch):
    monkeypatch.setattr(Race, "run", lambda race: {"rows": [{"name": "math", "error": "failed"}]})
    monkeypatch.setattr("hasten.bench.race.print_ladder", lambda report: None)
    monkeypatch.setattr(LargestBatch, "run", lambda search: {"rows": [{"name": "math", "largest_batch": 0}]})
    for command in (["race"], ["batch", "--shape", "tiny"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *command])
        assert ended.value.code == 1


@pytest.mark.parametrize("command", [["bench", "race"], ["bench", "attention"], ["bench", "train", "--shape", "tiny"]])
def test_threads_are_named_by_their_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--threads", "0"])
    assert ended.value.code == 2
    assert "--threads is 0" in capsys.readouterr().err


def test_pictures_of_attention_are_pngs(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--picture", "a.pdf"])
    assert "--picture is a.pdf" in capsys.readouterr().err


@pytest.mark.slow
def test_a_race_through_the_command_line(tmp_path, monkeypatch, capfd):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text(Path(os.__file__).read_text(encoding="utf-8")[number * 2000 :][:4000])
    small = Recipe(
        name="demo",
        model=Shape(layers=2, hidden_size=32, heads=2, feed_forward=64),
        data=Data(vocab_size=300, context=16, batch_size=2, validation_fraction=0.3),
        run=Run(steps=10, validation_batches=1, device="cpu"),
    )
    # The contestants are processes of their own: the recipe travels with them, the text's cache by the environment.
    monkeypatch.setitem(RECIPES, "demo", small)
    monkeypatch.setenv("HASTEN_CACHE", make_cache(tmp_path / "cache"))
    options = ["--recipe", "demo", "--source", str(text), "--seconds", "0.2", "--rounds", "2", "--threads", "1"]
    picture = tmp_path / "race.png"
    main(["bench", "race", *options, "--rungs", "explicit-float32,math", "--json", "-", "--picture", str(picture)])
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert [row["name"] for row in report["rows"]] == ["explicit-float32", "math"]
    for row in report["rows"]:
        first, last = row["rounds"]
        assert last["training_seconds"] > first["training_seconds"] >= 0.2
        assert last["step"] > first["step"] > 2
        assert last["validation_loss"] < 6
    assert "validation loss" in err
    assert str(tmp_path) not in json.dumps(report["settings"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_batches_are_drawn(tmp_path):
    from hasten.machine import describe

    report = {
        "machine": describe().to_json(),
        "settings": {"model": "x", "memory_bytes": 1 << 30, "device": "cpu"},
        "rows": [{"name": "before", "largest_batch": 4}, {"name": "after", "largest_batch": 9}],
    }
    LargestBatch(shape="tiny").draw(report, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").read_bytes()[:4] == b"\x89PNG"
