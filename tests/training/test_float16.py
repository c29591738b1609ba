"""float16: dynamic loss scaling saves a run that a fixed scale, or none, would lose; sums are in float32."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.data import Batch
from hasten.model.initialize import initialize
from hasten.training.build import shape_config
from hasten.training.optimizers import adamw
from hasten.training.precision import CLEAN_STEPS, START, Precision
from hasten.training.recipe import Optimizer, Shape
from hasten.training.session import train
from hasten.training.step import TrainStep

CONFIG = shape_config(Shape(layers=2, hidden_size=32, heads=2, feed_forward=64), vocab_size=50, positions=16)
TOKENS = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(0))
DATA = Batch(inputs=TOKENS[:, :-1].contiguous(), targets=TOKENS[:, 1:].contiguous(), documents=None)


class FixedScale(Precision):
    """float16 with one scale for ever, and every step taken."""

    def __init__(self, factor):
        super().__init__("float16", "cpu")
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.factor = factor

    def backward(self, loss):
        (loss * self.factor).backward()

    def unscale(self, optimizer, ranks):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= self.factor


def step_of(precision, *, loud=1.0):
    """loud: what the head is multiplied with, so that its gradients are large."""
    model = initialize(CONFIG, seed=1)
    with torch.no_grad():
        model.embedding.weight *= loud
    return TrainStep(model, adamw(model, Optimizer(learning_rate=3e-3)), precision)


def losses(step, count):
    return [step.run([DATA]).loss.item() for _ in range(count)]


def test_a_fixed_scale_overflows_where_the_dynamic_one_trains():
    fixed = step_of(FixedScale(START * 256), loud=20.0)
    losses(fixed, 30)
    assert not all(p.isfinite().all() for p in fixed.model.parameters()), "the run is lost"
    dynamic = step_of(precision := Precision("float16", "cpu"), loud=20.0)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=START * 256, growth_interval=CLEAN_STEPS)
    found = losses(dynamic, 60)
    assert precision.scale() < START * 256, "some steps were skipped, and the scale halved"
    assert all(p.isfinite().all() for p in dynamic.model.parameters())
    exact = losses(step_of(Precision("float32", "cpu"), loud=20.0), 60)
    skipped = round(math.log2(START * 256 / precision.scale()))
    assert skipped >= 3
    assert found[-1] == pytest.approx(exact[-1 - skipped], rel=0.05)


def test_without_a_scale_small_gradients_are_lost():
    def zeros(factor):
        step = step_of(FixedScale(factor))
        step.model.train()
        step.precision.backward(step.loss(DATA) * 1e-6)
        gradient = step.model.blocks[0].mlp.up.weight.grad
        return (gradient == 0).float().mean().item()

    assert zeros(1.0) > 0.5
    assert zeros(START) < 0.05


def test_the_scale_starts_doubles_and_halves_as_it_should():
    precision = Precision("float16", "cpu")
    assert (precision.scale(), precision.scaler.get_growth_interval()) == (65_536, 2000)
    assert (precision.scaler.get_growth_factor(), precision.scaler.get_backoff_factor()) == (2.0, 0.5)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(2000):
        assert precision.scale() == 65_536, step
        one_step(precision, optimizer, weight, 1.0)
    assert precision.scale() == 131_072
    before = weight.item()
    one_step(precision, optimizer, weight, float("inf"))
    assert (precision.scale(), weight.item()) == (65_536, before)
    other = Precision("float16", "cpu")
    other.load(precision.state())
    assert other.state() == precision.state()


def one_step(precision, optimizer, weight, factor):
    precision.backward(weight.sum() * factor)
    precision.unscale(optimizer)
    precision.step(optimizer)
    optimizer.zero_grad()


def test_a_run_skips_its_first_steps_and_then_trains(recipe):
    lines = []
    train(recipe(precision="float16", steps=30, hidden_size=64), progress=False, on_step=lines.append)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert all(line["scale"] <= 65_536 for line in lines)
    assert not lines[-1]["skipped"]


class Sums(TorchDispatchMode):
    """Notes softmaxes, means, exponentials and norms on half precision."""

    WIDE = ("softmax", "logsumexp", "mean", "var", "layer_norm", "exp", "log", "rsqrt", "norm")

    def __init__(self):
        super().__init__()
        self.seen, self.wrong = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if any(part in name for part in self.WIDE) and not name.startswith(("expand", "_foreach")):
            self.seen.add(name)
            if any(isinstance(a, torch.Tensor) and a.dtype in (torch.float16, torch.bfloat16) for a in args):
                self.wrong.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_softmax_norms_and_the_loss_compute_in_float32(precision, family):
    config = shape_config(
        Shape(family=family, layers=1, hidden_size=32, heads=2, feed_forward=64), vocab_size=50, positions=16
    )
    model = initialize(config, seed=1)
    model.bind(attention="reference")
    step = TrainStep(model, adamw(model, Optimizer()), Precision(precision, "cpu"))
    with Sums() as sums:
        step.run([DATA])
    assert sums.wrong == []
    assert len(sums.seen) >= 4
