"""A model trained as one function, its captured steps, and losses that are read one step late."""

import os
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import hasten
from hasten.errors import ConfigError
from hasten.model.initialize import initialize
from hasten.model.mlp import MLP
from hasten.ops import fp8
from hasten.ops.loss.kernels import Head
from hasten.ops.loss.pieces import loss_and_gradient, loss_and_gradients
from hasten.ops.residual import Norm
from hasten.training import build, train, whole_step
from hasten.training.capture import CapturedStep
from hasten.training.fp8_model import Fp8Model
from hasten.training.journal import read
from hasten.training.optimizers import make_optimizer
from hasten.training.precision import Precision
from hasten.training.training_modules import FusedMLP
from hasten.training.whole import WholeModel, why_not_whole
from triton_cases import needs_gpu, run_interpreted
from whole_cases import batches, make
from whole_cases import train as steps_of


@pytest.fixture
def tiny_recipe(recipe):
    return recipe()


def weights(step):
    return [parameter.detach().clone() for parameter in step.parameters]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("micro", [1, 3])
def test_one_function_trains_as_the_blocks_do(family, micro):
    plain, whole = (make(kind, family=family) for kind in ("plain", "whole"))
    torch.testing.assert_close(steps_of(plain, micro=micro), steps_of(whole, micro=micro), rtol=1e-5, atol=1e-6)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(weights(plain), weights(whole), strict=True))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_in_16_bits_it_errs_at_most_twice_as_much(family):
    exact = [loss for loss, _ in steps_of(make("plain", family=family), steps=1)]
    plain = [loss for loss, _ in steps_of(make("plain", family=family, dtype="bfloat16"), steps=1)]
    ours = [loss for loss, _ in steps_of(make("uncaptured", family=family, dtype="bfloat16"), steps=1)]
    # A step's loss is one number, whose error may be small by chance: the roundings of its logits bound it.
    assert abs(ours[0] - exact[0]) <= max(2 * abs(plain[0] - exact[0]), 2**-8)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_are_the_plain_ones(family, micro, dtype):
    plain, captured = (make(kind, family=family, dtype=dtype) for kind in ("uncaptured", "captured"))
    assert steps_of(plain, micro=micro) == steps_of(captured, micro=micro)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(captured), strict=True))
    assert len(captured.recordings) == (1 if micro == 1 else 3)  # of the whole run
    assert len(captured.recordings[0].calls) > 50


def test_copies_of_weights_change_no_number():
    with_copies, without = (make("uncaptured", dtype="bfloat16", copies=copies) for copies in (True, False))
    assert steps_of(with_copies) == steps_of(without)
    for parameter, copy in with_copies.whole.copies.pairs():
        assert torch.equal(parameter.to(torch.bfloat16), copy)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_by_hand_are_those_of_autograd(family, tied, dropout):
    step = make("uncaptured", family=family, dropout=dropout)
    model, whole, share = step.model, step.whole, torch.tensor(0.25)
    if not tied:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone().mul(1.5))
    model.train()
    batch = next(batches(1))[0]
    given = batch.inputs, torch.arange(batch.inputs.shape[1])[None], step.contexts.of(batch.inputs.shape[1])
    found, leaves = [], list(model.parameters())
    for by_hand in (False, True):
        torch.manual_seed(3)
        loss = whole(*given, targets=batch.targets, share=share if by_hand else None)
        assert ("_Loss" in type(loss.grad_fn).__name__) == by_hand
        loss = loss if by_hand else loss * share
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert whole.writes_gradients
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_other_rows_run_uncaptured():
    plain, captured = make("uncaptured"), make("captured")
    for rows in (2, 3, 2):
        assert steps_of(plain, steps=2, rows=rows) == steps_of(captured, steps=2, rows=rows)
    assert len(captured.recordings) == 1


def test_its_update_is_adamws(monkeypatch):
    """PyTorch's optimizer after PyTorch's clipping, with its state in its format, for the same gradients."""
    monkeypatch.setattr(WholeModel, "writes_gradients", False)
    ours, theirs = make("uncaptured", copies=False), make("whole")
    torch.testing.assert_close(steps_of(ours), steps_of(theirs), rtol=1e-6, atol=1e-7)
    for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
        a, b = ours.optimizer.state[mine], theirs.optimizer.state[other]
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-7)


