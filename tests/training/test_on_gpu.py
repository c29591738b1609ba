"""Training on a GPU: losses like a CPU's, in every precision, with every kernel and every way to save memory."""

from dataclasses import replace

import pytest
import torch

import hasten
from hasten.data import Batch
from hasten.model.initialize import initialize
from hasten.training.activations import apply_checkpointing
from hasten.training.build import apply_compile, shape_config
from hasten.training.journal import read
from hasten.training.optimizers import adamw
from hasten.training.precision import Precision
from hasten.training.recipe import Optimizer, Qat, Shape
from hasten.training.session import train
from hasten.training.step import TrainStep
from triton_cases import needs_gpu

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, needs_gpu]
OPTIMIZER = ("kind", "learning_rate")
SHAPE = {"layers": 2, "hidden_size": 128, "heads": 2, "feed_forward": 256}
TOKENS = torch.randint(50, (4, 129), generator=torch.Generator().manual_seed(0))


def step_of(device, *, precision="float32", attention=None, pattern=None, checkpointing="none", compiled=False):
    config = shape_config(Shape(attention_pattern=pattern, **SHAPE), vocab_size=64, positions=128)
    model = initialize(config, seed=1).to(device)
    dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
    model.bind(attention=attention, dtype=None if device == "cpu" else dtype)
    if checkpointing != "none":
        apply_checkpointing(model, checkpointing)
    if compiled:
        apply_compile(model)
    return TrainStep(model, adamw(model, Optimizer(learning_rate=2e-3)), Precision(precision, device))


def losses(step, device, count=6):
    batch = Batch(TOKENS[:, :-1].contiguous().to(device), TOKENS[:, 1:].contiguous().to(device), None)
    return [step.run([batch]).loss.item() for _ in range(count)]


@pytest.fixture(scope="module")
def on_cpu():
    return losses(step_of("cpu", attention="reference"), "cpu")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precisions(precision, compiled, on_cpu):
    found = losses(step_of(DEVICE, precision=precision, compiled=compiled), DEVICE)
    assert found == pytest.approx(on_cpu, rel=1e-3 if precision == "float32" else 3e-2)


@pytest.mark.parametrize("attention", ["flash", "memory-efficient", "math", "cudnn", "flash-triton", "chunked"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_by_name(attention, compiled, on_cpu):
    step = step_of(DEVICE, precision="bfloat16", attention=attention, compiled=compiled)
    assert losses(step, DEVICE) == pytest.approx(on_cpu, rel=3e-2)


@pytest.mark.parametrize("pattern", ["bigbird:block=32,random-blocks=1", "sliding-window:block=32,window=2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_patterns_train_through_flex(pattern, compiled):
    expected = losses(step_of("cpu", attention="reference", pattern=pattern), "cpu")
    step = step_of(DEVICE, precision="bfloat16", pattern=pattern, compiled=compiled)
    assert {block.attention.kernels.tokens.name for block in step.model.blocks} == {"flex"}
    assert losses(step, DEVICE) == pytest.approx(expected, rel=3e-2)


@pytest.mark.parametrize("kind", ["selective", "full", "offload"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_checkpointing_changes_no_loss(kind, precision):
    expected = losses(step_of(DEVICE, precision=precision), DEVICE)
    assert losses(step_of(DEVICE, precision=precision, checkpointing=kind), DEVICE) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bfloat16", "compile": True},
        {"precision": "float16"},
        {"layer_drop": 0.5},
        {"kind": "muon"},
        {"kind": "lamb", "learning_rate": 5e-2},
        {"precision": "bfloat16", "qat": Qat(bits=4, group_size=32)},
        {"separate_documents": True, "precision": "bfloat16"},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "plain",
)
def test_recipes(recipe, changes):
    optimizer = replace(Optimizer(learning_rate=5e-3), **{name: changes[name] for name in OPTIMIZER if name in changes})
    others = {name: value for name, value in changes.items() if name not in OPTIMIZER}
    made = recipe(optimizer=optimizer, steps=40, device=DEVICE, **others)
    result = train(made, progress=False)
    first = read(result.folder / "train.jsonl")[0]["loss"]
    assert result.loss < 0.9 * first
    assert hasten.generate(hasten.load(result.model_folder, device=DEVICE), "def", max_new_tokens=4)


class Stopped(Exception):
    pass


def test_a_run_goes_on_where_it_stopped(recipe):
    whole = train(recipe(name="whole", device=DEVICE), progress=False)

    def stop(line):
        if line["step"] == 15:
            raise Stopped

    with pytest.raises(Stopped):
        train(recipe(name="parts", device=DEVICE), progress=False, on_step=stop)
    parts = train(recipe(name="parts", device=DEVICE), progress=False)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4)
