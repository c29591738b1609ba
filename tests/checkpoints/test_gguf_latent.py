"""GGUF files of latent attention: newer ones, whose keys and values of heads are two tensors, and older ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hasten
from gguf_files import retyped
from hasten.checkpoints.gguf.architectures import ARCHITECTURES, OF_FAMILY
from hasten.checkpoints.gguf.config import config_values
from hasten.checkpoints.gguf.header import GGUFFile, read_gguf
from hasten.checkpoints.gguf.write import write_gguf
from hasten.model.families import read_config
from hostile_cases import refused
from references import IN_GGUF, stated

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
quants = pytest.importorskip("gguf.quants")

LATENT = [name for name in IN_GGUF if name.startswith(("deepseek", "glm4_moe_lite", "mistral4", "youtu"))]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def as_older(path, source, config):
    """The same model as llama.cpp wrote it until April 2025: keys and values of heads in one matrix, and no sizes but
    those of the expanded heads."""
    sizes, file = config.latent, read_gguf(source)
    joined = {}
    for i in range(len(config.layers)):
        keys, values = (plain(file, f"blk.{i}.attn_{part}_b.weight") for part in "kv")
        joined[f"blk.{i}.attn_kv_b.weight"] = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1).numpy()
    own = f"{file.metadata['general.architecture']}.attention."
    entries = {f"{own}key_length": sizes.query_dim, f"{own}value_length": sizes.value_dim}
    entries |= {f"{own}head_count_kv": config.heads}
    without = ("_mla", "attn_k_b.weight", "attn_v_b.weight")
    return retyped(path, source, lambda name, x: None, beside=joined, entries=entries, without=without)


def plain(file, name):
    tensor = file.tensors[name]
    return file.raw(name).view(tensor.type.dtype).view(tensor.shape).float()


@pytest.mark.parametrize("name", LATENT)
def test_older_files_are_the_same_model(name, tmp_path, monkeypatch):
    model = stated(name, monkeypatch).bfloat16().float()
    write_gguf(model, tmp_path / "newer.gguf")
    file = read_gguf(tmp_path / "newer.gguf")
    sizes, heads = model.config.latent, model.config.heads
    assert file.tensors["blk.0.attn_k_b.weight"].shape == (heads, sizes.rank, sizes.key_dim)
    assert file.tensors["blk.0.attn_v_b.weight"].shape == (heads, sizes.value_dim, sizes.rank)
    read = hasten.load(as_older(tmp_path / "older.gguf", tmp_path / "newer.gguf", model.config), dtype="float32")
    fields = ("latent", "layers", "ropes", "kv_heads", "head_dim", "expert_scores", "expert_weight_scale")
    assert all(getattr(read.config, field) == getattr(model.config, field) for field in fields)
    for ours, expected in model.named_parameters():
        same(read.get_parameter(ours).data, expected.data)


@pytest.mark.parametrize("layout", ["older", "newer"])
@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_what_is_multiplied_head_by_head_is_held_plain(layout, tmp_path, monkeypatch):
    """Quantized by llama.cpp, too: its blocks are along the other dimension of the keys."""
    changes = {"qk_nope_head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    model = stated("deepseek_v3", monkeypatch, **changes, v_head_dim=32, q_lora_rank=32).half().float()
    source, kind = tmp_path / "plain.gguf", gguf.GGMLQuantizationType.Q8_0
    write_gguf(model, source, "F16")
    source = as_older(tmp_path / "older.gguf", source, model.config) if layout == "older" else source
    wanted = tuple(f"attn_{part}_b.weight" for part in ("k", "v", "kv", "q"))
    change = lambda name, x: (kind, quants.quantize(x, kind)) if name.endswith(wanted) else None  # noqa: E731
    path = retyped(tmp_path / "packed.gguf", source, change)
    read = hasten.load(path, dtype="float32")
    assert sorted(read.quantization) == [f"blocks.{i}.attention.q_up" for i in range(4)]
    rounded = lambda x: torch.from_numpy(quants.dequantize(quants.quantize(x.numpy(), kind), kind))  # noqa: E731
    weight = model.blocks[1].attention.kv_up.weight.data
    keys, values = weight.unflatten(0, (4, -1)).split((32, 32), 1)
    turned = rounded(keys.transpose(1, 2).contiguous()).transpose(1, 2)
    apart = torch.cat((turned, rounded(values.contiguous())), 1).flatten(0, 1)
    same(read.blocks[1].attention.kv_up.weight.data, rounded(weight) if layout == "older" else apart)
    assert hasten.generate(hasten.load(path), [[5, 17, 42]], hasten.SamplingParams(max_new_tokens=4))[0].tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blk.1.attn_v_b.weight": None}, "blk.1.attn_v_b.weight must have the shape [4, 40, 32]"),
        ({"blk.2.attn_k_b.weight": (4, 16, 32)}, "blk.2.attn_k_b.weight must have the shape [4, 32, 16]"),
        ({"blk.2.attn_k_b.weight": (64, 32)}, "a matrix of each head of latent attention; found [64, 32]"),
        ({"blk.0.attn_k_b.weight": None, "blk.0.attn_v_b.weight": None}, "blk.0.attn_k_b.weight must have the shape"),
    ],
)
def test_heads_of_another_shape_are_refused(changes, words, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(stated("deepseek_v3", monkeypatch), path)
    file = read_gguf(path)
    tensors = dict(file.tensors)
    for name, shape in changes.items():
        tensor = tensors.pop(name)
        tensors |= {} if shape is None else {name: replace(tensor, shape=shape)}
    changed = GGUFFile(path, file.metadata, tensors, file.data)
    monkeypatch.setattr("hasten.checkpoints.gguf.open.read_gguf", lambda _: changed)
    with refused(words):
        hasten.load(path)


def test_how_experts_are_scored_says_which_family_it_is(tmp_path, monkeypatch):
    """Files of 2024 do not state it: those of DeepSeek V2, and of GLM 4.7 Flash."""
    path = tmp_path / "model.gguf"
    write_gguf(stated("deepseek_v3", monkeypatch), path)
    file = read_gguf(path)

    def read(*without, **changes):
        own = {name: value for name, value in file.metadata.items() if not name.endswith(tuple(without))}
        own |= {f"deepseek2.{name}": value for name, value in changes.items()}
        return read_config(config_values(GGUFFile(path, own, file.tensors, file.data)))

    assert read().family == "deepseek_v3"
    plain = read("expert_gating_func", "expert_weights_norm", "expert_weights_scale", "group_count")
    assert (plain.family, plain.expert_scores, plain.normalize_experts) == ("deepseek_v2", "softmax", False)
    assert (plain.expert_weight_scale, plain.expert_groups) == (1.0, 1)
    assert read(expert_gating_func=1).family == "mistral4"  # Mistral Large 3
    grouped = read("expert_weights_norm", expert_gating_func=1)
    assert (grouped.family, grouped.expert_groups, grouped.expert_group_scores) == ("deepseek_v2", 4, 1)
    with refused("scoring_func must be 'softmax' or absent; found \"llama.cpp's 4\""):
        read(expert_gating_func=4)
    embedding = replace(file.tensors["token_embd.weight"], shape=(154_880, 64))
    file = replace(file, tensors=file.tensors | {"token_embd.weight": embedding})
    assert read("expert_gating_func", block_count=47).expert_scores == "sigmoid"
    head = read("expert_gating_func", block_count=48, nextn_predict_layers=1)  # the 48th predicts further tokens
    assert (head.expert_scores, len(head.layers)) == ("sigmoid", 47)


def test_an_older_file_of_no_experts_is_a_youtu(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(stated("youtu", monkeypatch), path)
    entries = read_gguf(path).metadata
    assert entries["deepseek2.leading_dense_block_count"] == entries["deepseek2.block_count"] == 4
    assert hasten.load(path).config.family == "youtu"
    assert isinstance(entries["deepseek2.expert_shared_count"], int | np.integer)


@pytest.mark.parametrize(
    ("name", "architecture", "joined"),
    [("mistral4", "deepseek2", False), ("mistral4", "mistral4", False), ("deepseek_v3", "deepseek2", True)],
)
def test_experts_are_read_joined_or_apart_as_the_file_has_them(name, architecture, joined, tmp_path, monkeypatch):
    """Mistral Large 3 is a deepseek2 whose gate and up are two tensors; Mistral Small 4 has them in one."""
    model, path = stated(name, monkeypatch).bfloat16().float(), tmp_path / "model.gguf"
    with monkeypatch.context() as patch:
        patch.setitem(OF_FAMILY, name, architecture)
        patch.setitem(ARCHITECTURES, architecture, replace(ARCHITECTURES[architecture], joined=joined))
        write_gguf(model, path)
    file = read_gguf(path)
    assert file.metadata["general.architecture"] == architecture
    assert ("blk.3.ffn_gate_up_exps.weight" in file.tensors) == joined != ("blk.3.ffn_up_exps.weight" in file.tensors)
    read = hasten.load(path, dtype="float32")
    assert read.config.family == name
    for ours, expected in model.named_parameters():
        same(read.get_parameter(ours).data, expected.data)


def test_experts_that_are_no_stack_are_refused_for_what_they_are(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(stated("deepseek_v3", monkeypatch), path)
    file = read_gguf(path)
    tensors = dict(file.tensors)
    tensors["blk.1.ffn_gate.0.weight"] = tensors.pop("blk.1.ffn_gate_exps.weight")

    def load():
        monkeypatch.setattr("hasten.checkpoints.gguf.open.read_gguf", lambda _: replace(file, tensors=tensors))
        hasten.load(path)

    with refused("blk.1.ffn_gate_exps.weight must be", "found none: convert the model again", "before April 2024"):
        load()
    del tensors["blk.1.ffn_gate.0.weight"]
    with refused("found none: download the file again; of this layer's MLPs it has blk.1.ffn_down_exps.weight, blk.1."):
        load()


@pytest.mark.parametrize(
    ("name", "method"), [("deepseek_v3", {}), ("deepseek_v2", {"topk_method": "group_limited_greedy"})]
)
def test_groups_of_which_all_are_kept_are_none(name, method, tmp_path, monkeypatch):
    model = stated(name, monkeypatch, n_group=4, topk_group=4, **method)
    assert (model.config.expert_groups, model.config.expert_top_groups) == (1, 1)
    write_gguf(model, tmp_path / "model.gguf")
    assert "deepseek2.expert_group_count" not in read_gguf(tmp_path / "model.gguf").metadata