def test_a_stop_between_micro_batches_changes_nothing():
    step, other = make("captured"), make("captured")
    steps_of(step, micro=3, steps=2)
    steps_of(other, micro=3, steps=2)
    before, asked = weights(step), iter([False, False, True])
    step.should_stop = lambda: next(asked)
    assert step.run(next(batches(1, 3, seed=9))) is None
    assert all(torch.equal(a, b) for a, b in zip(before, weights(step), strict=True))
    step.should_stop = lambda: False
    assert steps_of(step, micro=3) == steps_of(other, micro=3)


def test_a_loaded_state_is_taken_up():
    step, other = make("captured"), make("captured")
    steps_of(step)
    steps_of(other)
    for parameter in step.parameters:  # as a checkpoint is loaded: new tensors
        state = step.optimizer.state[parameter]
        step.optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
    assert steps_of(step) == steps_of(other)
    assert len(step.recordings) == 2


@pytest.mark.slow
def test_one_compiled_graph_gives_the_same():
    plain, compiled = make("uncaptured"), make("uncaptured", compiles=True)
    torch.testing.assert_close(steps_of(plain, steps=2), steps_of(compiled, steps=2), rtol=1e-5, atol=1e-6)


def test_why_a_model_is_compiled_block_by_block(tiny_recipe):
    model = make("plain").model
    assert why_not_whole(model) is None
    assert "CPU" in build.why_block_by_block(model, tiny_recipe)
    model.blocks[0].mlp.up = torch.nn.Sequential()
    assert "plain products" in why_not_whole(model)


def test_sinks_and_limits_of_an_mlp_are_not_taken_for_plain_ones():
    config = make("plain").model.config
    assert "sinks" in why_not_whole(initialize(replace(config, attention_sinks=True), seed=0))
    mlp = MLP(replace(config, gated=True, swiglu_limit=0.1, up_offset=1.0, activation="silu"), 8)
    gate, up = torch.tensor([-2.0, 2.0]), torch.tensor([-2.0, 3.0])
    expected = torch.nn.functional.silu(torch.tensor([-2.0, 0.1])) * torch.tensor([0.9, 1.1])
    torch.testing.assert_close(mlp.gated(gate, up), expected)
    assert FusedMLP.of(mlp, None) is None


@pytest.mark.parametrize("asked", [False, True])
def test_a_whole_model_is_compiled_where_asked(tiny_recipe, monkeypatch, asked):
    """Where Triton's kernels run; elsewhere the compiler makes them."""
    refusals = {"refusal": lambda device: None}
    monkeypatch.setattr(build, "why_block_by_block", lambda *given: None)
    monkeypatch.setattr(whole_step, "triton_support", SimpleNamespace(**refusals))
    model = make("plain").model
    recipe = replace(tiny_recipe, techniques=replace(tiny_recipe.techniques, compile=True, compile_whole=asked))
    step = build.training_step(model, recipe)
    assert (step.whole._compiled is not None) == asked
    assert ("compiled as one graph" in step.how) == asked
    assert ("hasten's kernels" in step.how) != asked
    refusals["refusal"] = lambda device: "none"
    monkeypatch.setattr(whole_step, "triton_support", SimpleNamespace(**refusals))
    assert "compiled as one graph" in build.training_step(make("plain").model, recipe).how


def test_why_steps_are_not_captured(tiny_recipe):
    model = make("plain").model

    def reason(recipe, dtype="float32"):
        return whole_step.why_not_captured(recipe, make_optimizer(model, recipe.optimizer), Precision(dtype, "cpu"))

    assert reason(tiny_recipe) is None
    assert "float16" in reason(tiny_recipe, "float16")
    assert "only AdamW's" in reason(replace(tiny_recipe, optimizer=replace(tiny_recipe.optimizer, kind="muon")))
    off = replace(tiny_recipe, techniques=replace(tiny_recipe.techniques, capture=False))
    assert "off" in reason(off)


