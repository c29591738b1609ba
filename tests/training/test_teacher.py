"""Distillation: the loss is the divergence from the teacher, to which a student comes nearer than by the text."""

from dataclasses import replace

import pytest
import torch

import hasten
from hasten.checkpoints.export import export_model
from hasten.errors import CheckpointError, ConfigError
from hasten.model.context import training_context
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import check_vocabulary
from hasten.profiling.profile import profile
from hasten.quantization import Int8, quantize
from hasten.training.journal import read
from hasten.training.memory import step_memory
from hasten.training.recipe import Lora, Qat
from hasten.training.session import train
from hasten.training.setup import set_up
from hasten.training.step import IGNORED
from hasten.training.teacher import Teacher
from rank_runs import stop_after


@pytest.fixture(scope="module")
def folder(recipe_of_module):
    """A teacher with more layers than its students have."""
    return str(train(recipe_of_module(name="teacher", layers=3, steps=60), progress=False).model_folder)


def divergence(teacher, student, batch):
    """KL(teacher || student), the mean over the targets, by its definition in float64."""
    positions = torch.arange(batch.inputs.shape[1]).unsqueeze(0)
    with torch.no_grad():
        p, q = (
            model(batch.inputs, positions, training_context(model, batch.inputs.shape[1])).double().log_softmax(-1)
            for model in (teacher, student)
        )
    counted = batch.targets != IGNORED
    return ((p.exp() * (p - q)).sum(-1) * counted).sum() / counted.sum()


