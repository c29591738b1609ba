"""Folders of quantized models: what they compute here and in transformers, and changing what stands in them."""

import json

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import hasten
from hasten.errors import CheckpointError
from hasten.model.context import TrainingContext
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.embedding import PackedEmbedding
from peak_memory import PeakMemory

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2, 60, 99]])
Q = "model.layers.0.self_attn.q_proj"  # a module of a Llama
FUZZ = settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
DAMAGE = st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255)), max_size=3)  # bytes, and what they become


def logits(model):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(TOKENS, torch.arange(TOKENS.shape[1])[None], context)[0].double()


def theirs(folder, dtype=torch.float32, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    with torch.no_grad():
        return model(TOKENS).logits[0].double()


def exact(model):
    """The same model with plain products in float32 of the weights that its integers stand for."""
    if isinstance(model.embedding, PackedEmbedding):
        model.embedding = nn.Embedding.from_pretrained(model.embedding.table.dequantize())
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = nn.Parameter(module.dequantize())
            if module.bias is not None:
                linear.bias = nn.Parameter(module.bias.float())
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, linear)
    model.quantization = None
    return model.float()


def change_config(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_tensors(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder, *words):
    """Loading it is one typed error that says all these words, before anything is allocated."""
    with PeakMemory() as peak, pytest.raises(CheckpointError) as caught:
        hasten.load(folder)
    message = str(caught.value)
    assert peak.bytes < 50_000_000
    assert len(message) < 1000
    assert "\n" not in message
    assert all(word in message for word in words), message


def as_written(folder):
    """A folder and what is in its files, for `load_damaged`."""
    return folder, (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()


def load_damaged(written, change, damage):
    """With a config changed and weights damaged it loads, or raises our own error: never another."""
    folder, config, weights = written
    (folder / "config.json").write_bytes(config)
    change_config(folder, change)
    raw = bytearray(weights)
    for place, value in damage:
        raw[place % len(raw)] = value
    (folder / "model.safetensors").write_bytes(raw)
    try:
        hasten.load(folder)
    except hasten.HastenError as error:
        message = str(error)
        assert message


def weights_of(values):
    return values["quantization_config"]["config_groups"]["group_0"]["weights"]