def test_fp8_is_refused_where_it_cannot_run(tiny_recipe):
    recipe = replace(tiny_recipe, techniques=replace(tiny_recipe.techniques, fp8=True))
    with pytest.raises(ConfigError, match="run on CUDA"):
        build.training_step(make("plain").model, recipe)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compile": True, "compile_whole": True}, "compile_whole"),
        ({"precision": "float32"}, "needs techniques.precision bfloat16"),
        ({}, "multiples of 16; tokens of a batch: 24"),
    ],
)
def test_what_fp8_does_not_work_beside(tiny_recipe, monkeypatch, changes, reason):
    monkeypatch.setattr(fp8, "why_not", lambda device: None)
    recipe = replace(tiny_recipe, data=replace(tiny_recipe.data, batch_size=1, context=24))
    recipe = replace(recipe, techniques=replace(recipe.techniques, **({"precision": "bfloat16"} | changes)))
    precision = Precision(recipe.techniques.precision, "cpu")
    with pytest.raises(ConfigError, match=reason):
        whole_step.check_fp8(make("plain").model, recipe, precision, None)


@pytest.fixture
def late(monkeypatch):
    """Every step is queued, as a captured one is."""
    from hasten.training.step import TrainStep

    monkeypatch.setattr(TrainStep, "reads_late", True)


def lines_of(recipe, **options):
    result = train(recipe, progress=False, **options)
    lines = read(result.folder / "train.jsonl")
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second", "mfu")} for line in lines
    ], result


def test_late_reading_changes_no_line(tiny_recipe, late, monkeypatch):
    late_lines, late_result = lines_of(replace(tiny_recipe, name="late"))
    from hasten.training.step import TrainStep

    monkeypatch.setattr(TrainStep, "reads_late", False)
    lines, result = lines_of(replace(tiny_recipe, name="at-once"))
    assert late_lines == lines
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert (late_result.loss, late_result.best_validation_loss) == (result.loss, result.best_validation_loss)