def test_the_loss_is_the_divergence_by_its_definition(recipe, folder, monkeypatch):

    setup = set_up(recipe(name="student", teacher=folder, tokenizer=folder), progress=False)
    batch, step = setup.batches.batch(0), setup.step
    batch.targets[0, :5] = IGNORED
    expected = divergence(hasten.load(folder, dtype="stored"), step.model, batch)
    count = int((batch.targets != IGNORED).sum())
    gradients = []
    for rows in (1 << 20, 50):  # all at once, and in pieces of which the last is smaller
        monkeypatch.setattr("hasten.ops.loss.rows_of_a_chunk", lambda width, rows=rows: rows)
        step.model.zero_grad()
        loss = step.loss(batch, teacher=step.teacher) / count
        torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-6)
        loss.backward()
        gradients.append([p.grad.clone() for p in step.model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert all(p.grad is None for p in step.teacher.model.parameters())
    text = step.loss(batch) / count  # what is validated
    assert abs(float(text.detach()) - float(expected)) > 0.1


def test_a_model_has_nothing_to_learn_of_itself(recipe, folder):
    made = recipe(name="same", layers=3, init=folder, teacher=folder, steps=3)
    first = read(train(made, progress=False).folder / "train.jsonl")[0]
    assert first["loss"] == pytest.approx(0, abs=1e-6)
    assert first["gradient_norm"] < 1e-3


def test_a_student_comes_nearer_to_its_teacher_than_by_the_text(recipe, folder):
    runs = {
        name: train(recipe(name=name, teacher=teacher, tokenizer=folder, steps=60), progress=False)
        for name, teacher in (("text", None), ("taught", folder))
    }
    batch = set_up(recipe(tokenizer=folder), progress=False).batches.batch(50)
    teacher = hasten.load(folder, dtype="stored")
    apart = {
        name: float(divergence(teacher, hasten.load(run.model_folder, dtype="stored"), batch))
        for name, run in runs.items()
    }
    assert apart["taught"] < 0.9 * apart["text"]
    losses = [line["loss"] for line in read(runs["taught"].folder / "train.jsonl")]
    assert losses[-1] < 0.5 * losses[0], "the loss of a step is the divergence"
    assert runs["taught"].validation_loss > losses[-1], "and validation is by the text"


def test_a_rounded_model_and_an_adapter_learn_of_what_they_were(recipe, folder):
    """Both go on bit for bit where they were stopped."""
    rounded = Qat(bits=3, group_size=32, activations="float")  # the teacher's activations are not rounded
    for name, own in (("rounded", {"qat": rounded}), ("adapter", {"lora": Lora(rank=4)})):
        made = recipe(name=name, layers=3, init=folder, teacher=folder, steps=20, learning_rate=1e-3, **own)
        whole = train(made, progress=False)
        losses = [line["loss"] for line in read(whole.folder / "train.jsonl")]
        if name == "rounded":
            assert losses[-1] < 0.8 * losses[0], "it gets some of its loss back"
        again = replace(made, name=f"{name}-again")
        stop_after(again, 11)
        train(again, progress=False, resume="must")
        assert [line["loss"] for line in read(whole.folder.parent / again.name / "train.jsonl")] == losses


def test_documents_and_micro_batches_are_the_teachers_too(recipe, folder):
    made = recipe(name="parts", teacher=folder, tokenizer=folder, separate_documents=True, steps=2)
    first = {}
    for accumulation in (1, 2):
        own = replace(made, data=replace(made.data, batch_size=4 // accumulation, accumulation=accumulation))
        setup = set_up(own, progress=False)
        batches = [setup.batches.batch(number) for number in range(accumulation)]
        first[accumulation] = float(setup.step.run(batches, learning_rate=0.0).loss)
    assert first[1] == pytest.approx(first[2], rel=1e-5)
    teacher, tokens = setup.step.teacher, torch.arange(32)
    batch = replace(batches[0], documents=torch.tensor([[0] * 20 + [1] * 12]).expand(2, 32))
    states = teacher.soft_targets(batch, tokens[None], batch.documents).states
    for part in (slice(0, 20), slice(20, 32)):  # each as if it stood alone
        alone = replace(batch, inputs=batch.inputs[:, part], targets=batch.targets[:, part], documents=None)
        torch.testing.assert_close(states[:, part], teacher.soft_targets(alone, tokens[None, part], None).states)


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model; transformers does not")
def test_a_quantized_model_teaches_too(recipe, folder, tmp_path):
    export_model(quantize(hasten.load(folder, dtype="stored"), Int8()), tmp_path / "int8")
    setup = set_up(recipe(name="student", teacher=str(tmp_path / "int8"), tokenizer=folder), progress=False)
    batch, step = setup.batches.batch(0), setup.step
    loss = float(step.loss(batch, teacher=step.teacher).detach()) / batch.targets.numel()
    assert loss == pytest.approx(float(divergence(hasten.load(tmp_path / "int8", dtype="float32"), step.model, batch)))
    assert loss != pytest.approx(float(divergence(hasten.load(folder, dtype="stored"), step.model, batch)), rel=1e-6)


def test_its_memory_is_counted(recipe, folder):
    made = recipe(tokenizer=folder)
    config, device = hasten.load(folder, dtype="stored").config, torch.device("cpu")
    without, with_it = (step_memory(config, replace(made, teacher=one), device) for one in (None, folder))
    weights = sum(p.numel() for p in hasten.load(folder, dtype="stored").parameters())
    tokens, words = made.data.batch_size * made.data.context, config.vocab_size
    assert 4 * weights < with_it.peak - without.peak < 4 * weights + tokens * (32 * words + 40 * config.hidden_size * 4)


def test_a_teacher_may_have_rows_that_no_token_has(recipe, folder):
    """As Qwen's larger models have, beside the smaller ones."""
    teacher, student = hasten.load(folder, dtype="stored"), hasten.load(folder, dtype="stored")
    larger = Transformer(replace(teacher.config, vocab_size=320, padded_vocab_size=320))
    with torch.no_grad():
        for name, own in larger.named_parameters():
            own.zero_()
            theirs = teacher.get_parameter(name)
            own[: theirs.shape[0]] = theirs
        larger.head.weight[300:] = 1.0
    batch = set_up(recipe(tokenizer=folder), progress=False).batches.batch(0)
    places = torch.arange(32)[None]
    wanted = Teacher(teacher, words=300).soft_targets(batch, places, None)
    found = Teacher(larger, words=300).soft_targets(batch, places, None)
    assert torch.equal(found.logits(found.states), wanted.logits(wanted.states))
    check_vocabulary(larger, student, name="it", larger=True)
    with pytest.raises(ConfigError, match="320"):
        check_vocabulary(larger, student, name="it")


def test_a_teacher_that_does_not_fit_is_refused(recipe, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"teacher .* has 300 tokens, the model 320; it needs the same"):
        train(recipe(name="other", teacher=folder, vocab_size=320), progress=False)
    with pytest.raises(ConfigError, match=r"teacher .* has 32 positions and data\.context is 64; lower data\.context"):
        train(recipe(name="long", teacher=folder, tokenizer=folder, context=64), progress=False)
    with pytest.raises(CheckpointError, match=r"^teacher: .*none.* is not a folder here"):
        train(recipe(name="none", teacher=str(tmp_path / "none")), progress=False)
    with pytest.raises(ConfigError, match="teacher is empty"):
        recipe(teacher="").check()
    split = recipe(teacher=folder)
    with pytest.raises(ConfigError, match=r"parallel\.tensor does not support a teacher"):
        replace(split, parallel=replace(split.parallel, tensor=2, zero=1)).check()
    with pytest.raises(ConfigError, match="profile the recipe without one"):
        profile(split, tmp_path / "profile")


def test_the_heads_gradient_is_summed_in_float32(recipe, folder, monkeypatch):
    """Under autocast, over many pieces: as near to float64's as with all rows at once."""

    setup = set_up(recipe(name="student", teacher=folder, tokenizer=folder, precision="bfloat16"), progress=False)
    batch, step = setup.batches.batch(0), setup.step
    errors = []
    for rows in (1 << 20, 2):
        monkeypatch.setattr("hasten.ops.loss.rows_of_a_chunk", lambda width, rows=rows: rows)
        step.model.zero_grad()
        step.loss(batch, teacher=step.teacher).backward()
        errors.append(step.model.head.weight.grad.double())
    exact = errors[0]
    assert (errors[1] - exact).norm() < 4e-3 * exact.norm(), "64 sums in bfloat16 would be off by more"
