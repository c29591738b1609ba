"""MXFP4, NVFP4 and FP8 as compressed-tensors and ModelOpt store them: what the definition says."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hasten
from hasten.errors import HastenWarning
from hasten.quantization import Int4, Int8, quantize_to_folder
from quantized_folders import DAMAGE, FUZZ, Q, as_written, change_config, change_tensors, load_damaged, refused

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def of_compressed(format, **weights):
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, "dynamic": False} | weights}
    return CT | {"format": format, "config_groups": {"group_0": group}}


MXFP4 = of_compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8")
NVFP4 = of_compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)
CASES = {
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp8 channel": of_compressed("float-quantized", num_bits=8, strategy="channel"),
    "fp8 tensor": of_compressed("float-quantized", num_bits=8, strategy="tensor"),
    "fp8 block": of_compressed("float-quantized", num_bits=8, strategy="block", block_structure=[32, 48]),
    "fp8 modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}


def fp4(name, weight, generator, case):
    """Random values of e2m1, and the weight value by value."""
    (n, k), size = weight.shape, 32 if case == "mxfp4" else 16
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    plain = torch.tensor([[(-1) ** (c >> 3) * E2M1[c & 7] for c in row] for row in codes.tolist()])
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    if size == 32:
        exponents = torch.randint(115, 125, (n, k // 32), generator=generator, dtype=torch.uint8)
        scales = torch.tensor([[2.0 ** (e - 127) for e in row] for row in exponents.tolist()])
        leaves = {"weight_packed": pairs, "weight_scale": exponents}
    else:
        inner = (torch.rand(n, k // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
        outer = torch.tensor([3000.0 if case == "nvfp4" else 1 / 3000])
        scales = inner.float() / outer if case == "nvfp4" else inner.float() * outer
        leaves = {"weight_packed": pairs, "weight_scale": inner, "weight_global_scale": outer}
        if case == "modelopt":
            leaves = {"weight": pairs, "weight_scale": inner, "weight_scale_2": outer[0]}
        leaves["input_global_scale" if case == "nvfp4" else "input_scale"] = torch.tensor([2.0])
    return leaves, plain * scales.repeat_interleave(size, 1)


def fp8(name, weight, generator, case):
    (n, k), kind = weight.shape, case.split()[1]
    rows, columns = {"channel": (1, k), "block": (32, 48)}.get(kind, (n, k))
    scale = torch.rand(-(-n // rows), -(-k // columns), generator=generator) * 0.01 + 0.001
    whole = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    values = (weight.float() / whole).to(torch.float8_e4m3fn)
    stored = scale.view(-1) if kind == "tensor" else scale.view(()) if kind == "modelopt" else scale
    return {"weight": values, "weight_scale": stored}, values.float() * whole


def write(folder, out, case):
    """A checkpoint, and the weights that it stands for."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CASES[case]}
    (out / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = tensor
            continue
        leaves, weights[name] = (fp8 if "fp8" in case else fp4)(name, tensor, generator, case)
        tensors |= {name.removesuffix("weight") + leaf: one for leaf, one in leaves.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out, weights


def plain_weight(module):
    return module.weight if isinstance(module, torch.nn.Linear) else module.dequantize(torch.float32)


@pytest.mark.filterwarnings("ignore:no kernel takes a quantized weight like")
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_definition(case, dtype, bfloat16_folder, tmp_path):
    """Exactly in float32: no scale is rounded on the way; in the model's own dtype that, rounded once."""
    folder, weights = write(bfloat16_folder, tmp_path / "out", case)
    model = hasten.load(folder, dtype=dtype)
    assert model.dtype == (torch.float32 if dtype else torch.bfloat16)
    for layer, name in (
        (model.blocks[2].mlp.down, "2.mlp.down_proj"),
        (model.blocks[0].attention.k, "0.self_attn.k_proj"),
    ):
        expected, found = weights[f"model.layers.{name}.weight"], plain_weight(layer)
        assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("case", ["mxfp4", "nvfp4", "fp8 channel", "fp8 block"])
def test_the_package_makes_the_same_weights_of_them(case, bfloat16_folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    folder, weights = write(bfloat16_folder, tmp_path / "out", case)
    given, stored = CASES[case], load_file(folder / "model.safetensors")
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**given["config_groups"]["group_0"]["weights"])
    )
    state = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if f"{Q}." in name}
    theirs = BaseCompressor.get_value_from_registry(given["format"]).decompress(state, scheme)["weight"]
    assert torch.equal(theirs.bfloat16(), weights[f"{Q}.weight"].bfloat16())


