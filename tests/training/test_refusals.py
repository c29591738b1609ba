"""What `train` refuses before it does anything, and how it says so."""

import json
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.cli.train import Train
from hasten.data import prepare
from hasten.errors import ConfigError, DataError, ResourceError
from hasten.training import session
from hasten.training.recipes import RECIPES
from hasten.training.session import train


def test_two_runs_in_one_folder_are_refused_and_the_lock_ends_with_the_run(recipe):
    seen = []

    def second(line):
        with pytest.raises(ConfigError, match=r"another process is training in .*tiny"):
            train(recipe(), progress=False, resume="never")
        seen.append(line)

    assert train(recipe(steps=2), progress=False, on_step=second).steps == len(seen) == 2
    with pytest.raises(RuntimeError, match="mine"):
        train(recipe(name="other"), progress=False, on_step=lambda line: (_ for _ in ()).throw(RuntimeError("mine")))
    train(recipe(name="other", steps=2), progress=False)


def test_a_folder_that_cannot_be_made(recipe, tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ResourceError.__base__, match="runs/tiny cannot be written"):
        train(recipe(), progress=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_heads": 0}, r"model\.kv_heads is 0"),
        ({"max_positions": 16}, r"model\.max_positions is 16 and must be at least data\.context"),
        ({"vocab_size": 0}, r"data\.vocab_size is 0"),
        ({"vocab_size": "many"}, r"data\.vocab_size is 'many'; it must be a whole number"),
        ({"batch_size": True}, r"data\.batch_size is True; it must be a whole number"),
    ],
)
def test_a_value_that_cannot_work(recipe, change, named):
    with pytest.raises(ConfigError, match=named):
        train(recipe(**change), progress=False)
    assert not Path(recipe().run.folder).exists()


def test_max_positions_is_what_the_model_declares(recipe):
    import hasten

    result = train(recipe(steps=1, max_positions=100), progress=False)
    assert hasten.load(result.model_folder, dtype="stored").config.max_positions == 100


def test_arguments_of_a_wrong_kind(recipe):
    with pytest.raises(ConfigError, match=r"takes a hasten\.training\.Recipe, and was given 'demo' \(str\).*finetune"):
        train("demo")
    with pytest.raises(ConfigError, match=r"resume is 'maybe'; choose one of 'auto', 'never', 'must'"):
        train(recipe(), resume="maybe")


def test_finetune_without_a_model_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="add --init MODEL"):
        train(RECIPES["finetune"], progress=False)
    assert not list(tmp_path.iterdir())


def test_a_text_too_short_names_the_option(recipe):
    with pytest.raises(DataError, match=r"shorter sequence_length \(hasten train: --data\.context, at most"):
        train(recipe(context=50_000), progress=False)


def test_a_split_too_short_is_named(recipe):
    with pytest.raises(DataError, match=r"the train split has .*--data.context, at most [\d,]+\)"):
        train(recipe(validation_fraction=0.01, context=50_000), progress=False)


def test_an_empty_text_is_called_one(recipe, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty.txt: there is no text in it"):
        train(recipe(source=str(tmp_path / "empty.txt")), progress=False)


@pytest.mark.parametrize(("threads", "wanted"), [(0, "at least 1, or auto"), ("all", "a whole number or auto")])
def test_threads_are_a_number_or_auto(recipe, threads, wanted):
    with pytest.raises(ConfigError, match=f"run.threads is {threads!r}; it must be {wanted}"):
        recipe(threads=threads).check()
    recipe(threads="auto").check()


def test_threads_auto_on_the_command_line(monkeypatch, capsys):
    main(["train", "demo", "--threads", "auto", "--print-config"])
    assert json.loads(capsys.readouterr().out)["run"]["threads"] == "auto"
    main(["train", "demo", "--threads", "2", "--print-config"])
    assert json.loads(capsys.readouterr().out)["run"]["threads"] == 2


@pytest.mark.parametrize("place", [".", "nowhere/result.json"])
def test_a_json_target_that_cannot_be_written_is_told_before_training(recipe, tmp_path, monkeypatch, place):
    monkeypatch.setattr(session, "train", lambda *a, **o: pytest.fail("it trained first"))
    with pytest.raises(ResourceError, match="folder"):
        Train(recipe=recipe(), json=str(tmp_path / place)).run()


def test_what_would_fit_is_told_at_the_start(recipe, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "demo", recipe(name="demo", steps=1))
    main(["train", "demo"])
    told = capsys.readouterr().err
    assert "batches of 4 x 32 tokens take" in told
    assert "rows would fit" in told


def test_a_json_target_that_is_full_ends_with_status_2(recipe, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "demo", recipe(name="demo", steps=1))
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo", "--json", "/dev/full", "--no-progress"])
    assert ended.value.code == 2
    assert "error: cannot write /dev/full" in capsys.readouterr().err


def test_prepare_takes_paths_and_strings_and_refuses_other_numbers(corpus, tmp_path):
    folder = tmp_path / "cache"
    quick = {"validation_fraction": 0.2, "progress": False}
    one = prepare(corpus, vocab_size=300, folder=str(folder), **quick)
    other = prepare(str(corpus), vocab_size=300, folder=folder, **quick)
    assert one.folder == other.folder
    for wrong in ("300", 300.0, None, True):
        with pytest.raises(ConfigError, match=r"vocab_size must be a whole number"):
            prepare(corpus, vocab_size=wrong, folder=folder, **quick)