def test_a_run_read_late_stops_and_goes_on_exactly(tiny_recipe, late):
    whole, _ = lines_of(replace(tiny_recipe, name="whole"))

    def stop(line):
        if line["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    own = replace(tiny_recipe, name="stopped")
    result = train(own, progress=False, on_step=stop)
    assert result.stopped_by == signal.SIGTERM
    assert result.steps < 10
    lines, _ = lines_of(own)
    assert lines == whole


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_at_fixed_addresses_stops_and_goes_on_exactly(tiny_recipe, monkeypatch, accumulation):
    """A whole model's own step in the loop: update, copies, checkpoints and validation, uncaptured on a CPU."""
    monkeypatch.setattr(build, "why_block_by_block", lambda *given: None)
    monkeypatch.setattr(whole_step, "CapturedStep", partial(CapturedStep, captures=False))
    techniques = replace(tiny_recipe.techniques, precision="bfloat16")
    made = replace(tiny_recipe, techniques=techniques, data=replace(tiny_recipe.data, accumulation=accumulation))
    whole, _ = lines_of(replace(made, name="whole"))

    def stop(line):
        if line["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    own = replace(made, name="stopped")
    assert train(own, progress=False, on_step=stop).steps < 10
    lines, result = lines_of(own)
    assert lines == whole
    assert hasten.load(result.model_folder, dtype="stored").dtype == torch.bfloat16


def test_a_loss_that_is_no_number_is_named_by_its_own_step(tiny_recipe, late, monkeypatch):
    from hasten.errors import TrainingError
    from hasten.training.step import TrainStep

    run, count = TrainStep.run, iter(range(100))

    def broken(self, *args, **options):
        result = run(self, *args, **options)
        return replace(result, loss=result.loss * float("nan")) if next(count) == 3 else result

    monkeypatch.setattr(TrainStep, "run", broken)
    with pytest.raises(TrainingError, match="step 4: the loss is nan"):
        train(replace(tiny_recipe, name="broken"), progress=False)


@pytest.mark.slow(minutes=3)
def test_triton_kernels_in_the_interpreter():
    run_interpreted("training/interpreted_whole.py")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_captured_steps_on_a_gpu(family, micro, dropout):
    """Captured, uncaptured, and a CPU in float32: losses within the rounding of 16-bit products."""
    options = {"family": family, "dtype": "bfloat16", "device": "cuda", "dropout": dropout}
    found = {}
    for kind in ("uncaptured", "captured"):
        torch.manual_seed(5)
        found[kind] = steps_of(make(kind, **options), micro=micro)
    losses = {kind: [loss for loss, _ in lines] for kind, lines in found.items()}
    assert losses["captured"] == pytest.approx(losses["uncaptured"], rel=1e-3)
    if not dropout:
        exact = [loss for loss, _ in steps_of(make("plain", family=family), micro=micro)]
        assert losses["captured"] == pytest.approx(exact, rel=3e-2)


@pytest.mark.gpu
@needs_gpu
def test_fp8_learns_as_bfloat16_does():
    found = []
    for kind in (WholeModel, Fp8Model):
        step = make("captured", dtype="bfloat16", device="cuda")
        step.whole = step.where.module = kind(step.model, dtype=torch.bfloat16)
        found.append([loss for loss, _ in steps_of(step, steps=20, rows=4)])
    assert found[1] == pytest.approx(found[0], rel=3e-2)


@pytest.mark.gpu
@needs_gpu
def test_rows_are_rounded_on_a_gpu_as_on_a_cpu():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    narrow, scales = fp8.rounded(x.cuda())
    expected, own_scales = fp8.rounded(x)
    assert torch.equal(scales.cpu(), own_scales)
    assert (narrow.cpu().float() == expected.float()).float().mean() > 0.99  # a tie may fall to the other side


@pytest.mark.gpu
@needs_gpu
def test_fp8_products_on_a_gpu():
    """Against float64, within the rounding of three bits of mantissa; weights and their columns in both kernels."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).bfloat16().cuda() for shape in ((272, 192), (272, 96)))
    dy *= torch.logspace(-3, 0, 272, device="cuda").unsqueeze(1).bfloat16()  # rows of different magnitude
    weights = [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in ((96, 192), (64, 48))]
    made = fp8.Fp8Weights([[one] for one in weights])
    made.measure()
    made.refresh()
    for weight, one in zip(weights, made.made, strict=True):
        assert torch.equal(one.columns.values, one.rows.values.t())
        assert close(one.rows.values.double() * one.rows.scales, weight.double())
    own_x, own_dy, weight = fp8.rounded(x), fp8.rounded(dy), made.made[0]
    exact = x.double() @ weights[0].double().t(), dy.double() @ weights[0].double(), dy.double().t() @ x.double()
    assert close(fp8.product(own_x, weight.rows, torch.bfloat16, fast=True), exact[0])
    assert close(fp8.product(own_dy, weight.columns, torch.bfloat16, fast=False), exact[1])
    assert close(fp8.weight_gradient(own_dy, own_x, torch.bfloat16), exact[2])


def close(found, exact):
    """Within the rounding of three bits of mantissa."""
    return (found - exact).norm() / exact.norm() < 2**-4


def weight_of(weight):
    made = fp8.Fp8Weights([[weight]])
    made.measure()
    made.refresh()
    return made.made[0]


def test_rounding_to_fp8_scales_by_powers_of_two():
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 48).unsqueeze(1)
    x[7] = 0
    x[8, :2] = torch.tensor([448.0, -448.0])
    x[8, 2:] = 1.0
    narrow, scales = fp8.rounded(x)
    assert ((scales.view(torch.int32) & 0x7FFFFF) == 0).all()
    assert scales[8] == 1.0
    assert not narrow.float().isnan().any()
    assert torch.equal(narrow[7].float(), torch.zeros(64))
    largest = narrow.float().abs().amax(1)
    assert (largest[torch.arange(48) != 7] > 224 - 16).all()
    assert (largest <= 448).all()
    for row, true in zip(narrow.float() * scales, x, strict=True):
        assert torch.allclose(row, true, rtol=2**-4, atol=float(true.abs().max()) * 2**-16)


@pytest.mark.parametrize("spread", [0, 3])
def test_fp8_products_round_to_eight_bits(spread):
    """Emulated on a CPU. spread: rows of dy that differ by so many powers of ten."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in ((48, 64), (32, 64), (48, 32)))
    dy *= torch.logspace(-spread, 0, 48).unsqueeze(1)
    x.requires_grad_(), weight.requires_grad_()
    exact = x @ weight.t(), *torch.autograd.grad(x @ weight.t(), (x, weight), dy)
    y = fp8.linear(fp8.States.of(x), weight, weight_of(weight)).value
    for one, true in zip((y, *torch.autograd.grad(y, (x, weight), dy)), exact, strict=True):
        assert close(one, true)
    zeros = fp8.linear(fp8.States.of(torch.zeros(16, 64)), weight, weight_of(weight)).value
    assert torch.equal(zeros, torch.zeros(16, 32))


@pytest.mark.parametrize("biased", [True, False])
def test_fp8_projections_are_those_but_for_rounding(biased):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 16, 32), (80, 32), (80,))]
    gradients = [torch.randn(3, 16, width, generator=generator) for width in (48, 16, 16)]
    given = given[: 2 + biased]

    def run(function):
        parts = function(*given)
        return [*parts, *torch.autograd.grad(parts, given, gradients)]

    exact = run(lambda x, weight, bias=None: F.linear(x, weight, bias).split((48, 16, 16), dim=-1))
    found = run(
        lambda x, weight, bias=None: fp8.project(fp8.States.of(x), weight, weight_of(weight), bias, (48, 16, 16))
    )
    assert all(close(one, true) for one, true in zip(found, exact, strict=True))


