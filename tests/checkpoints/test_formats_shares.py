"""Shares of checkpoints of every layout: together they are the whole, number for number; no file is rewritten."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import column_folders
import hasten
from hasten.checkpoints.gguf.write import write_gguf
from hasten.checkpoints.load import load
from hasten.errors import ConfigError
from hasten.ops.collective import RankGroup
from hasten.ops.linear import PackedLinear
from hasten.quantization import Int4, Int8, quantize
from tiny_model import tiny_llama


def fp8(folder, out):
    """Float8 with a scale for each row."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    (out / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj." in name:
            scale = tensor.float().abs().amax(1, keepdim=True) / 448
            tensors[name.replace("weight", "weight_scale")] = scale
            tensor = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def gguf(folder, out, kind):
    write_gguf(load(folder, dtype="stored"), out.with_suffix(".gguf"), kind)
    return out.with_suffix(".gguf")


def rounded(folder, out, scheme):
    hasten.save(quantize(load(folder, dtype="stored"), scheme), out)
    return out


LAYOUTS = {
    "bfloat16": lambda folder, out: folder,
    "int8": lambda folder, out: rounded(folder, out, Int8()),
    "int4": lambda folder, out: rounded(folder, out, Int4(group_size=32)),
    "gptq": lambda folder, out: column_folders.write(folder, out, "gptq")[0],
    "gptq, 8 bits": lambda folder, out: column_folders.write(folder, out, "gptq", bits=8, group=64)[0],
    "awq": lambda folder, out: column_folders.write(folder, out, "awq")[0],
    "fp8": fp8,
    "Q8_0": lambda folder, out: gguf(folder, out, "Q8_0"),
    "Q4_0": lambda folder, out: gguf(folder, out, "Q4_0"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "model"
    hasten.save(
        tiny_llama(hidden_size=128, num_attention_heads=8, num_key_value_heads=4, intermediate_size=192).to(
            torch.bfloat16
        ),
        out,
    )
    return out


def weights(model):
    """Every matrix by its name, as the model multiplies with it."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name.partition(".table")[0], module.dequantize()
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield name, module.weight.float()


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_are_parts_of_the_whole(folder, tmp_path, layout, degree):
    made = LAYOUTS[layout](folder, tmp_path / "made")
    if degree == 3 and layout in ("gptq, 8 bits",):
        with pytest.raises(ConfigError, match="take at most 2"):  # two groups of 64 columns of `output`
            load(made, group=RankGroup(0, 3), dtype="stored")
        return
    whole, covered = dict(weights(load(made, dtype="stored"))), {}
    for rank in range(degree):
        model = load(made, group=RankGroup(rank, degree), dtype="stored")
        for name, own in weights(model):
            cut = model.share.cut(f"{name}.weight")
            assert torch.equal(own, whole[name].narrow(cut.dim, cut.part.start, len(cut.part))), name
            covered.setdefault(name, (cut.dim, []))[1].extend(cut.part)
    assert {name: parts for name, (_, parts) in covered.items()} == {
        name: list(range(whole[name].shape[dim])) for name, (dim, _) in covered.items()
    }
    assert covered.keys() == whole.keys()


def test_where_groups_have_columns_from_everywhere_a_rank_holds_rows(folder, tmp_path):
    made, _ = column_folders.write(folder, tmp_path / "made", "gptq", act_order=True)
    whole, covered = dict(weights(load(made, dtype="stored"))), {}
    for rank in range(3):
        model = load(made, group=RankGroup(rank, 3), dtype="stored")
        for name, own in weights(model):
            if name.endswith(".layer"):
                rows = model.share.stream
                assert torch.equal(own, whole[name.removesuffix(".layer")][rows.start : rows.stop])
                covered.setdefault(name, []).extend(rows)
    assert {name.split(".")[-2] for name in covered} == {"output", "down"}
    assert all(rows == list(range(128)) for rows in covered.values())
