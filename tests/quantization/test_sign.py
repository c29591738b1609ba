"""Sign-gradient rounding: it begins as rounding to nearest, never ends above it, and what it tunes is what is run."""

import pytest
import torch

import hasten
from hasten.errors import ConfigError
from hasten.ops.linear.weights import int4_format
from hasten.quantization import Int3, Int4, Int8, SignRounding, quantize, quantize_to_folder
from hasten.quantization.cost import tuning_seconds
from hasten.quantization.quantize import check_quantizable
from hasten.quantization.rounding import round_weight, rounded_activations
from hasten.quantization.sequential import block_task
from hasten.quantization.sign import TunedLinear, block_loss
from hasten.quantization.walk import CalibrationWalk
from references import make_reference

SAMPLES = torch.randint(3, 101, (24, 32), generator=torch.Generator().manual_seed(0))


def task_of(model, scheme, samples=SAMPLES):
    formats = check_quantizable(model, scheme)
    walks = CalibrationWalk(model, samples), CalibrationWalk(model, samples)
    return block_task(model, 0, formats, walks, search=scheme.search)


@pytest.mark.parametrize("scheme", [Int4(group_size=32), Int3(group_size=64, symmetric=False), Int8()], ids=str)
def test_it_begins_as_rounding_to_nearest(scheme):
    task = task_of(hasten.load(make_reference("llama")), scheme)
    for name, layer in task.layers.items():
        found = TunedLinear(task, name).quantized()
        expected = round_weight(task.weight(name), layer.weight, search=scheme.search)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scales, expected.scales)
        assert (found.zeros is None) == (expected.zeros is None)
        assert found.zeros is None or torch.equal(found.zeros, expected.zeros)


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("scheme", [Int4(group_size=32), Int3(group_size=32, symmetric=False)], ids=["int4", "int3"])
def test_a_block_never_ends_above_rounding_to_nearest(name, scheme):
    """The issue's own check: the loss on all calibration samples, of the block as it will be served."""
    with torch.no_grad():
        task = task_of(hasten.load(make_reference(name)), scheme)
        targets = [call(task.before) for call in task.calls_before]
        SignRounding(steps=25).quantize_block(task)
        tuned = block_loss(task.block, task.calls, targets)
        other = task_of(hasten.load(make_reference(name)), scheme)
        for layer in other.layers:
            other.place(layer, other.nearest(layer))
        nearest = block_loss(other.block, other.calls, targets)
    assert tuned < 0.95 * nearest
    assert "of rounding to nearest" in task.reports[0].note


@pytest.mark.parametrize("high", [1.5, float("nan")])
def test_tuning_that_finds_nothing_ends_as_rounding_to_nearest(high, monkeypatch):
    """A step in the wrong direction, on purpose."""
    task = task_of(hasten.load(make_reference("llama")), Int4(group_size=32))

    def worse(self, task, tuned, targets):
        for module in tuned.values():
            module.high.fill_(high)
        return [tensor.clone() for module in tuned.values() for tensor in module.parameters_of_rounding()]

    monkeypatch.setattr(SignRounding, "_tune", worse)
    with torch.no_grad():
        SignRounding().quantize_block(task)
    assert "nothing better" in task.reports[0].note
    assert all(torch.equal(weight.values, task.nearest(name).values) for name, weight in task.weights.items())


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_a_step_sees_as_many_samples_as_batch_says(batch):
    """One a pass, short ones too."""
    task, seen = task_of(hasten.load(make_reference("llama")), Int4(group_size=32)), []
    run = task.run
    task.run = lambda block, samples: seen.append(samples) or run(block, samples=samples)
    with torch.no_grad():
        SignRounding(steps=2, batch=batch).quantize_block(task)
    assert sum(len(one) for one in seen) == 2 * min(batch, len(SAMPLES))
    assert all(len(one) == 1 for one in seen)
    for step in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert len({int(one) for one in step}) == len(step)


def test_the_time_is_predicted_by_steps_that_were_timed(monkeypatch):
    model, clock = hasten.load(make_reference("llama")), iter([0.0, 9.0, 13.0, 15.0])
    monkeypatch.setattr("hasten.quantization.cost.perf_counter", lambda: next(clock))
    found = tuning_seconds(model, Int4(group_size=32), SAMPLES, SignRounding(batch=12, steps=40))
    assert found == 2.0 * len(model.blocks) * (40 + 9 * 2 / 3)


def test_activations_are_rounded_as_by_the_kernels():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weight = round_weight(torch.randn(8, 96, generator=torch.Generator().manual_seed(1)), int4_format(32))
    layer = hasten.ops.linear.PackedLinear.from_weight(weight, dtype=torch.float32)
    exact = x @ weight.dequantize().T
    if torch.allclose(layer(x), exact, rtol=1e-5, atol=1e-5):
        pytest.skip("the kernel that was picked does not round activations")
    assert torch.allclose(layer(x), rounded_activations(x, 32) @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "group"),
    [
        (Int4(group_size=0, activations="int8"), 128),
        (Int4(group_size=32), 32),
        (Int8(activations="int8"), 64),
        (Int8(), 0),
        (Int3(), 0),
    ],
    ids=str,
)
def test_activations_are_rounded_in_the_groups_of_the_kernel(scheme, group):
    task = task_of(hasten.load(make_reference("llama")), scheme)
    assert TunedLinear(task, "attention.q").activation_group == group


def test_an_interrupted_block_goes_on_at_its_step(tmp_path):
    model = hasten.load(make_reference("llama"))
    method = SignRounding(steps=50)
    arguments = {"method": method, "calibration": SAMPLES}
    quantize_to_folder(model, Int4(group_size=32), tmp_path / "whole", **arguments)
    seen = []

    def stop(step, total):
        seen.append(step)
        if len(seen) == 75:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", progress=stop, **arguments)
    assert seen[-1] == 25
    seen.clear()
    quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", progress=lambda *s: seen.append(s[0]), **arguments)
    assert seen[0] == 21
    one, other = (hasten.load(tmp_path / folder, dtype="stored").state_dict() for folder in ("whole", "out"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_mode_without_gradients_is_refused(tiny_folder):
    model = hasten.load(tiny_folder, dtype="stored")
    tokens = torch.randint(1, 60, (2, 8))
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"gradients, which torch.inference_mode\(\) forbids"):
        quantize(model, Int4(group_size=32), method=SignRounding(steps=1), calibration=tokens)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        SignRounding(steps=0)
    with pytest.raises(ConfigError, match="give calibration="):
        quantize(hasten.load(make_reference("llama")), Int4(), method=SignRounding())


def test_outputs_that_are_not_finite_are_one_error():
    """Their gradients would move every offset to NaN, and a model of any integers was written."""
    model = hasten.load(make_reference("llama"))
    with torch.no_grad():
        model.blocks[1].mlp_norm.weight[0] = float("nan")
    with pytest.raises(ConfigError, match=r"blocks.1: the calibration samples give NaN or infinite outputs"):
        quantize(model, Int4(group_size=32), method=SignRounding(steps=1), calibration=SAMPLES[:2])
