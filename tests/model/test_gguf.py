"""GGUF files: every tensor type as the package gguf reads it, and whole models there and back."""

from functools import partial

import numpy as np
import pytest
import torch

import hasten
from hasten.data import train_bpe
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.model.context import TrainingContext
from hasten.model.gguf.header import read_gguf
from hasten.model.gguf.types import TYPE_NAMES, TYPES
from hasten.model.gguf.write import write_gguf
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.embedding import PackedEmbedding
from quantized_folders import exact, full_disk
from references import CASES, make_reference
from tiny_model import tiny_llama

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
quants = pytest.importorskip("gguf.quants")

PROMPT = torch.arange(7, 31)[None]
FAMILIES = ["llama", "llama-mqa", "llama-biases", "llama-linear", "llama-yarn", "mistral-plain", "qwen2", "qwen3"]
SAME = partial(torch.testing.assert_close, rtol=0, atol=0)


def logits(model):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(PROMPT, torch.arange(PROMPT.shape[1])[None], context)[0]


def weights(model):
    """Every number of a model in float32, those of packed layers as their integers stand for them."""
    found = dict(model.named_parameters())
    packed = {f"{n}.weight": m.dequantize() for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    return {name: tensor.float() for name, tensor in (found | packed).items()}


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_exactly_what_gguf_dequantizes(name):
    kind, columns = TYPES[name], 768
    raw = np.random.default_rng(0).integers(0, 256, (40, columns // kind.elements * kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some random scales are infinite
        expected = quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    rows = torch.from_numpy(raw)
    found = (rows.view(kind.dtype).float() if kind.format is None else kind.weight(rows).dequantize()).numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5
    assert (np.signbit(found) == np.signbit(expected))[finite].all()


def test_types_have_the_numbers_and_sizes_of_the_package():
    for kind in gguf.GGMLQuantizationType:
        if kind.name in TYPES:
            assert TYPE_NAMES[kind] == kind.name
            assert gguf.GGML_QUANT_SIZES[kind] == (TYPES[kind.name].elements, TYPES[kind.name].bytes)


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2", "gemma3_text"])
def test_a_family_written_and_read_is_the_same_model(name, tmp_path, monkeypatch):
    if name == "gemma2":  # llama.cpp scales by the head's size
        monkeypatch.setitem(CASES, name, (*CASES[name][:2], CASES[name][2] | {"query_pre_attn_scalar": 32}))
    model = hasten.load(make_reference(name)).bfloat16().float()  # whose numbers BF16 holds
    path = tmp_path / "model.gguf"
    write_gguf(model, path)
    read = hasten.load(path, dtype="float32")
    SAME(logits(read), logits(model))
    hasten.save(read, tmp_path / "folder")
    SAME(logits(hasten.load(tmp_path / "folder")), logits(model))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
def test_transformers_reads_the_same_tensors_from_our_file(name, tmp_path):
    from transformers import modeling_gguf_pytorch_utils as theirs

    reference = make_reference(name)
    write_gguf(hasten.load(reference), tmp_path / "model.gguf", "F16")
    read = theirs.load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=reference)
    expected = dict(reference.state_dict())
    assert read["config"]["hidden_size"] == 64
    assert len(read["tensors"]) >= len(expected) - 1  # a tied head
    for name, tensor in read["tensors"].items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=1e-3, atol=1e-6)


def test_q4_0_and_q8_0_are_held_as_their_integers(tmp_path, tiny):
    path = tmp_path / "model.gguf"
    write_gguf(tiny, path, "Q4_0")
    read, file = hasten.load(path), read_gguf(path)
    q = read.blocks[0].attention.q
    assert isinstance(q, PackedLinear)
    assert (q.format.element, q.format.group_size, q.format.scale_dtype) == ("int4", 32, torch.float16)
    assert len(read.quantization) == 16
    assert (read.head.format.element, read.head.format.group_size) == ("int8", 32)  # Q8_0
    stored = file.raw("blk.0.attn_v.weight").numpy()
    expected = quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_0)
    SAME(read.blocks[0].attention.v.dequantize(), torch.from_numpy(expected))
    head = quants.dequantize(file.raw("output.weight").numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert file.tensors["output.weight"].type.name == "Q8_0"
    SAME(read.head.dequantize(), torch.from_numpy(head))
    # Again from what was read: the same integers and scales.
    write_gguf(read, tmp_path / "again.gguf", "Q8_0")
    assert torch.equal(read_gguf(tmp_path / "again.gguf").raw("blk.1.ffn_up.weight"), file.raw("blk.1.ffn_up.weight"))


def test_other_types_are_held_as_plain_weights_with_one_warning(tmp_path, tiny):
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q5_0
    write_gguf(tiny, tmp_path / "plain.gguf", "F16")
    file = read_gguf(tmp_path / "plain.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key != "general.architecture":
            value = value.tolist() if isinstance(value, np.ndarray) else value
            number = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, number)
    for name, tensor in file.tensors.items():
        values = file.raw(name).view(tensor.type.dtype).view(tensor.shape).float().numpy()
        writer.add_tensor(name, quants.quantize(values, kind) if values.ndim == 2 else values, raw_dtype=kind)
        if values.ndim == 1:
            writer.tensors[0][name].dtype = gguf.GGMLQuantizationType.F32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.warns(HastenWarning, match=r"lm_head \(5 bits, .*: 16 of 16 are held as plain bfloat16"):
        read = hasten.load(path)
    expected = quants.dequantize(read_gguf(path).raw("blk.1.ffn_down.weight").numpy(), kind)
    SAME(read.blocks[1].mlp.down.weight.data, torch.from_numpy(expected).bfloat16())
    order = torch.arange(64).view(4, 2, 8).transpose(1, 2).flatten()  # llama.cpp's order of the rows of a head
    stored = torch.from_numpy(quants.dequantize(read_gguf(path).raw("blk.0.attn_q.weight").numpy(), kind)).bfloat16()
    SAME(read.blocks[0].attention.q.weight.data[order], stored)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_int4_layers_go_to_q4_0_and_come_back_bit_for_bit(group, tmp_path, tiny):
    model = hasten.quantize(tiny, hasten.Int4(group_size=group, lm_head="same"))
    expected = weights(model)
    assert write_gguf(model, tmp_path / "model.gguf", "F16") == "Q4_0"  # most of it, whatever was asked for the rest
    read = hasten.load(tmp_path / "model.gguf", dtype="float32")
    assert len(read.quantization) == 15
    found = weights(read)
    for name in model.quantization:
        SAME(found[f"{name}.weight"], expected[f"{name}.weight"])
    torch.testing.assert_close(logits(exact(read)), logits(exact(model)), rtol=0, atol=0.02)  # embeddings in F16


@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_int8_layers_go_to_q8_0_with_a_warning(tmp_path, tiny):
    model = hasten.quantize(tiny, hasten.Int8())
    with pytest.warns(HastenWarning, match=r"15 int8 layers become Q8_0.*rounded to float16"):
        write_gguf(model, tmp_path / "model.gguf")
    found, expected = weights(hasten.load(tmp_path / "model.gguf", dtype="float32")), weights(model)
    name = "blocks.0.mlp.down.weight"
    torch.testing.assert_close(found[name], expected[name], rtol=6e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_embedding_keeps_its_integers_there_and_back(tied, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(tiny_llama(tie_word_embeddings=tied), path, "Q8_0")
    read = hasten.load(path, dtype="float32")
    assert read.tied == tied
    assert isinstance(read.embedding, PackedEmbedding)
    write_gguf(read, tmp_path / "again.gguf", "Q8_0")
    first, second = read_gguf(path), read_gguf(tmp_path / "again.gguf")
    assert list(first.tensors) == list(second.tensors)
    assert all(torch.equal(first.raw(name), second.raw(name)) for name in first.tensors)
    expected = quants.dequantize(first.raw("token_embd.weight").numpy(), gguf.GGMLQuantizationType.Q8_0)
    SAME(read.embedding.to_weight().dequantize(), torch.from_numpy(expected))


def test_what_gguf_does_not_hold_is_refused_and_nothing_is_left(tmp_path, tiny):
    path = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match="kind is 'Q4_K'; use one of BF16"):
        write_gguf(tiny, path, "Q4_K")
    with pytest.raises(ConfigError, match=r"cannot state layers of this mistral"):
        write_gguf(hasten.load(make_reference("mistral")), path)
    with pytest.raises(ConfigError, match=r"cannot state layers of this gemma2"):
        write_gguf(hasten.load(make_reference("gemma2")), path)
    with pytest.raises(ConfigError, match=r"GGUF files of llama.* are written; found gpt2"):
        write_gguf(hasten.load(make_reference("gpt2")), path)
    with pytest.raises(ConfigError, match=r"with zero points, which hasten writes as no type of GGUF.*--group-size 32"):
        write_gguf(hasten.quantize(tiny, hasten.Int4(group_size=32, symmetric=False)), path)
    small = tiny_llama()
    small.blocks[1].mlp.down.weight.data.mul_(1e-5)  # float16 has few digits for its scales
    refusal = r"blocks.1.mlp.down.weight has scales that float16 does not hold"
    with pytest.warns(HastenWarning, match="become Q8_0"), pytest.raises(ConfigError, match=refusal):
        write_gguf(hasten.quantize(small, hasten.Int8()), path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_gguf(tiny_llama(), tmp_path / "missing" / "model.gguf")
    for limit in (500, 50_000):
        with full_disk(limit), pytest.raises(CheckpointError, match=r"cannot be written: .*(too large|full)"):
            write_gguf(tiny_llama(), path)
    assert not list(tmp_path.iterdir())


def test_llama_3_factors_are_written_as_a_tensor(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = tiny_llama(rope_theta=500_000.0, rope_scaling=scaling, max_position_embeddings=16384)
    write_gguf(model, tmp_path / "model.gguf")
    read = hasten.load(tmp_path / "model.gguf", dtype="float32")
    assert read.config.ropes == model.config.ropes
    assert read_gguf(tmp_path / "model.gguf").raw("rope_freqs.weight").view(torch.float32).max() == 8


def test_a_folder_with_one_gguf_file_is_a_model_and_with_two_says_so(tmp_path, tiny):
    write_gguf(tiny, tmp_path / "a.gguf")
    assert hasten.load(tmp_path).generation["eos_token_id"] == list(tiny.tokenizer.eos_ids)
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: name one of them"):
        hasten.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a folder here"):
        hasten.load(tmp_path / "c.gguf")


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_weights_that_are_not_finite_are_not_written(kind, tmp_path):
    model = tiny_llama()
    model.blocks[0].mlp.up.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        write_gguf(model, tmp_path / "x.gguf", kind)
    assert not (tmp_path / "x.gguf").exists()


def test_a_tokenizer_without_merges_goes_there_and_back(tmp_path):
    model = tiny_llama(vocab_size=304)
    model.tokenizer = train_bpe(["a"], vocab_size=257)
    write_gguf(model, tmp_path / "x.gguf", "F16")
    assert hasten.load(tmp_path / "x.gguf").tokenizer.encode("a b") == model.tokenizer.encode("a b")
