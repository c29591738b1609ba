"""FP8 checkpoints: their weights are what the published definition says, in the model's own dtype."""

import json
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hasten
from hasten.errors import HastenWarning
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.ops.linear import PackedLinear
from quantized_folders import DAMAGE, FUZZ, as_written, change_config, change_tensors, load_damaged, refused

SCALES = {
    "blocks": ("weight_scale_inv", [32, 48]),  # that no kernel has
    "large blocks": ("weight_scale_inv", [128, 128]),
    "small blocks": ("weight_scale_inv", [48, 32]),
    "rows": ("weight_scale", None),
    "rows without a column": ("weight_scale", None),
    "matrix": ("weight_scale", None),
}


def write(folder, out, kind):
    """A checkpoint, and the weights that it stands for."""
    leaf, block = SCALES[kind]
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block is not None:
        config["quantization_config"]["weight_block_size"] = block
    (out / "config.json").write_text(json.dumps(config))
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj." not in name:
            tensors[name] = tensor
            continue
        n, k = tensor.shape
        rows, columns = block or ((n, k) if kind == "matrix" else (1, k))
        scale = torch.rand(-(-n // rows), -(-k // columns), generator=torch.Generator().manual_seed(n)) * 0.01 + 0.001
        whole = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        values = (tensor.float() / whole).to(torch.float8_e4m3fn)
        weights[name] = values.float() * whole
        stored = {"matrix": scale.squeeze(), "rows without a column": scale.squeeze(1)}.get(kind, scale)
        tensors |= {name: values, name.replace("weight", leaf): stored}
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out, weights


@pytest.mark.parametrize("kind", SCALES)
def test_the_weights_are_those_of_the_definition(kind, bfloat16_folder, tmp_path):
    folder, weights = write(bfloat16_folder, tmp_path / "out", kind)
    plain = kind == "blocks"
    text = "no kernel takes a quantized weight like .*float8_e4m3fn"
    with pytest.warns(HastenWarning, match=text) if plain else nullcontext():
        model = hasten.load(folder, dtype="stored")
    assert model.dtype == torch.bfloat16
    layers = {"blocks.2.mlp.down": "layers.2.mlp.down_proj", "blocks.0.attention.k": "layers.0.self_attn.k_proj"}
    for ours, name in layers.items():
        layer = model.get_submodule(ours)
        assert isinstance(layer, PackedLinear) is not plain
        found = layer.weight if plain else layer.dequantize(torch.float32)
        assert torch.equal(found, weights[f"model.{name}.weight"].to(found.dtype))
    with nullcontext() if plain else pytest.warns(HastenWarning, match="28 layers .* are written as plain weights"):
        hasten.save(model, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = hasten.load(tmp_path / "again", dtype="stored").blocks[2].mlp.down.weight
    assert torch.equal(again, weights["model.layers.2.mlp.down_proj.weight"].bfloat16())


def test_blocks_of_128_meet_inside_a_matrix(tmp_path):
    """300 rows are two blocks and a part of one, 200 columns one and a part."""
    sizes = {"hidden_size": 200, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 300}
    config = read_config(sizes | {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 101})
    hasten.save(initialize(config, seed=0, dtype=torch.bfloat16), tmp_path / "plain")
    folder, weights = write(tmp_path / "plain", tmp_path / "out", "large blocks")
    mlp = hasten.load(folder, dtype="stored").blocks[0].mlp
    for layer, name in ((mlp.up, "up_proj"), (mlp.down, "down_proj")):
        assert torch.equal(layer.dequantize(torch.float32), weights[f"model.layers.0.mlp.{name}.weight"])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, p: t.pop(p + "weight_scale_inv"), ["up_proj.weight", "weight_scale"]),
        (lambda t, p: t.update({p + "weight_scale_inv": torch.ones(7, 7)}), ["weight_scale_inv", "[7, 7]"]),
        (lambda t, p: t.update({p + "weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)}), ["I32"]),
        (
            lambda t, p: t.update({p + "weight_scale_inv": torch.full((3, 2), torch.inf)}),
            ["weight_scale_inv", "infinite"],
        ),
        (
            lambda t, p: t.update({p + "weight": torch.full((96, 64), torch.nan).to(torch.float8_e4m3fn)}),
            ["up_proj.weight", "NaN"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_error(edit, words, bfloat16_folder, tmp_path):
    folder, _ = write(bfloat16_folder, tmp_path / "out", "blocks")
    change_tensors(folder, lambda tensors: edit(tensors, "model.layers.1.mlp.up_proj."))
    refused(folder, *words)


@pytest.mark.parametrize("block", [[0, 128], [128], "128", [128, -1], [1.5, 2], [10**30, 1]])
def test_block_sizes_that_cannot_be_are_refused(block, bfloat16_folder, tmp_path):
    folder, _ = write(bfloat16_folder, tmp_path / "out", "blocks")
    change_config(folder, lambda values: values["quantization_config"].update(weight_block_size=block))
    refused(folder, "weight_block_size must be two numbers")


def test_a_config_without_such_weights_is_refused(bfloat16_folder, tmp_path):
    folder, _ = write(bfloat16_folder, tmp_path / "out", "rows")
    save_file(load_file(bfloat16_folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    refused(folder, "quantized by fp8, and no tensor is")


@pytest.fixture(scope="module", params=["large blocks", "rows"])
def sound(request, bfloat16_folder, tmp_path_factory):
    return as_written(write(bfloat16_folder, tmp_path_factory.mktemp("fuzz") / "out", request.param)[0])


FIELDS = ["quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"]
VALUES = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5)
VALUES |= st.lists(st.integers(-1, 1 << 40), max_size=3) | st.sampled_from(["e4m3", "static", [128, 128], {}, [""]])


@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
@FUZZ
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), damage=DAMAGE)
def test_any_damage_loads_or_is_our_own_error(sound, fields, damage):
    load_damaged(sound, lambda values: values["quantization_config"].update(fields), damage)
