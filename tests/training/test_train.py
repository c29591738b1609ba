import errno
import io
import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.errors import ConfigError, DataError, HastenWarning, ResourceError, TrainingError
from hasten.planning.cost import training_flops_per_token
from hasten.training import checkpoints, display
from hasten.training.journal import read
from hasten.training.recipes import RECIPES
from hasten.training.session import train
from hasten.training.step import TrainStep


def test_a_run_leaves_a_model_that_transformers_loads_and_files_that_tell_about_it(recipe, corpus, pictures):
    made = recipe(steps=120, vocab_size=301)
    seen = []
    result = train(made, progress=False, on_step=seen.append)
    lines = read(result.folder / "train.jsonl")
    assert lines == seen
    assert [line["step"] for line in lines] == list(range(1, 121))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[0]["loss"] == pytest.approx(math.log(301), rel=0.05)
    assert [line["step"] for line in lines if "validation_loss" in line] == list(range(10, 121, 10))
    assert lines[-1]["tokens"] == result.tokens == 120 * 4 * 32
    assert max(line["learning_rate"] for line in lines) == 5e-3
    assert lines[-1]["learning_rate"] == pytest.approx(5e-4)
    assert (result.folder / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((result.folder / "recipe.json").read_text()) == made.to_json()

    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(result.model_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model_folder)
    ours = hasten.load(result.model_folder, dtype="stored")
    text = (corpus / "copy.py").read_text()[:200]
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ours.tokenizer is not None
    assert ours.tokenizer.encode(text) == ids[0].tolist()
    assert theirs.config.vocab_size == 301
    assert theirs.get_input_embeddings().weight.shape[0] == 301
    assert theirs(ids, labels=ids).loss.item() < 0.85 * math.log(301)


def test_the_exported_weights_are_the_best_or_the_last_as_asked(recipe, monkeypatch):
    measured = iter([3.0, 2.0, 2.5, 2.6] * 2)
    monkeypatch.setattr("hasten.training.evaluate.Validation.loss", lambda self, step: next(measured))
    best = train(recipe(name="best", validate_every=5), progress=False)
    last = train(recipe(name="last", validate_every=5, export="last"), progress=False)
    assert (best.best_step, best.best_validation_loss, best.validation_loss) == (10, 2.0, 2.6)
    stored = {"best": checkpoints.find(best.folder / "checkpoints/best")}
    stored["last"] = checkpoints.find(last.folder / "checkpoints/last")
    for result, name, step in ((best, "best", 10), (last, "last", 20)):
        assert stored[name].step == step
        model = hasten.load(result.model_folder, dtype="stored")
        kept = load_file(stored[name].folder / stored[name].files["weights"][0])
        assert torch.equal(model.norm.weight, kept["norm.weight"])
    assert not torch.equal(
        hasten.load(best.model_folder, dtype="stored").norm.weight,
        hasten.load(last.model_folder, dtype="stored").norm.weight,
    )


@pytest.mark.parametrize(
    ("precision", "asked", "dtype"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "auto", torch.float32),
        ("float32", "float16", torch.float16),
    ],
)
def test_a_model_is_exported_in_the_dtype_that_it_trained_in(precision, asked, dtype, recipe):
    made = recipe(steps=2, precision=precision, export_dtype=asked)
    result = train(made, progress=False)
    assert hasten.load(result.model_folder, dtype="stored").dtype == dtype
    kept = checkpoints.find(result.folder / "checkpoints/last")
    assert load_file(kept.folder / kept.files["weights"][0])["norm.weight"].dtype == torch.float32
    assert json.loads((result.model_folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_half_precisions_train_too(recipe, precision):
    result = train(recipe(steps=60, precision=precision), progress=False)
    lines = read(result.folder / "train.jsonl")
    assert result.loss < 0.85 * lines[0]["loss"]
    assert ("scale" in lines[0]) == (precision == "float16")


def test_mfu_is_the_flops_of_training_over_the_measured_rate(recipe):
    result = train(recipe(steps=3), progress=False)
    line = read(result.folder / "train.jsonl")[-1]
    config = hasten.load(result.model_folder, dtype="stored").config.padded_to(64)
    flops = training_flops_per_token(config, 32)
    assert line["mfu"] == pytest.approx(flops * line["tokens_per_second"] / 1e11, rel=0.02, abs=1e-4)


def test_characters_on_a_file(recipe, corpus, tmp_path):
    base = RECIPES["shakespeare-char"]
    made = recipe(base, source=str(corpus / "copy.py"), layers=1, hidden_size=32, heads=2, context=16, batch_size=4)
    made = recipe(made, source=str(corpus / "copy.py"), steps=10, compile=False, keep_memory=False, threads=1)
    result = train(made, progress=False)
    tokenizer = hasten.load(result.model_folder, dtype="stored").tokenizer
    assert tokenizer.decode(tokenizer.encode("def copy(x):")) == "def copy(x):"
    assert len(tokenizer.encode("def copy")) == 8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pad", [1, 64])
def test_finetuning_goes_on_from_a_folder_with_its_tokenizer(recipe, tied, pad):
    first = train(recipe(name="first", tie_embeddings=tied, steps=60), progress=False)
    made = recipe(
        name="tuned", init=str(first.model_folder), learning_rate=1e-3, steps=20, dropout=0.1, pad_vocabulary_to=pad
    )
    second = train(made, progress=False)
    lines = read(second.folder / "train.jsonl")
    assert lines[0]["loss"] < 1.2 * first.loss
    assert second.best_validation_loss < first.best_validation_loss + 0.05
    before, after = hasten.load(first.model_folder, dtype="stored"), hasten.load(second.model_folder, dtype="stored")
    assert before.tokenizer.digest == after.tokenizer.digest
    assert (after.head.weight is after.embedding.weight) == tied
    assert not torch.equal(before.norm.weight, after.norm.weight)
    assert after.embedding.weight.shape == before.embedding.weight.shape


def test_finetuning_on_a_chat_learns_the_assistants_words_only(recipe, tmp_path):
    first = train(recipe(name="first", steps=2, context=160), progress=False)
    config = first.model_folder / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}a:{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}u:{{ m.content }}{% endif %}{% endfor %}"
    )
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    chat = tmp_path / "chat.jsonl"
    asked = [{"role": "user", "content": "question " * 20}, {"role": "assistant", "content": "yes"}]
    chat.write_text("".join(json.dumps({"messages": asked, "n": n}) + "\n" for n in range(40)))
    seen = []
    original = TrainStep.run

    def run(self, batches, **options):
        result = original(self, batches, **options)
        seen.append(result.targets.item() / result.tokens)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "run", run)
        result = train(
            recipe(
                name="chat", init=str(first.model_folder), source=str(chat), steps=40, separate_documents=True,
                learning_rate=3e-3, context=160,
            ),
            progress=False,
        )  # fmt: skip
    assert 0 < max(seen) < 0.25
    lines = read(result.folder / "train.jsonl")
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(recipe):
    small = train(recipe(name="small", steps=1, vocab_size=280), progress=False)
    large = train(recipe(name="large", steps=1, vocab_size=300), progress=False)
    with pytest.raises(ConfigError, match=r"300 tokens .* 280"):
        train(recipe(name="both", init=str(small.model_folder), tokenizer=str(large.model_folder)), progress=False)


