"""Quantized folders of our own: read again bit for bit, and read by transformers."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import hasten
from combinations import combinations
from hasten.checkpoints.formats.packing import pack_columns, pack_rows, signed, unpack_columns, unpack_rows, unsigned
from hasten.checkpoints.formats.stream import write_file
from hasten.errors import HastenWarning
from hasten.quantization import Int4, Int8, quantize
from quantized_folders import exact, logits, theirs
from references import make_reference

helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
transformers.logging.set_verbosity_error()

DEQUANTIZE = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
FAMILIES = ["llama-biases", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_bigcode-mha"]
TIED = ("ernie4_5_moe",)  # its head is one matrix with the embedding
EXPERTS = ["qwen3_moe", "olmoe", "qwen2_moe", "dots1", "glm4_moe", "ernie4_5_moe", "minimax_m2"]
NEWER = ["gemma", "starcoder2", "olmo2", "glm4", "cohere2", "hunyuan_v1_dense"]


@settings(max_examples=50)
@given(rows=st.integers(1, 20), columns=st.integers(1, 70), seed=st.integers(0, 1000))
def test_packing_is_that_of_the_package(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    four = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    eight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    centred = four.to(torch.int8) - 8
    assert torch.equal(pack_columns(four), helpers.pack_to_int32(centred, 4))
    assert torch.equal(pack_rows(four), helpers.pack_to_int32(centred, 4, packed_dim=0))
    packed = pack_columns(unsigned(eight), 8)
    assert torch.equal(packed, helpers.pack_to_int32(eight, 8))
    assert torch.equal(unpack_columns(pack_columns(four), columns), four)
    assert torch.equal(unpack_rows(pack_rows(four), rows), four)
    assert torch.equal(signed(unpack_columns(packed, columns, 8), 8), eight)


def test_a_file_written_tensor_by_tensor_is_a_safetensors_file(tmp_path):
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "shape": torch.tensor([3, 5]),
        "empty": torch.zeros(0, 4),
        "i": torch.arange(-3, 4, dtype=torch.int8),
        "a": torch.randn(2, 2).t(),
    }
    specs = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_file(specs, tmp_path / "x.safetensors", tensors=reversed(tensors.items()))
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


SCHEMES = [
    Int8(activations="int8"),
    Int8(activations="float", lm_head="none"),
    Int4(group_size=32, scale_dtype="bfloat16"),
    Int4(group_size=64, symmetric=False, lm_head="same", activations="float"),
]


@pytest.mark.filterwarnings("ignore::hasten.HastenWarning")
@pytest.mark.parametrize(
    ("name", "scheme"),
    combinations([*FAMILIES, *NEWER, "gpt2", "gpt_bigcode", "mixtral", *EXPERTS], SCHEMES),
    ids=str,
)
def test_file_to_memory_to_file_is_exact(name, scheme, tmp_path):
    model = quantize(hasten.load(make_reference(name)), scheme)
    hasten.save(model, tmp_path / "first")
    again = hasten.load(tmp_path / "first", dtype="stored")
    assert again.quantization == model.quantization
    for layer in model.quantization:
        ours, read = model.get_submodule(layer).to_weight(), again.get_submodule(layer).to_weight()
        assert torch.equal(ours.values, read.values)
        assert torch.equal(ours.scales, read.scales)
        assert (ours.zeros is None and read.zeros is None) or torch.equal(ours.zeros, read.zeros)
    for weight in again.parameters():  # PyTorch sums a product with one row otherwise where a file has it unaligned
        weight.data = weight.clone()
    assert torch.equal(logits(again), logits(model))
    hasten.save(again, tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


@pytest.mark.filterwarnings("ignore::hasten.HastenWarning")
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # qwen3's head is one matrix with its embedding
def test_a_folder_says_how_activations_are_treated_where_it_differs(name, tmp_path):
    model = quantize(hasten.load(make_reference(name)), Int4(group_size=32))
    hasten.save(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["hasten"] == {"activations": {"group": "int8", "channel": "float"}}
    again = hasten.load(tmp_path, dtype="stored")
    assert (again.blocks[0].mlp.down.activations, again.head.activations) == ("int8", "float")
    for word in ("int8", "float"):  # one for all layers, as folders of before say it
        (tmp_path / "config.json").write_text(json.dumps(values | {"hasten": {"activations": word}}))
        again = hasten.load(tmp_path, dtype="stored")
        assert (again.blocks[0].mlp.down.activations, again.head.activations) == (word, word)


def test_shards_and_another_dtype(tmp_path):
    from hasten.checkpoints.export import export_model

    model = quantize(hasten.load(make_reference("phi3")), Int4(group_size=32))
    export_model(model, tmp_path, shard_bytes=20_000, dtype=torch.bfloat16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = hasten.load(tmp_path, dtype="stored")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.blocks[2].attention.v.to_weight().values, model.blocks[2].attention.v.to_weight().values)


def test_a_model_is_no_longer_called_quantized_when_it_is_not(tmp_path):
    hasten.save(quantize(hasten.load(make_reference("llama")), Int8()), tmp_path / "int8")
    hasten.save(exact(hasten.load(tmp_path / "int8", dtype="stored")), tmp_path / "plain")
    assert not {"quantization_config", "hasten"} & set(json.loads((tmp_path / "plain" / "config.json").read_text()))
    assert hasten.load(tmp_path / "plain", dtype="stored").quantization is None


def readable(model, scheme):
    """The scheme as transformers reads it: a head that is tied to the embedding stays as it is."""
    return replace(scheme, lm_head="none") if model.tied else scheme


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (Int8(), {}),
        (Int8(activations="int8", lm_head="none"), DEQUANTIZE),
        (Int4(group_size=32), {}),
        (Int4(group_size=32, symmetric=False, lm_head="same"), DEQUANTIZE),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_the_same_numbers(name, scheme, options, tmp_path):
    if name.startswith("gpt_bigcode") and scheme in (Int4(group_size=32), Int8()):
        pytest.skip("transformers' GPT-BigCode wants a plain weight when it is made (docs/in-depth/formats.md)")
    model = hasten.load(make_reference(name))
    hasten.save(quantize(model, readable(model, scheme)), tmp_path / "quantized")
    ours = logits(exact(hasten.load(tmp_path / "quantized", dtype="stored")))
    # Dequantized on loading, their weights are rounded to the dtype of the scales, which is float16 here.
    tolerance = 5e-2 if scheme == Int4(group_size=32, symmetric=False, lm_head="same") else 1e-4
    if scheme == Int8(activations="int8", lm_head="none"):
        tolerance = None  # they round the activations too, and not bit for bit as we do
    found = theirs(tmp_path / "quantized", **options)
    if tolerance is None:
        assert (found - ours).std() < 0.1 * ours.std()
    else:
        assert (found - ours).abs().max() < tolerance


@pytest.mark.parametrize("scheme", [Int8(activations="float"), Int4(group_size=32, activations="float")], ids=str)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "phi3"])
def test_in_bfloat16_our_error_is_at_most_twice_that_of_transformers(name, scheme, tmp_path):
    plain = hasten.load(make_reference(name), dtype="bfloat16")
    hasten.save(quantize(plain, readable(plain, scheme)), tmp_path / "quantized")
    hasten.save(exact(hasten.load(tmp_path / "quantized", dtype="stored")), tmp_path / "exact")
    expected = theirs(tmp_path / "exact", torch.float64)
    ours = (logits(hasten.load(tmp_path / "quantized", dtype="stored")) - expected).square().mean().sqrt()
    reference = (theirs(tmp_path / "quantized", torch.bfloat16) - expected).square().mean().sqrt()
    assert ours <= 2 * reference


READ = [(name, Int8(activations="float")) for name in ("mixtral", *EXPERTS)]
READ += [(name, Int4(group_size=32)) for name in ("mixtral", "olmoe", "qwen2_moe")]


@pytest.mark.parametrize(("name", "scheme"), READ, ids=str)
def test_transformers_reads_experts(name, scheme, tmp_path):
    model = quantize(hasten.load(make_reference(name)), replace(scheme, lm_head="none" if name in TIED else "int8"))
    hasten.save(model, tmp_path)
    ours = logits(exact(hasten.load(tmp_path, dtype="stored")))
    assert (theirs(tmp_path) - ours).abs().max() < 5e-3  # experts are dequantized in the dtype of their scales


@pytest.mark.parametrize(
    ("name", "scheme", "word"),
    [
        ("gpt2", Int8(lm_head="none"), "Conv1D"),
        ("qwen3", Int8(), "lm_head: none"),
        ("qwen3_moe", Int4(group_size=32), "no multiple of the group size 32"),
        ("llama", Int4(group_size=32, symmetric=False), "quantized alike"),
        ("mixtral", Int4(group_size=32, symmetric=False, lm_head="same"), "zero points of experts"),
    ],
)
def test_what_transformers_will_not_read_is_said(name, scheme, word, tmp_path):
    model = quantize(hasten.load(make_reference(name)), scheme)
    with pytest.warns(HastenWarning, match=word):
        hasten.save(model, tmp_path)
