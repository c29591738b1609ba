"""GPTQ and AWQ checkpoints: read back exactly as they were written by the published definitions."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasten
from column_folders import write
from hasten.cli.main import main
from hasten.errors import HastenWarning
from hasten.model.fused_linear import fusion_conflict
from hasten.ops.linear import PackedLinear
from hasten.ops.native import library
from quantized_folders import DAMAGE, FUZZ, as_written, change_config, change_tensors, load_damaged, logits, refused

CASES = {
    "gptq": {"method": "gptq"},
    "gptq symmetric": {"method": "gptq", "symmetric": True},
    "gptq v2": {"method": "gptq", "version": "gptq_v2"},
    "gptq g64": {"method": "gptq", "group": 64},
    "gptq row": {"method": "gptq", "group": -1, "symmetric": True},
    "gptq int8 row": {"method": "gptq", "bits": 8, "group": -1, "symmetric": True},
    "gptq int8 groups": {"method": "gptq", "bits": 8},
    "gptq int8 row with zero points": {"method": "gptq", "bits": 8, "group": -1},
    "gptq activation order": {"method": "gptq", "act_order": True},
    "gptq 3 bits": {"method": "gptq", "bits": 3},
    "gptq 2 bits": {"method": "gptq", "bits": 2},
    "gptq 3 bits symmetric": {"method": "gptq", "bits": 3, "symmetric": True},
    "awq": {"method": "awq"},
    "awq row": {"method": "awq", "group": -1},
}
PLAIN = {"gptq g16": {"method": "gptq", "group": 16}}


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")  # of groups that do not divide the features
@pytest.mark.parametrize("case", CASES)
def test_packed_layers_hold_exactly_the_published_weights(case, plain_folder, tmp_path):
    folder, weights = write(plain_folder, tmp_path / "out", **CASES[case])
    model = hasten.load(folder, dtype="stored")
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == len(weights) == 4 * 7
    assert torch.equal(packed["blocks.2.mlp.down"].dequantize(), weights["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(packed["blocks.0.attention.k"].dequantize(), weights["model.layers.0.self_attn.k_proj.weight"])
    again = tmp_path / "again"
    hasten.save(model, again)  # as compressed-tensors
    assert torch.equal(logits(hasten.load(again, dtype="stored")), logits(model))


@pytest.mark.parametrize(
    ("case", "packing"),
    [("gptq", "auto_gptq"), ("gptq v2", "gptqmodel"), ("gptq symmetric", "auto_gptq"), ("awq", "auto_awq")],
)
def test_auto_round_says_of_which_layout_it_is(case, packing, plain_folder, tmp_path):
    folder, weights = write(plain_folder, tmp_path / "out", **CASES[case])
    change(
        folder,
        quant_method="auto-round",
        packing_format=f"auto_round:{packing}",
        data_type="int",
        checkpoint_format=None,
    )
    model = hasten.load(folder, dtype="stored")
    assert torch.equal(model.blocks[2].mlp.down.dequantize(), weights["model.layers.2.mlp.down_proj.weight"])
    change(folder, packing_format="auto_round:frobnicate")
    refused(folder, "packing_format (auto-round) must be", "found 'auto_round:frobnicate'")


@pytest.mark.parametrize("case", PLAIN)
def test_what_no_kernel_takes_is_held_as_plain_weights(case, plain_folder, tmp_path):
    folder, weights = write(plain_folder, tmp_path / "out", **PLAIN[case])
    with pytest.warns(HastenWarning, match=r"no kernel takes a quantized weight like .* GB, \d+\.\d times as stored"):
        model = hasten.load(folder, dtype="stored")
    assert torch.equal(model.blocks[2].mlp.down.weight, weights["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(model.blocks[1].attention.q.weight, weights["model.layers.1.self_attn.q_proj.weight"])


def change(folder, **fields):
    change_config(folder, lambda values: values["quantization_config"].update(fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 5}, ["config.json", "quantization_config.bits", "found 5"]),
        ({"bits": "4"}, ["quantization_config.bits"]),
        ({"bits": 8}, ["model.safetensors", "must be"]),
        ({"group_size": 0}, ["quantization_config.group_size"]),
        ({"group_size": 10**30}, ["scales", "must be"]),
        ({"group_size": 64}, ["must be F16 or BF16"]),
        ({"checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        ({"dynamic": {"x": {}}}, ["dynamic"]),
        ({"sym": True}, ["qzeros", "symmetric"]),
        ({"quant_method": "awq", "version": "gemv"}, ["version", "gemv"]),
        ({"quant_method": "unknown"}, ["unknown", "compressed-tensors, gptq, awq"]),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_one_error(fields, words, plain_folder, tmp_path):
    folder, _ = write(plain_folder, tmp_path / "out", "gptq")
    change(folder, **fields)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, p: t.pop(p + "scales"), ["lacks", "scales"]),
        (lambda t, p: t.pop(p + "qzeros"), ["lacks", "qzeros"]),
        (lambda t, p: t.pop(p + "qweight"), ["is there without"]),
        (lambda t, p: t.update({p + "scales": t[p + "scales"].float()}), ["scales", "F32"]),
        (lambda t, p: t.update({p + "scales": t[p + "scales"] * torch.inf}), ["scales"]),
        (lambda t, p: t.update({p + "qweight": t[p + "qweight"].long()}), ["I32", "I64"]),
        (lambda t, p: t.update({p + "qzeros": t[p + "qzeros"][:, :1].contiguous()}), ["qzeros"]),
        (lambda t, p: t.update({p + "g_idx": t[p + "g_idx"] + 7}), ["g_idx", "names groups"]),
        (lambda t, p: t.update({p + "g_idx": t[p + "g_idx"] - 1}), ["g_idx", "names groups"]),
    ],
)
def test_tensors_that_do_not_fit_are_one_error(edit, words, plain_folder, tmp_path):
    folder, _ = write(plain_folder, tmp_path / "out", "gptq")
    change_tensors(folder, lambda tensors: edit(tensors, "model.layers.1.mlp.up_proj."))
    refused(folder, *words)


def test_an_order_that_is_promised_and_missing_is_an_error(plain_folder, tmp_path):
    folder, _ = write(plain_folder, tmp_path / "out", "gptq")
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".g_idx")])
    assert hasten.load(folder, dtype="stored") is not None  # in the columns' own order nothing is needed
    change(folder, desc_act=True)
    refused(folder, "qweight", "lacks", "g_idx")


FIELDS = [
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "dynamic",
    "zero_point",
    "version",
    "packing_format",
    "data_type",
]
VALUES = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5)
VALUES |= st.sampled_from([2, 3, 4, 8, -1, 16, 32, 64, 128, "gptq", "awq", "gemm", "GEMM", "gptq_v2", "int", {}, []])
VALUES |= st.sampled_from([f"auto_round:{name}" for name in ("auto_gptq", "gptqmodel", "auto_awq")])


@pytest.fixture(scope="module", params=["gptq", "awq", "auto-round"])
def sound(request, plain_folder, tmp_path_factory):
    other = request.param == "auto-round"
    folder, _ = write(plain_folder, tmp_path_factory.mktemp("fuzz") / "out", "gptq" if other else request.param)
    if other:
        change(folder, quant_method="auto-round", packing_format="auto_round:auto_gptq", data_type="int")
    return as_written(folder)


@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
@FUZZ
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), damage=DAMAGE)
def test_any_damage_loads_or_is_our_own_error(sound, fields, damage):
    load_damaged(sound, lambda values: values["quantization_config"].update(fields), damage)


def test_columns_in_the_order_of_activation_are_not_fused(bfloat16_folder, tmp_path):
    folder, _ = write(bfloat16_folder, tmp_path / "out", "gptq", act_order=True)
    model = hasten.load(folder, dtype="stored")
    assert "in the order of its columns (desc_act)" in (fusion_conflict(model) or "")
    assert model.blocks[0].mlp.down.order is not None


@pytest.mark.skipif(library() is None, reason="nothing is fused without the native kernels")
@pytest.mark.filterwarnings("always")
def test_the_warning_about_their_order_gives_advice_that_ends_it(bfloat16_folder, tmp_path, monkeypatch, capfd):
    write(bfloat16_folder, tmp_path / "act", "gptq", act_order=True)
    monkeypatch.chdir(tmp_path)
    generate = ["--prompt-ids", "1", "--max-new-tokens", "1", "--temperature", "0"]
    main(["generate", "act", *generate])
    err = capfd.readouterr().err
    assert "without the fused steps, about 3 times slower: they take activations as they come" in err
    (advice,) = re.findall(r"`(hasten export .*)`, then PLAIN with --quantize int8", err)
    main(advice.split()[1:])
    main(["generate", "PLAIN", "--quantize", "int8", *generate])
    err = capfd.readouterr().err
    assert "PLAIN: int8, fused steps" in err
    assert "without the fused steps" not in err