def test_a_longer_context_than_the_model_knows_is_refused(recipe):
    small = train(recipe(name="small", steps=1), progress=False)
    with pytest.raises(ConfigError, match=r"data.context is 64 .* 32 positions"):
        train(recipe(name="longer", init=str(small.model_folder), context=64), progress=False)


def poison(monkeypatch, *, at, value=float("nan")):
    original = TrainStep.loss
    calls = []

    def loss(self, batch, **options):
        if self.model.training:
            calls.append(1)
        return original(self, batch, **options) * (value if self.model.training and len(calls) >= at else 1.0)

    monkeypatch.setattr(TrainStep, "loss", loss)


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_last_good_checkpoint(recipe, monkeypatch):
    poison(monkeypatch, at=14)
    with pytest.raises(TrainingError, match=r"step 14: the loss is nan; the last good checkpoint is of step 10 .*try"):
        train(recipe(), progress=False)
    monkeypatch.undo()
    assert train(recipe(), progress=False, resume="must").steps == 20


def test_a_loss_that_is_no_number_before_the_first_checkpoint(recipe, monkeypatch):
    poison(monkeypatch, at=1, value=float("inf"))
    with pytest.raises(TrainingError, match=r"step 1: the loss is inf; there is no checkpoint yet") as told:
        train(recipe(), progress=False)
    assert "--optimizer.clip" not in str(told.value)  # it is 1 already
    assert "float32" not in str(told.value)


def test_float16_may_skip_some_steps_but_not_a_hundred_in_a_row(recipe, monkeypatch):
    poison(monkeypatch, at=6)
    with pytest.raises(TrainingError, match=r"step 105: 100 steps in a row overflowed in float16"):
        train(recipe(steps=300, precision="float16", validate_every=300, checkpoint_every=300), progress=False)
    line = read(recipe_folder(recipe) / "train.jsonl")[-1]
    assert line["skipped"]
    assert line["loss"] is None


def recipe_folder(recipe):
    from pathlib import Path

    return Path(recipe().run.folder) / "tiny"


def test_a_spike_is_reported_and_counted(recipe, monkeypatch):
    original = TrainStep.loss
    calls = []

    def loss(self, batch, **options):
        if self.model.training:
            calls.append(1)
        return original(self, batch, **options) * (3.0 if self.model.training and len(calls) == 30 else 1.0)

    monkeypatch.setattr(TrainStep, "loss", loss)
    result = train(recipe(steps=40, learning_rate=1e-4), progress=False)
    assert [line["step"] for line in read(result.folder / "train.jsonl") if line["spike"]] == [30]
    assert result.spikes == 1