def test_an_fp8_mlp_is_the_mlp_but_for_rounding():
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 16, 32), (64, 32), (64,), (32, 64))
    given = [torch.randn(shape, generator=generator).mul(0.3).requires_grad_() for shape in shapes]
    dy = torch.randn(shapes[0], generator=generator)

    def plain(x, up, bias, down):
        return F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down)

    def narrow(x, up, bias, down):
        return fp8.mlp(fp8.States.of(x), up, weight_of(up), bias, down, weight_of(down)).value

    exact, found = ([(y := run(*given)), *torch.autograd.grad(y, given, dy)] for run in (plain, narrow))
    assert all(close(one, true) for one, true in zip(found, exact, strict=True))


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("scale", [None, 1e-6])
def test_the_loss_in_fp8_is_the_loss_but_for_rounding(softcap, scale):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(96, 32, generator=generator), torch.randn(64, 32, generator=generator) / 6  # logits near 1
    targets = torch.randint(50, (96,), generator=generator)
    targets[5] = -100
    plain = Head(weight, 50, None, softcap, scale=None if scale is None else torch.tensor(scale))
    given = 64, loss_and_gradient, (True, True, False)
    exact = loss_and_gradients(x, targets, plain, *given)
    found = loss_and_gradients(x, targets, plain._replace(fp8=weight_of(weight)), *given)
    assert found[0] == pytest.approx(float(exact[0]), rel=2e-2)
    assert close(found[1], exact[1])
    assert close(found[2], exact[2])
    assert torch.equal(found[1][5], torch.zeros(32))


def test_fp8_add_norm_hands_over_what_products_read():
    generator = torch.Generator().manual_seed(0)
    stream, x, weight = (torch.randn(shape, generator=generator) for shape in ((2, 16, 32), (2, 16, 64), (32, 64)))
    branch = fp8.linear(fp8.States.of(x), weight, weight_of(weight))
    norm = Norm(torch.ones(32), None, 1e-5)
    total, states = fp8.add_norm(stream, branch, None, norm, torch.float32, narrow=True)
    exact = stream + x @ weight.t()
    assert close(total, exact)
    assert close((states.narrow.values.float() * states.narrow.scales).view(2, 16, 32), F.layer_norm(exact, (32,)))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_in_fp8_learns_as_it_does_in_float32(family, dropout):
    found = []
    for kind in (WholeModel, Fp8Model):
        torch.manual_seed(5)
        step = make("captured", family=family, dropout=dropout)
        step.whole = step.where.module = kind(step.model, dtype=torch.float32)
        found.append([loss for loss, _ in steps_of(step, steps=8)])
    assert found[1] != found[0]
    assert found[1] == pytest.approx(found[0], rel=2e-2)


@pytest.mark.parametrize("kind", ["plain", "uncaptured"])
def test_a_step_marks_its_model_as_trained(kind):
    step = make(kind)
    assert step.model.training, "as torch makes modules"
    assert not step.model.was_trained
    (parts,) = batches(1)
    step.run(parts)
    assert step.model.was_trained, "so that generating does not pack its weights, in evaluation mode either"
