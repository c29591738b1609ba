"""GGUF files of Granite 4 without Mamba-2 as llama.cpp converts it: to granite, granitemoe or granitehybrid."""

import pytest
import torch

import hasten
from gguf_files import retyped
from hasten.checkpoints.gguf.config import config_values
from hasten.checkpoints.gguf.header import GGUFFile, read_gguf
from hasten.checkpoints.gguf.write import write_gguf
from hasten.model.context import TrainingContext
from hasten.model.families import read_config
from hostile_cases import refused
from references import stated

pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")

# What the converter writes of every Granite 4, whatever architecture it comes to.
OF_CONVERTER = {"ssm.conv_kernel": 4, "ssm.state_size": 256, "ssm.group_count": 1, "ssm.inner_size": 3072}
OF_CONVERTER |= {"ssm.time_step_rank": 48, "attention.head_count_kv": [2] * 4, "rope.scaling.finetuned": True}
SAME = ("layers", "ropes", "mixer", "kv_heads", "experts", "expert_size", "shared_size", "intermediate_size")


def written(name, path, monkeypatch, **changes):
    model = stated(name, monkeypatch, **changes).bfloat16().float()
    write_gguf(model, path)
    return model


def read_as(path, architecture=None, without=(), **changes):
    """The config of a file whose metadata are changed. changes: with "__" for dots."""
    file = read_gguf(path)
    name = file.metadata["general.architecture"]
    own = {key: value for key, value in file.metadata.items() if not key.endswith(tuple(without))}
    own |= {f"{name}.{key.replace('__', '.')}": value for key, value in changes.items()}
    if architecture is not None:
        own = {key.replace(f"{name}.", f"{architecture}."): value for key, value in own.items()}
        own["general.architecture"] = architecture
    return read_config(config_values(GGUFFile(path, own, file.tensors, file.data)))


def same(read, model):
    assert all(getattr(read, field) == getattr(model, field) for field in SAME)


@pytest.mark.parametrize("name", ["granite", "granitemoe"])
def test_published_granite_4_without_mamba_is_read(name, tmp_path, monkeypatch):
    model = written(name, tmp_path / "plain.gguf", monkeypatch)
    beside = {"expert_shared_feed_forward_length": 96, "expert_count": 0} if name == "granite" else {}
    entries = {f"{name}.{key}": value for key, value in (OF_CONVERTER | beside).items()}
    path = retyped(tmp_path / "model.gguf", tmp_path / "plain.gguf", lambda name, x: None, entries=entries)
    read = hasten.load(path, dtype="float32")
    assert read.config.family == name
    same(read.config, model.config)
    for ours, expected in model.named_parameters():
        torch.testing.assert_close(read.get_parameter(ours).data, expected.data, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [[2, 0, 2, 2], [0] * 4, [2, 4, 2, 2]])
def test_a_granite_of_layers_that_differ_is_refused(heads, tmp_path, monkeypatch):
    written("granite", tmp_path / "model.gguf", monkeypatch)
    with refused("num_key_value_heads must be", f"found {heads if any(heads) else 0}"):
        read_as(tmp_path / "model.gguf", attention__head_count_kv=heads)


def test_one_number_of_key_heads_in_a_granitehybrid_is_that_of_all_layers(tmp_path, monkeypatch):
    model = written("granitemoehybrid-attention", tmp_path / "model.gguf", monkeypatch)
    read = read_as(tmp_path / "model.gguf", "granitehybrid", attention__head_count_kv=2)
    assert read.family == "granitemoehybrid"
    same(read, model.config)


def test_experts_beside_an_mlp_for_every_token_and_no_mamba(tmp_path, monkeypatch):
    """A granitemoe to llama.cpp, which loads the shared MLP where the file states its size."""
    changes = {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
    model = written("granitemoehybrid", tmp_path / "model.gguf", monkeypatch, **changes)
    file = read_gguf(tmp_path / "model.gguf")
    assert file.metadata["general.architecture"] == "granitemoe"
    assert "blk.0.ffn_up_shexp.weight" in file.tensors
    read = hasten.load(tmp_path / "model.gguf", dtype="float32")
    assert (read.config.family, read.config.shared_size) == ("granitemoehybrid", 40)
    same(read.config, model.config)
    tokens, context = torch.arange(7, 31)[None], lambda: TrainingContext([None] * 4)
    with torch.no_grad():
        found, expected = (one(tokens, torch.arange(24)[None], context())[0] for one in (read, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    same(read_as(tmp_path / "model.gguf", attention__head_count_kv=[2] * 4), model.config)
    assert read_as(tmp_path / "model.gguf", rope__scaling__finetuned=False).ropes == ()


def test_a_granite_says_whether_it_has_rotary_positions(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    written("granite", path, monkeypatch)
    assert read_as(path, without=["rope.scaling.finetuned"]).ropes
    assert read_as(path).ropes
    unturned = read_as(path, rope__scaling__finetuned=False)
    assert (unturned.family, unturned.ropes, unturned.layers[0].rope) == ("granitemoehybrid", (), None)
    model = written("granitemoehybrid-attention", path, monkeypatch, position_embedding_type="nope")
    assert read_gguf(path).metadata["granite.rope.scaling.finetuned"] is False
    same(hasten.load(path).config, model.config)
    written("granitemoe", path, monkeypatch)
    with refused("shared_intermediate_size"):
        read_as(path, rope__scaling__finetuned=False)