def test_more_memory_than_there_is(recipe):
    with pytest.raises(ResourceError, match=r"needs about .* GB .* are free.*lower model.layers"):
        train(recipe(layers=1000, hidden_size=16384, heads=128, feed_forward=65536), progress=False)
    with pytest.raises(ResourceError, match=r"lower data.batch_size \(now 10000000\)"):
        train(recipe(batch_size=10_000_000, validation_fraction=0.0), progress=False)


def test_an_unreadable_text(recipe, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        train(recipe(source=str(tmp_path / "nowhere")), progress=False)


def test_a_text_that_is_too_short_is_told_before_training(recipe):
    with pytest.raises(DataError, match="shorter sequence_length"):
        train(recipe(context=50_000), progress=False)


def test_without_a_validation_split(recipe):
    result = train(recipe(validation_fraction=0.0), progress=False)
    assert result.validation_loss is None
    assert result.model_folder.exists()
    assert not (result.folder / "checkpoints/best").exists()


def test_a_full_disk_leaves_the_last_good_checkpoint(recipe, monkeypatch):
    original = checkpoints.write

    def full(path, parts):
        if "00000020" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, parts)

    monkeypatch.setattr(checkpoints, "write", full)
    with pytest.raises(ResourceError, match="disk is full"):
        train(recipe(steps=40), progress=False)
    monkeypatch.undo()
    assert checkpoints.find(recipe_folder(recipe) / "checkpoints/last").step == 10
    assert train(recipe(steps=40), progress=False, resume="must").steps == 40


def test_epochs_and_steps_decide_the_number_of_steps(recipe):
    epochs = train(recipe(name="epochs", steps=None, epochs=1.0), progress=False)
    windows = len(list(read(epochs.folder / "train.jsonl"))) * 4
    assert epochs.tokens == windows * 32
    both = train(recipe(name="both", steps=12, minutes=60.0), progress=False)
    assert both.steps == 12


def test_a_skipped_step_can_be_shown_and_drawn(tmp_path, pictures):
    line = {"step": 1, "loss": None, "tokens": 10, "tokens_per_second": 5.0, "mfu": None, "spike": False}
    assert display.numbers(line, None) == "skipped · 5 tokens/s"
    display.draw_losses([line, line | {"loss": 2.0, "spike": True}], tmp_path / "x.png", title="x")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_tensorboard_without_its_package_is_told(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ResourceError, match=r"pip install 'hasten\[tensorboard\]'"):
        train(recipe(tensorboard=True), progress=False)


def test_without_a_compiler_it_warns_and_trains(recipe, monkeypatch):
    from hasten.training import compiled

    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    with pytest.warns(HastenWarning, match="no C\\+\\+ compiler"):
        result = train(recipe(compile=True), progress=False)
    assert result.steps == 20


@pytest.mark.slow
def test_a_compiled_run_resumes_exactly(recipe, monkeypatch):
    hard = {"compile": True, "dropout": 0.1, "precision": "bfloat16", "steps": 8, "checkpoint_every": 4}
    hard |= {"layers": 1, "validation_fraction": 0.0}
    whole = train(recipe(name="whole", **hard), progress=False)

    def stop(line):
        if line["step"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe(name="stopped", **hard), progress=False, on_step=stop)
    resumed = train(recipe(name="stopped", **hard), progress=False)
    pairs = zip(read(whole.folder / "train.jsonl"), read(resumed.folder / "train.jsonl"), strict=True)
    assert all(a["loss"] == b["loss"] for a, b in pairs)


def test_the_command_prints_its_recipe_and_its_result(recipe, corpus, tmp_path, capsys):
    from hasten.cli.train import Train
    from hasten.training.recipe import Recipe

    Train.main(["demo", "--optimizer.learning-rate", "1e-3", "--model.layers", "4", "--print-config"])
    printed = Recipe.from_json(json.loads(capsys.readouterr().out))
    assert (printed.optimizer.learning_rate, printed.model.layers) == (1e-3, 4)
    assert printed.model.hidden_size == RECIPES["demo"].model.hidden_size

    Train(recipe=recipe(steps=3), progress=False, json="-").run()
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    Train(recipe=recipe(steps=3), progress=False).run()
    assert str(recipe_folder(recipe) / "model") in capsys.readouterr().out.replace("\n", "")


def test_the_command_refuses_a_field_that_does_not_exist(monkeypatch):
    from hasten.cli.train import Train

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(SystemExit):
        Train.main(["demo", "--optimizer.learning-rat", "1"])


def test_a_shape_that_cannot_be_built_is_a_config_error(recipe):
    for change, named in (
        ({"hidden_size": 33}, "model.heads"),
        ({"hidden_size": 32768}, "head_dim"),
        ({"heads": 4, "kv_heads": 3}, "model.kv_heads"),
        ({"family": "gpt2"}, "gpt2 has as many"),
    ):
        with pytest.raises(ConfigError, match=named):
            train(recipe(**change), progress=False)
