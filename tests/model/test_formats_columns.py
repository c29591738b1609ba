"""GPTQ and AWQ checkpoints: written here by the published definitions, loop by loop, and read back exactly."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hasten
from hasten.errors import CheckpointError, HastenWarning
from hasten.model.context import training_context
from hasten.ops.linear import PackedLinear
from references import make_reference

TOKENS = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        positions = torch.arange(TOKENS.shape[1]).expand(len(TOKENS), -1)
        return model(TOKENS, positions, training_context(model, TOKENS.shape[1])).double()


def word_of(values, bits):
    """One int32 of unsigned values, the first one lowest."""
    word = sum(int(value) << (bits * i) for i, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def packed_down(values, bits):
    """(K, N) -> (K · bits / 32, N): AutoGPTQ's qweight. Of 3 bits, 32 values stand in three words."""
    k, n = values.shape
    if bits == 3:
        rows = []
        for start in range(0, k, 32):
            whole = [sum(int(values[start + i, j]) << (3 * i) for i in range(32)) for j in range(n)]
            rows += [[(one >> (32 * part)) & 0xFFFFFFFF for one in whole] for part in range(3)]
        return torch.tensor([[w - (1 << 32) if w >= 1 << 31 else w for w in row] for row in rows], dtype=torch.int32)
    each = 32 // bits
    return torch.tensor(
        [[word_of(values[i : i + each, j], bits) for j in range(n)] for i in range(0, k, each)], dtype=torch.int32
    )


def packed_across(values, bits, order=None):
    """(R, N) -> (R, N · bits / 32): qzeros, and AWQ's qweight with its order."""
    if order is None:
        return packed_down(values.t(), bits).t().contiguous()
    rows = [[word_of([row[i + o] for o in order], bits) for i in range(0, values.shape[1], 8)] for row in values]
    return torch.tensor(rows, dtype=torch.int32)


def write(folder, out, method, *, bits=4, group=32, symmetric=False, version="gptq", act_order=False):
    """A checkpoint of a method, of random integers, and the weights that it stands for by their published names."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "bits": bits,
        "group_size": group,
        **({"sym": symmetric, "desc_act": act_order, "checkpoint_format": version} if method == "gptq" else {}),
        **({"zero_point": True, "version": "gemm"} if method == "awq" else {}),
    }
    (out / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj." not in name or not name.endswith(".weight"):
            tensors[name] = tensor
            continue
        prefix, (n, k) = name.removesuffix("weight"), tensor.shape
        size = k if group == -1 else group
        groups = -(-k // size)
        values = torch.randint(0, 1 << bits, (k, n), generator=generator)
        zeros = torch.randint(1, 1 << bits, (groups, n), generator=generator)
        if symmetric:
            zeros.fill_(1 << (bits - 1))
        scales = (torch.rand(groups, n, generator=generator) * 0.02 + 0.001).half()
        index = torch.arange(k) // size
        if act_order:
            index = index[torch.randperm(k, generator=generator)]
        weights[name] = (scales.float()[index] * (values - zeros[index])).t().contiguous()
        if method == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            own = {"qweight": packed_across(values, 4, order), "qzeros": packed_across(zeros, 4, order)}
        else:
            stored = (zeros - int(version == "gptq")) % (1 << bits)
            own = {"qweight": packed_down(values, bits), "qzeros": packed_across(stored, bits), "g_idx": index.int()}
        tensors |= {prefix + leaf: tensor for leaf, tensor in (own | {"scales": scales}).items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out, weights


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "model"
    hasten.save(hasten.load(make_reference("llama")), folder)
    return folder


CASES = {
    "gptq": {"method": "gptq"},
    "gptq symmetric": {"method": "gptq", "symmetric": True},
    "gptq v2": {"method": "gptq", "version": "gptq_v2"},
    "gptq g64": {"method": "gptq", "group": 64},
    "gptq row": {"method": "gptq", "group": -1, "symmetric": True},
    "gptq int8 row": {"method": "gptq", "bits": 8, "group": -1, "symmetric": True},
    "gptq int8 groups": {"method": "gptq", "bits": 8},
    "gptq int8 row with zero points": {"method": "gptq", "bits": 8, "group": -1},
    "awq": {"method": "awq"},
    "awq row": {"method": "awq", "group": -1},
}
PLAIN = {
    "gptq activation order": {"method": "gptq", "act_order": True},
    "gptq 3 bits": {"method": "gptq", "bits": 3},
    "gptq 2 bits": {"method": "gptq", "bits": 2},
    "gptq g16": {"method": "gptq", "group": 16},
}


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")  # of groups that do not divide the features
@pytest.mark.parametrize("case", CASES)
def test_packed_layers_hold_exactly_the_published_weights(case, plain_folder, tmp_path):
    folder, weights = write(plain_folder, tmp_path / "out", **CASES[case])
    model = hasten.load(folder)
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == len(weights) == 4 * 7
    assert torch.equal(packed["blocks.2.mlp.down"].dequantize(), weights["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(packed["blocks.0.attention.k"].dequantize(), weights["model.layers.0.self_attn.k_proj.weight"])
    again = tmp_path / "again"
    hasten.save(model, again)  # as compressed-tensors
    assert torch.equal(logits(hasten.load(again)), logits(model))


@pytest.mark.parametrize("case", PLAIN)
def test_what_no_kernel_takes_is_held_as_plain_weights(case, plain_folder, tmp_path):
    folder, weights = write(plain_folder, tmp_path / "out", **PLAIN[case])
    with pytest.warns(HastenWarning, match="no kernel takes a quantized weight like"):
        model = hasten.load(folder)
    assert torch.equal(model.blocks[2].mlp.down.weight, weights["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(model.blocks[1].attention.q.weight, weights["model.layers.1.self_attn.q_proj.weight"])


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


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
    with pytest.raises(CheckpointError) as caught:
        hasten.load(folder)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, p: t.pop(p + "scales"), ["lacks", "scales"]),
        (lambda t, p: t.pop(p + "qzeros"), ["lacks", "qzeros"]),
        (lambda t, p: t.pop(p + "qweight"), ["stands without"]),
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
    tensors = load_file(folder / "model.safetensors")
    edit(tensors, "model.layers.1.mlp.up_proj.")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        hasten.load(folder)
    assert all(word in str(caught.value) for word in words), caught.value


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
]
VALUES = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5)
VALUES |= st.sampled_from([2, 3, 4, 8, -1, 16, 32, 64, 128, "gptq", "awq", "gemm", "GEMM", "gptq_v2", {}, []])


@pytest.fixture(scope="module", params=["gptq", "awq"])
def sound(request, plain_folder, tmp_path_factory):
    folder, _ = write(plain_folder, tmp_path_factory.mktemp("fuzz") / "out", request.param)
    return folder, (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    damage=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255)), max_size=3),
)
def test_any_damage_loads_or_is_our_own_error(sound, fields, damage):
    folder, config, weights = sound
    (folder / "config.json").write_bytes(config)
    change(folder, **fields)
    raw = bytearray(weights)
    for place, value in damage:
        raw[place % len(raw)] = value
    (folder / "model.safetensors").write_bytes(raw)
    try:
        hasten.load(folder)
    except hasten.HastenError as error:
        message = str(error)
        assert message
