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
from hasten.ops.fp8 import fp8_linear, fp8_mlp, rounded
from hasten.training import build, train
from hasten.training.capture import CapturedStep
from hasten.training.journal import read
from hasten.training.optimizers import make_optimizer
from hasten.training.precision import Precision
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


@pytest.mark.parametrize("asked", [False, True])
def test_a_whole_model_is_compiled_where_asked(tiny_recipe, monkeypatch, asked):
    """Where Triton's kernels run; elsewhere the compiler makes them."""
    refusals = {"refusal": lambda device: None}
    monkeypatch.setattr(build, "why_block_by_block", lambda *given: None)
    monkeypatch.setattr(build, "triton_support", SimpleNamespace(**refusals))
    model = make("plain").model
    recipe = replace(tiny_recipe, techniques=replace(tiny_recipe.techniques, compile=True, compile_whole=asked))
    step = build.training_step(model, recipe)
    assert (step.whole._compiled is not None) == asked
    assert ("compiled as one graph" in step.how) == asked
    assert ("kernels of our own" in step.how) != asked
    refusals["refusal"] = lambda device: "none"
    monkeypatch.setattr(build, "triton_support", SimpleNamespace(**refusals))
    assert "compiled as one graph" in build.training_step(make("plain").model, recipe).how


def test_why_steps_are_not_captured(tiny_recipe):
    model = make("plain").model

    def reason(recipe, dtype="float32"):
        return build.why_not_captured(recipe, make_optimizer(model, recipe.optimizer), Precision(dtype, "cpu"))

    assert reason(tiny_recipe) is None
    assert "float16" in reason(tiny_recipe, "float16")
    assert "only AdamW's" in reason(replace(tiny_recipe, optimizer=replace(tiny_recipe.optimizer, kind="muon")))
    off = replace(tiny_recipe, techniques=replace(tiny_recipe.techniques, capture=False))
    assert "off" in reason(off)


def test_fp8_is_refused_where_it_cannot_run(tiny_recipe):
    recipe = replace(tiny_recipe, techniques=replace(tiny_recipe.techniques, fp8=True))
    with pytest.raises(ConfigError, match="run on CUDA"):
        build.training_step(make("plain").model, recipe)


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
    monkeypatch.setattr(build, "CapturedStep", partial(CapturedStep, captures=False))
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
    assert hasten.load(result.model_folder).dtype == torch.float32


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
    for fp8 in (False, True):
        step = make("captured", dtype="bfloat16", device="cuda")
        step.whole = step.where.module = WholeModel(step.model, dtype=torch.bfloat16, fp8=fp8)
        found.append([loss for loss, _ in steps_of(step, steps=20, rows=4)])
    assert found[1] == pytest.approx(found[0], rel=3e-2)


@pytest.mark.gpu
@needs_gpu
def test_rows_are_rounded_on_a_gpu_as_on_a_cpu():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    narrow, scales = rounded(x.cuda())
    expected, own_scales = rounded(x)
    torch.testing.assert_close(scales.cpu(), own_scales, rtol=1e-6, atol=0)
    assert (narrow.cpu().float() == expected.float()).float().mean() > 0.99  # a tie may fall to the other side


def test_fp8_products_round_to_eight_bits():
    """Emulated on a CPU: within the rounding of three bits of mantissa, relative to the result."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in ((48, 64), (32, 64), (48, 32)))
    x.requires_grad_(), weight.requires_grad_()
    exact = torch.autograd.grad(x @ weight.t(), (x, weight), dy)
    y = fp8_linear(x, weight)
    found = torch.autograd.grad(y, (x, weight), dy)
    assert (y - x @ weight.t()).norm() / y.norm() < 2**-4
    for one, true in zip(found, exact, strict=True):
        assert (one - true).norm() / true.norm() < 2**-4
    zeros = fp8_linear(torch.zeros(16, 64), weight)
    assert torch.equal(zeros, torch.zeros(16, 32))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_in_fp8_learns_as_it_does_in_float32(compiled):
    """Traced too, as one graph."""
    plain, step = make("whole"), make("uncaptured")
    step.whole = step.where.module = WholeModel(step.model, dtype=torch.float32, fp8=True)
    if compiled:
        step.whole._compiled = torch.compile(step.whole.run, fullgraph=True, backend="aot_eager")
    exact, found = ([loss for loss, _ in steps_of(one, steps=8)] for one in (plain, step))
    assert found != exact
    assert found == pytest.approx(exact, rel=2e-2)


def test_an_fp8_mlp_is_the_mlp_but_for_rounding():
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 16, 32), (64, 32), (64,), (32, 64))
    given = [torch.randn(shape, generator=generator).mul(0.3).requires_grad_() for shape in shapes]
    dy = torch.randn(shapes[0], generator=generator)

    def plain(x, up, bias, down):
        return F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down)

    exact, found = ([(y := run(*given)), *torch.autograd.grad(y, given, dy)] for run in (plain, fp8_mlp))
    for one, true in zip(found, exact, strict=True):
        assert (one - true).norm() / true.norm() < 2**-4
