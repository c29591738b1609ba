"""Killed, interrupted, continued: the losses are those of a run that nothing happened to."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hasten.errors import ConfigError
from hasten.training.journal import read
from hasten.training.recipe import Qat
from hasten.training.session import train

# Trains the recipe in a JSON file, and sends itself a signal after one of the steps.
CHILD = textwrap.dedent("""
    import json, os, signal, sys
    from hasten.training.recipe import Recipe
    from hasten.training.session import train
    recipe = Recipe.from_json(json.load(open(sys.argv[1])))
    at, number = int(sys.argv[2]), int(sys.argv[3])
    def on_step(line):
        if line["step"] == at:
            os.kill(os.getpid(), number)
    result = train(recipe, progress=False, on_step=on_step)
    print(json.dumps(result.to_json()))
""")


def run_child(recipe, folder, *, at, number):
    file = folder / "child.json"
    file.write_text(json.dumps(recipe.to_json()))
    command = [sys.executable, "-c", CHILD, str(file), str(at), str(int(number))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def losses(result):
    return [(line["step"], line["loss"], line["gradient_norm"], line.get("validation_loss")) for line in lines(result)]


def lines(result):
    return read(result.folder / "train.jsonl")


def same_weights(one, other):
    return (one.model_folder / "model.safetensors").read_bytes() == (
        other.model_folder / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float16", "rounded"])
def test_forty_steps_are_twenty_a_kill_and_twenty_more_bit_for_bit(recipe, tmp_path, precision):
    hard = {"steps": 40, "dropout": 0.2, "accumulation": 2, "checkpoint_every": 20, "precision": precision}
    if precision == "rounded":
        hard |= {"precision": "float32", "qat": Qat(bits=3)}
    whole = train(recipe(name="whole", **hard), progress=False)
    killed = recipe(name="killed", **hard)
    done = run_child(killed, tmp_path, at=27, number=signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [line["step"] for line in read(tmp_path / "runs/killed/train.jsonl")] == list(range(1, 28))
    resumed = train(killed, progress=False, resume="must")
    assert losses(resumed) == losses(whole)
    assert [line["step"] for line in lines(resumed)] == list(range(1, 41))
    assert same_weights(whole, resumed)
    assert resumed.tokens == whole.tokens == 40 * 2 * 4 * 32
    if precision == "float16":
        scales = [line["scale"] for line in lines(whole)]
        assert scales == [line["scale"] for line in lines(resumed)]
        assert min(scales) > 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_ends_cleanly_and_the_run_goes_on_exactly(recipe, tmp_path, number):
    hard = {"steps": 24, "dropout": 0.2, "checkpoint_every": 100, "validate_every": 100}
    whole = train(recipe(name="whole", **hard), progress=False)
    stopped = recipe(name="stopped", **hard)
    done = run_child(stopped, tmp_path, at=13, number=number)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["stopped_by"]) == (13, int(number))
    assert not (tmp_path / "runs/stopped/model").exists()
    assert (tmp_path / "runs/stopped/loss.png").exists()
    resumed = train(stopped, progress=False)
    assert losses(resumed) == losses(whole)
    assert same_weights(whole, resumed)


def test_stopped_inside_an_accumulated_step_it_goes_on_from_that_steps_beginning(recipe, monkeypatch):
    from hasten.training.step import TrainStep

    hard = {"steps": 12, "dropout": 0.2, "accumulation": 3, "validate_every": 100}
    whole = train(recipe(name="whole", **hard), progress=False)
    calls = []
    original = TrainStep.loss

    def loss(self, batch, **options):
        calls.append(1)
        if len(calls) == 3 * 5 + 2:  # the second micro-batch of step 6
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, **options)

    monkeypatch.setattr(TrainStep, "loss", loss)
    stopped = train(recipe(name="stopped", **hard), progress=False)
    assert (stopped.steps, stopped.stopped_by) == (5, signal.SIGTERM)
    monkeypatch.undo()
    assert losses(train(recipe(name="stopped", **hard), progress=False)) == losses(whole)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(recipe, tmp_path):
    file = tmp_path / "child.json"
    file.write_text(json.dumps(recipe(steps=1000).to_json()))
    code = CHILD.replace("os.kill(os.getpid(), number)", "os.kill(os.getpid(), 2); os.kill(os.getpid(), 2)")
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), "13", "2"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr


def test_the_command_says_how_to_go_on_and_exits_with_130(recipe, tmp_path):
    command = [sys.executable, "-c", "import sys; from hasten.cli.train import Train; Train.main(sys.argv[1:])", "demo"]
    made = recipe(steps=100_000)
    for name in ("data.source", "run.folder", "data.context", "data.vocab-size", "model.layers", "model.hidden-size"):
        section, field = name.split(".")
        command += [f"--{name}", str(getattr(getattr(made, section), field.replace("-", "_")))]
    command += ["--model.heads", "2", "--steps", "100000", "--minutes", "None", "--techniques.no-compile"]
    command += ["--data.validation-fraction", "0.3", "--threads", "1"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "runs/demo/train.jsonl"
    for _ in range(600):
        if len(read(journal)) > 3:
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert output == ""
    assert "the same command continues from there" in errors
    assert "Traceback" not in errors


def test_a_finished_run_is_not_trained_again(recipe):
    first = train(recipe(), progress=False)
    before = lines(first)
    again = train(recipe(), progress=False)
    assert lines(again) == before
    assert again.steps == first.steps == 20
    assert again.validation_loss == first.validation_loss


def test_another_recipe_under_the_same_name_is_refused_with_the_difference(recipe):
    train(recipe(steps=4), progress=False)
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate: 0.005 -> 0.01.*--resume never"):
        train(recipe(steps=4, learning_rate=0.01), progress=False)
    train(recipe(steps=4, checkpoint_every=1), progress=False)  # a field that changes no number
    started_over = train(recipe(steps=5, learning_rate=0.01), progress=False, resume="never")
    assert [line["step"] for line in lines(started_over)] == [1, 2, 3, 4, 5]


def test_must_resume_needs_a_checkpoint(recipe):
    with pytest.raises(ConfigError, match="no checkpoint"):
        train(recipe(), progress=False, resume="must")


def test_a_changed_text_is_refused(recipe, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 100)
    made = recipe(source=str(text), steps=4)
    train(made, progress=False)
    text.write_text("whether 'tis nobler in the mind to suffer\n" * 100)
    with pytest.raises(ConfigError, match="the text has changed"):
        train(made, progress=False)


def test_a_best_checkpoint_that_was_not_linked_before_the_kill_is_linked(recipe, monkeypatch):
    from hasten.training import loop

    def die(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.checkpoints, "link", die)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(steps=12), progress=False)
    monkeypatch.undo()
    assert not Path(recipe().run.folder, "tiny/checkpoints/best").exists()
    result = train(recipe(steps=12), progress=False)
    assert result.best_step in (10, 12)
    assert (result.folder / "checkpoints/best/checkpoint.json").exists()