def test_it_is_said_that_activations_are_not_rounded_and_weights_are_plain(bfloat16_folder, tmp_path):
    folder, _ = write(bfloat16_folder, tmp_path / "out", "nvfp4")
    inputs = {"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16}
    group = {"config_groups": {"a": NVFP4["config_groups"]["group_0"] | {"input_activations": inputs}}}
    change_config(folder, lambda values: values["quantization_config"].update(group))
    with pytest.warns(HastenWarning) as told:
        hasten.load(folder, dtype="stored")
    assert [text for text in map(str, (one.message for one in told)) if "keeps theirs in 16 bits" in text]
    assert [text for text in map(str, (one.message for one in told)) if "float4_e2m1, blocks of 1 × 16" in text]
    assert len(told) == 2


TENSORS = {
    "no scale": ("nvfp4", lambda t: t.pop(f"{Q}.weight_scale"), ["must have", "weight_scale beside it"]),
    "no outer scale": ("nvfp4", lambda t: t.pop(f"{Q}.weight_global_scale"), ["weight_global_scale", "F32"]),
    "many outer scales": ("nvfp4", lambda t: t.update({f"{Q}.weight_global_scale": torch.ones(7)}), ["one number"]),
    "outer scale of 0": ("nvfp4", lambda t: t[f"{Q}.weight_global_scale"].zero_(), ["weight_scale", "infinite"]),
    "scales of mxfp4": (
        "nvfp4",
        lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 4).byte()}),
        ["F8_E4M3", "U8 [64, 4]"],
    ),
    "an exponent of 255": ("mxfp4", lambda t: t[f"{Q}.weight_scale"].fill_(255), ["weight_scale", "NaN"]),
    "other rows": ("mxfp4", lambda t: t.update({f"{Q}.weight_scale": torch.ones(63, 2).byte()}), ["one for 32 values"]),
    "no pairs": (
        "mxfp4",
        lambda t: [t.pop(n) for n in list(t) if "packed" in n],
        ["no tensor is"],
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(case, bfloat16_folder, tmp_path):
    kind, change, words = TENSORS[case]
    folder, _ = write(bfloat16_folder, tmp_path / "out", kind)
    change_tensors(folder, change)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_bits": 6}, ["weights.num_bits", "4 or 8"]),
        ({"group_size": 64}, ["weights.group_size", "16 or 32"]),
        ({"symmetric": False}, ["weights.symmetric"]),
        ({"num_bits": 8, "strategy": "block"}, ["weights.block_structure must be two numbers"]),
        ({"num_bits": 8, "strategy": "group"}, ["weights.strategy"]),
        ({"type": "int"}, ["format", "nvfp4-pack-quantized"]),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(fields, words, bfloat16_folder, tmp_path):
    folder, _ = write(bfloat16_folder, tmp_path / "out", "nvfp4")
    change_config(folder, lambda v: v["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields))
    refused(folder, "config.json", *words)


FUZZED = [*CASES, "int4", "int8"]
FIELDS = ["num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder"]
FIELDS += ["quant_algo", "quant_method"]
VALUES = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=4)
VALUES |= st.sampled_from(["float", "int", "tensor", "block", "group", 4, 8, 16, 32, [32, 48], {}, []])


@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
@FUZZ
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), damage=DAMAGE, case=st.sampled_from(FUZZED))
def test_any_damage_loads_or_is_our_own_error(sound, fields, damage, case):
    def change(values):
        groups = values["quantization_config"].get("config_groups")
        given = values["quantization_config"] if groups is None else next(iter(groups.values()))["weights"]
        given |= fields

    load_damaged(sound[case], change, damage)


@pytest.fixture(scope="module")
def sound(bfloat16_folder, tmp_path_factory):
    place, folders = tmp_path_factory.mktemp("fuzz"), {}
    for case in FUZZED:
        folder = place / case
        if case in CASES:
            write(bfloat16_folder, folder, case)
        else:  # our own
            scheme = Int4(group_size=32, symmetric=False, lm_head="none") if case == "int4" else Int8()
            quantize_to_folder(hasten.load(bfloat16_folder, dtype="stored"), scheme, folder)
        folders[case] = as_written(folder)
    return folders
