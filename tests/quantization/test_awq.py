"""AWQ: folding the scales changes no model, and rounding after it errs less where some inputs are large."""

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.model.context import training_context
from hasten.quantization import AWQ, Int4, quantize, quantize_to_folder
from hasten.quantization import awq as module
from references import make_reference

SAMPLES = torch.randint(3, 101, (24, 32), generator=torch.Generator().manual_seed(0))
FAMILIES = ["llama-biases", "gemma2", "gpt2", "phi3", "qwen3", "qwen3_moe"]


def logits(model, tokens=SAMPLES):
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        return model(tokens, positions, training_context(model, tokens.shape[1])).double()


def with_large_channels(name):
    """A model some of whose inputs are ten times as large as the others, as those of trained models are."""
    model = hasten.load(make_reference(name))
    with torch.no_grad():
        for block in model.blocks:
            block.attention_norm.weight[::9] *= 10
            block.mlp_norm.weight[::7] *= 10
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_changes_no_model(name, monkeypatch):
    """With weights that are not rounded at all, the outputs stay what they were."""
    exact = logits(with_large_channels(name))
    model = with_large_channels(name)
    folded = []

    class Exact:
        def __init__(self, weight):
            self.weight = weight

        def map(self, _):
            return self

        def dequantize(self):
            return self.weight + 0.01 * self.weight.abs().amax(dim=1, keepdim=True)  # some error, for the search

    def place(task, name, weight, **errors):
        linear = task.before.get_submodule(name)
        plain = torch.nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        plain.weight.data = weight.weight
        if linear.bias is not None:
            plain.bias.data = task.changed.get(f"{name}.bias", linear.bias).clone()
        task.block.set_submodule(name, plain)
        task.weights[name] = weight
        folded.append((task.prefix + name, plain))

    monkeypatch.setattr(module, "round_weight", lambda weight, *a, **k: Exact(weight))
    monkeypatch.setattr(module, "output_error", lambda *a: 0.0)
    monkeypatch.setattr(module.BlockTask, "place", place)
    monkeypatch.setattr(module.BlockTask, "nearest", lambda task, name: Exact(task.tensor(f"{name}.weight")))
    from hasten.quantization.quantize import check_quantizable
    from hasten.quantization.sequential import quantize_blocks

    formats = check_quantizable(model, Int4(group_size=32, lm_head="none"))
    changed = {}
    for result in quantize_blocks(model, formats, SAMPLES, AWQ(), search="mse"):
        changed |= result.changed
    for path, linear in folded:
        model.set_submodule(path, linear)
    for path, tensor in changed.items():
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor.float()))
    assert any("norm" in path for path in changed)
    assert torch.allclose(logits(model), exact, rtol=1e-3, atol=1e-3 * float(exact.std()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_err_less_than_rounding_to_nearest(name):
    exact = logits(with_large_channels(name))
    errors = []
    scheme = Int4(group_size=32, lm_head="none", activations="float")
    for method in (None, AWQ()):
        calibration = None if method is None else SAMPLES
        model = quantize(with_large_channels(name), scheme, method=method, calibration=calibration)
        errors.append(float((logits(model) - exact).std()))
    assert errors[1] < errors[0]


def test_the_search_never_ends_above_rounding_to_nearest():
    reports = []
    quantize(with_large_channels("llama"), Int4(), method=AWQ(), calibration=SAMPLES, report=reports.append)
    found = [report for report in reports if report.output_error is not None]
    assert sum(report.output_error < report.nearest_output_error for report in found) > 0.9 * len(found) > 20


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")  # transformers knows no quantized Conv1D
@pytest.mark.parametrize("name", ["llama-biases", "phi3", "gpt2"])
def test_a_folder_is_the_model_quantized_in_memory(name, tmp_path):
    model = with_large_channels(name)
    quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", method=AWQ(), calibration=SAMPLES)
    quantize(model, Int4(group_size=32), method=AWQ(), calibration=SAMPLES)
    assert torch.equal(logits(hasten.load(tmp_path / "out", dtype="stored")), logits(model))


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")
def test_everything_keeps_its_dtype(tmp_path):
    """Scales are folded in float32; what is stored, routers too, is in the model's dtype, and so are the sizes told."""
    reports = []
    model = quantize(
        hasten.load(make_reference("qwen3_moe"), dtype="bfloat16"),
        Int4(group_size=32, activations="float"),
        method=AWQ(),
        calibration=SAMPLES,
        report=reports.append,
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits(model).isfinite().all()
    sizes = {report.name: report.bytes_before for report in reports}
    assert sizes["blocks.0.attention.q"] == 4 * 32 * 64 * 2
    quantize_to_folder(
        hasten.load(make_reference("qwen3_moe"), dtype="bfloat16"),
        Int4(group_size=32, activations="float"),
        tmp_path / "out",
        method=AWQ(),
        calibration=SAMPLES,
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert torch.equal(logits(hasten.load(tmp_path / "out", dtype="stored")), logits(model))
