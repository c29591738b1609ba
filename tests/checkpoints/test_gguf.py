"""GGUF files: every tensor type as the package gguf reads it, and whole models there and back."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import hasten
from full_disk import full_disk
from gguf_files import retyped
from hasten.checkpoints.gguf.architectures import ARCHITECTURES
from hasten.checkpoints.gguf.grids import table
from hasten.checkpoints.gguf.header import read_gguf
from hasten.checkpoints.gguf.types import TYPE_NAMES, TYPES
from hasten.checkpoints.gguf.write import write_gguf
from hasten.data import train_bpe
from hasten.engine.params import recommended
from hasten.errors import CheckpointError, ConfigError, HastenWarning, ResourceError
from hasten.model.context import TrainingContext
from hasten.model.fused import refusal
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.blocks import GgufBlocks, pack_blocks
from hasten.ops.linear.embedding import PackedEmbedding
from hasten.ops.linear.layouts import PANELS
from hasten.ops.native import library
from quantized_folders import exact
from references import CASES, IN_GGUF, STATED, YARN, make_reference, stated
from tiny_model import tiny_llama
from triton_cases import needs_gpu

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
quants = pytest.importorskip("gguf.quants")

PROMPT = torch.arange(7, 31)[None]
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


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_family_written_and_read_is_the_same_model(name, tmp_path, monkeypatch):
    model = stated(name, monkeypatch).bfloat16().float()  # whose numbers BF16 holds
    path = tmp_path / "model.gguf"
    write_gguf(model, path)
    read = hasten.load(path, dtype="float32")
    for name, expected in model.named_parameters():
        close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6) if name.endswith("log_rate") else SAME
        close(read.get_parameter(name).data, expected.data)  # its exponential is stored
    # Products of a few rows, of each expert, differ in the last bit where memory is aligned otherwise.
    inexact = bool(model.config.experts) or model.config.keeps_states
    compare = partial(torch.testing.assert_close, rtol=0, atol=2e-6) if inexact else SAME
    compare(logits(read), logits(model))
    hasten.save(read, tmp_path / "folder")
    compare(logits(hasten.load(tmp_path / "folder", dtype="float32")), logits(model))


STACKED = [("mixtral", "LLAMA", "Q8_0"), ("qwen3_moe", "QWEN3MOE", "Q8_0"), ("phi3", "PHI3", "Q8_0")]
STACKED += [
    ("gpt_oss", "GPT_OSS", "MXFP4"),
    ("qwen3_next", "QWEN3NEXT", "Q8_0"),
    ("lfm2_moe", "LFM2MOE", "Q8_0"),
    ("qwen3_5_moe_text", "QWEN35MOE", "Q8_0"),
    ("gemma4_text-experts", "GEMMA4", "Q8_0"),
    ("granitemoe", "GRANITE_MOE", "Q8_0"),
    ("granitemoehybrid", "GRANITE_HYBRID", "Q8_0"),
    ("deepseek_v3", "DEEPSEEK2", "Q8_0"),
    ("mistral4", "MISTRAL4", "Q8_0"),
]


@pytest.mark.parametrize(("name", "architecture", "kind"), STACKED)
@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_stacked_and_fused_tensors_have_the_names_of_the_package(name, architecture, kind, tmp_path, monkeypatch):
    """Experts in one tensor, and rotary positions for a part of a head, quantized as llama.cpp would."""
    values = CASES[name][2] | STATED.get(name, {}) | {"hidden_size": 64, "intermediate_size": 64}
    values |= {
        "gpt_oss": {"num_local_experts": 4},
        "lfm2_moe": {"num_experts": 4},
        "phi3": {"partial_rotary_factor": 0.5},
        "granitemoehybrid": {"shared_intermediate_size": 64},
        "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "qk_nope_head_dim": 32},
        # (transformers writes the share that turns into the table that it is given.)
        "mistral4": {"n_routed_experts": 4, "first_k_dense_replace": 1, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    }.get(name, {})
    values |= {} if name == "gpt_oss" else {"moe_intermediate_size": 32}
    if name.startswith("qwen3_"):
        values |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 32}
    monkeypatch.setitem(CASES, name, (*CASES[name][:2], values))
    model = hasten.load(make_reference(name)).half().float()
    write_gguf(model, tmp_path / "plain.gguf", "F16")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], len(model.config.layers))
    known = {value[1] for value in names.mapping.values()}
    file = read_gguf(tmp_path / "plain.gguf")
    assert {name if name in known else name.rpartition(".")[0] for name in file.tensors} <= known
    if name == "phi3":
        assert file.metadata["phi3.rope.dimension_count"] == 8
    else:
        assert file.tensors["blk.1.ffn_down_exps.weight"].shape[0] == 4
        assert file.tensors["blk.1.ffn_gate_inp.weight"].type.name == "F32"
    kind = gguf.GGMLQuantizationType[kind]
    path = retyped(tmp_path / "packed.gguf", tmp_path / "plain.gguf", matrices(kind))
    read = hasten.load(path, dtype="float32")
    found = weights(read)
    for name, expected in weights(model).items():
        if expected.dim() == 2 and len(expected) > 1 and name in found and not name.endswith("kv_up.weight"):
            stored = quants.dequantize(quants.quantize(expected.detach().numpy(), kind), kind)
            SAME(found[name], torch.from_numpy(stored))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "phi3", "qwen3_moe"])
def test_transformers_reads_the_same_tensors_from_our_file(name, tmp_path, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as theirs

    if name == "qwen3_moe":
        monkeypatch.setitem(CASES, name, (*CASES[name][:2], CASES[name][2] | {"mlp_only_layers": []}))
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


def matrices(kind):
    """For `retyped`: all matrices in one type."""

    def change(name, x):
        part = name.split(".")[-2]
        whole = x.ndim > 1 and name.endswith("weight") and "conv" not in part and "norm" not in part
        return (kind, quants.quantize(x, kind)) if whole else None

    return change


@pytest.mark.parametrize("kind", ["Q8_0", "NVFP4"])
def test_columns_whose_order_parts_blocks_become_plain(kind, tmp_path, monkeypatch):
    """Heads of 16 values, which llama.cpp has in another order than we, are parts of a block."""
    model, path = stated("qwen3_5_text", monkeypatch).half().float(), tmp_path / "model.gguf"
    write_gguf(model, tmp_path / "plain.gguf", "F16")
    number, stored = gguf.GGMLQuantizationType[kind], read_gguf(tmp_path / "plain.gguf")
    file = stored.raw("blk.0.ssm_out.weight").view(torch.float16).float()  # in llama.cpp's order
    raw = np.random.default_rng(0).integers(0, 100, (64, 256 // TYPES[kind].elements * TYPES[kind].bytes), np.uint8)
    raw = quants.quantize(file.numpy(), number) if kind == "Q8_0" else raw
    beside = {} if kind == "Q8_0" else {"blk.0.ssm_out.scale": np.array([0.5], np.float32)}
    change = lambda name, _: (number, raw) if name == "blk.0.ssm_out.weight" else None  # noqa: E731
    retyped(path, tmp_path / "plain.gguf", change, beside=beside)
    expected = torch.from_numpy(quants.dequantize(raw, number)) * (1.0 if kind == "Q8_0" else 0.5)
    ours = expected.unflatten(1, (4, 4, 16)).transpose(1, 2).flatten(1)  # heads: of each key in turn -> each key's own
    SAME(hasten.load(path, dtype="float32").blocks[0].mixer.out.weight.data, ours)
    if kind == "Q8_0":
        assert (ours - model.blocks[0].mixer.out.weight).abs().max() < 0.02


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"xielu.alpha_p": None}, "xielu.alpha_p must be a list of 4 numbers; found None"),
        ({"xielu.alpha_n": np.zeros(3)}, "xielu.alpha_n must be a list of 4 numbers"),
        ({"xielu.beta": ["a"] * 4}, "xielu.beta must be a list of 4 numbers"),
        ({"xielu.eps": np.full(4, -1e-3)}, "xielu.eps must be -1e-06 in all layers"),
    ],
)
def test_numbers_of_xielu_are_checked(changes, words, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(stated("apertus", monkeypatch), path)
    file = read_gguf(path)
    changed = replace(file, metadata=dict(file.metadata) | changes)
    monkeypatch.setattr("hasten.checkpoints.gguf.open.read_gguf", lambda _: changed)
    with pytest.raises(CheckpointError, match=words):
        hasten.load(path)


PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")


@pytest.mark.parametrize("name", PACKED)
def test_common_types_are_multiplied_as_they_are_stored(name, tmp_path):
    """Their layers hold the numbers of the package gguf in at most 1.05 times the bytes of the file, and are fused."""
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType[name]
    write_gguf(tiny_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1), tmp_path / "plain.gguf", "F16")
    generator = np.random.default_rng(0)

    def change(_, values):
        if values.ndim < 2:
            return None
        raw = generator.integers(0, 256, (len(values), values.shape[1] // TYPES[name].elements, TYPES[name].bytes))
        return kind, finite(name, raw.astype(np.uint8)).reshape(len(values), -1)

    retyped(path, tmp_path / "plain.gguf", change)
    model = hasten.load(path)
    down, stored = model.blocks[0].mlp.down, read_gguf(path).raw("blk.0.ffn_down.weight")
    assert isinstance(down, PackedLinear)
    SAME(down.dequantize(), torch.from_numpy(quants.dequantize(stored.numpy(), kind)))
    if library() is not None:
        assert sum(buffer.nbytes for buffer in down.buffers()) <= 1.05 * stored.nbytes
        assert refusal(model) is None
    expected = quants.dequantize(read_gguf(path).raw("blk.0.attn_q.weight").numpy(), kind)
    order = torch.arange(256).view(4, 2, 32).transpose(1, 2).flatten()  # llama.cpp's order of the rows of a head
    SAME(model.blocks[0].attention.q.dequantize()[order], torch.from_numpy(expected))


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("name", PACKED)
def test_blocks_go_to_the_panels_of_their_numbers(name, rows):
    if library() is None:
        pytest.skip("panels are for the native kernels")
    kind, columns = TYPES[name], 768
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // kind.elements, kind.bytes), dtype=np.uint8)
    raw = torch.from_numpy(finite(name, raw)).flatten(1)
    checked = []
    blocks = GgufBlocks(name, kind.format, columns, raw, kind.weight, lambda *scales: checked.extend(scales))
    found, expected = pack_blocks(blocks), PANELS.pack(kind.weight(raw))
    for own, same in zip(found, expected, strict=True):
        assert (own is None) == (same is None)
        if own is not None:
            assert own.dtype == same.dtype
            assert torch.equal(own.view(torch.uint8), same.view(torch.uint8))  # bits: of zeros the sign, too
    assert [part is None for part in checked] == [part is None for part in found[1:]]


def finite(name, blocks):
    """Random blocks whose float16 scales are small numbers, and no exponent is at an end."""
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    for at in halves.get(name, (0, 2) if name in ("Q4_1", "Q5_1") else (0,)):
        blocks[..., at + 1] = 0x20 + blocks[..., at + 1] % 8
    if name == "MXFP4":
        blocks[..., 0] = 100 + blocks[..., 0] % 20
    return blocks


@pytest.mark.gpu
@needs_gpu
def test_a_file_of_several_types_generates_on_a_gpu(tmp_path):
    """A Q4_K_M file mixes Q4_K and Q6_K in the projections that a fused block would join: one warning says so."""
    write_gguf(tiny_llama(hidden_size=256, intermediate_size=256), tmp_path / "plain.gguf", "F16")
    retyped(tmp_path / "model.gguf", tmp_path / "plain.gguf", mixed)
    model, prompt = hasten.load(tmp_path / "model.gguf", device="cuda"), list(range(7, 31))
    params = hasten.SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    with pytest.warns(HastenWarning, match="its q, k and v are one product, and those of block 0 differ"):
        found = hasten.generate(model, prompt, params)[0].tokens
    assert len(found) == len(hasten.LLM(model).generate([prompt], params)[0].tokens) == 8
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        there = model(PROMPT.cuda(), torch.arange(PROMPT.shape[1]).cuda()[None], context)[0]
    assert there.isfinite().all()


def mixed(name, values):
    """For `retyped`: random K-quants, as in a Q4_K_M file, each with small scales."""
    if values.ndim < 2:
        return None
    kind = "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "output.weight")) else "Q4_K"
    size = (len(values), values.shape[1] // TYPES[kind].elements, TYPES[kind].bytes)
    raw = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return gguf.GGMLQuantizationType[kind], finite(kind, raw).reshape(len(values), -1)


@pytest.mark.filterwarnings("ignore:no kernel takes")
@pytest.mark.parametrize("scale", [None, 0.5])
def test_an_nvfp4_tensor_is_multiplied_by_its_scale(scale, tmp_path, tiny):
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.NVFP4
    write_gguf(tiny, tmp_path / "plain.gguf", "F16")
    raw = np.random.default_rng(0).integers(0, 120, (64, 72), dtype=np.uint8)  # of 128 inputs
    beside = {} if scale is None else {"blk.0.ffn_down.scale": np.array([scale], np.float32)}
    change = lambda name, _: (kind, raw) if name == "blk.0.ffn_down.weight" else None  # noqa: E731
    retyped(path, tmp_path / "plain.gguf", change, beside=beside)
    expected = torch.from_numpy(quants.dequantize(raw, kind)) * (scale or 1.0)
    SAME(hasten.load(path, dtype="float32").blocks[0].mlp.down.weight.data, expected)


def test_types_of_tables_say_which_package_has_them(tmp_path, tiny, monkeypatch):
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.IQ3_S
    model = tiny_llama(hidden_size=256, intermediate_size=256)
    write_gguf(model, tmp_path / "plain.gguf", "F16")
    raw = np.random.default_rng(0).integers(0, 99, (256, 110), dtype=np.uint8)
    retyped(path, tmp_path / "plain.gguf", lambda name, _: (kind, raw) if name == "blk.0.ffn_down.weight" else None)
    down = hasten.load(path).blocks[0].mlp.down
    SAME(down.dequantize(), torch.from_numpy(quants.dequantize(raw, kind)))
    table.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ResourceError, match=r"type IQ3_S .*: pip install 'hasten\[gguf\]'"):
        hasten.load(path)


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


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_int4_layers_of_gated_deltanet_come_back_bit_for_bit(name, tmp_path, monkeypatch):
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64}
    sizes |= {"moe_intermediate_size": 32} if name == "qwen3_next" else {}
    model = hasten.quantize(stated(name, monkeypatch, **sizes), hasten.Int4(group_size=32, lm_head="same"))
    assert "blocks.0.mixer.out" in model.quantization
    expected = weights(model)
    write_gguf(model, tmp_path / "model.gguf", "F16")
    found = weights(hasten.load(tmp_path / "model.gguf", dtype="float32"))
    for layer in model.quantization:
        SAME(found[f"{layer}.weight"], expected[f"{layer}.weight"])
    narrow = hasten.quantize(stated(name, monkeypatch, linear_value_head_dim=16), hasten.Int4(group_size=32))
    if name == "qwen3_5_text":
        with pytest.raises(ConfigError, match=r"blocks.0.mixer.out.weight: llama.cpp has its columns in another order"):
            write_gguf(narrow, tmp_path / "narrow.gguf")


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


# What llama.cpp refuses to load, or ends at: found by having it load such files.
NOT_LOADED = [
    ("exaone4", {"head_dim": 32}, "heads of 128 elements in all, with a hidden size of 64"),
    ("olmoe", {"num_key_value_heads": 2}, "2 key heads for 4 heads"),
    ("dots1", {"num_key_value_heads": 2}, "2 key heads for 4 heads"),
    ("olmo2", {"tie_word_embeddings": True}, "a head that is the embedding"),
    ("cohere2", {"tie_word_embeddings": False}, "a head of its own"),
    ("cohere2", {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 4}, "a window in no layer"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 4}, "a window in no layer"),
    ("qwen3", {"attention_bias": True}, "biases of the attention's output"),
    ("arcee", {"mlp_bias": True}, "biases of the MLPs"),
    ("qwen3_5_text", {"linear_value_head_dim": 12}, "heads of 16 elements of a key and 12 of a value"),
    ("granitemoehybrid", {"mamba_conv_bias": False}, "no bias of Mamba-2's convolution"),
    ("granitemoehybrid", {"mamba_expand": 1, "mamba_d_head": 8}, "64 features of Mamba-2, with a hidden size of 64"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 4}, "no rotary positions"),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "groups of experts of which the best one counts",
    ),
    ("deepseek_v3", {"rope_parameters": YARN}, "rotary positions that are stretched otherwise than by yarn"),
]


def test_what_gguf_does_not_hold_is_refused_and_nothing_is_left(tmp_path, tiny, monkeypatch):
    path = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match="kind is 'Q4_K'; use one of BF16"):
        write_gguf(tiny, path, "Q4_K")
    with pytest.raises(ConfigError, match=r"cannot state layers of this mistral"):
        write_gguf(hasten.load(make_reference("mistral")), path)
    with pytest.raises(ConfigError, match=r"cannot state mixer of this lfm2"):  # whose convolution has a bias
        write_gguf(stated("lfm2-biases", monkeypatch, full_attn_idxs=[0, 3]), path)
    for name in ("granitemoehybrid-dense", "deepseek_v3", "deepseek_v3-plain", "glm4_moe_lite"):
        with pytest.raises(ConfigError, match=r"cannot state (mixer|ropes|rope_pairs|layers|.*qkv_bias)"):
            write_gguf(hasten.load(make_reference(name)), path)
    with pytest.raises(ConfigError, match=r"cannot state layers of this gemma2"):
        write_gguf(hasten.load(make_reference("gemma2")), path)
    for name in ("starcoder2", "smollm3", "exaone4", "dots1", "qwen2_moe", "ernie4_5_moe", "ernie4_5-biases"):
        with pytest.raises(ConfigError, match=r"a GGUF file cannot state .* of this"):
            write_gguf(hasten.load(make_reference(name)), path)
    for name, changes, why in NOT_LOADED:
        with pytest.raises(ConfigError, match=rf"llama.cpp loads no \S+ with {why}"):
            write_gguf(stated(name, monkeypatch, **changes), path)
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


def test_only_the_rotated_rows_of_a_head_are_reordered(tmp_path, monkeypatch):
    model = tiny_llama(partial_rotary_factor=0.5)  # 8 of 16 elements
    with pytest.raises(ConfigError, match=r"llama.cpp loads no llama with rotary positions of a part of each head"):
        write_gguf(model, tmp_path / "model.gguf", "F16")
    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], partial=True))  # as another program
    write_gguf(model, tmp_path / "model.gguf", "F16")
    file = read_gguf(tmp_path / "model.gguf")
    assert file.metadata["llama.rope.dimension_count"] == 8
    stored = file.raw("blk.0.attn_k.weight").view(torch.float16).view(2, 16, 64)
    rows = [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]
    SAME(stored, model.blocks[0].attention.k.weight.data.half().view(2, 16, 64)[:, rows])
    read = hasten.load(tmp_path / "model.gguf", dtype="float32")
    assert read.config.ropes == model.config.ropes
    SAME(read.blocks[0].attention.k.weight.data, model.blocks[0].attention.k.weight.data.half().float())


def test_a_folder_with_one_gguf_file_is_a_model_and_with_two_says_so(tmp_path, tiny):
    write_gguf(tiny, tmp_path / "a.gguf")
    assert hasten.load(tmp_path).generation["eos_token_id"] == list(tiny.tokenizer.eos_ids)
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: name one of them"):
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


def test_recommended_sampling_is_read_and_written(tmp_path):
    model = tiny_llama()
    model.generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    write_gguf(model, tmp_path / "plain.gguf")
    assert recommended(hasten.load(tmp_path / "plain.gguf").generation) == recommended(model.generation)
    entries = {"general.sampling.top_k": 0, "general.sampling.temp": 0.0, "general.sampling.mirostat": 2}
    others = ["sampling.top_p", "sampling.penalty_repeat"]
    path = retyped(tmp_path / "other.gguf", tmp_path / "plain.gguf", lambda *_: None, entries=entries, without=others)
    assert recommended(hasten.load(path).generation) == {"temperature": 0.0}
    path = retyped(path.with_name("bad.gguf"), path, lambda *_: None, entries={"general.sampling.min_p": "much"})
    with pytest.raises(CheckpointError, match=r"general\.sampling\.min_p is 'much', and no number"):
        hasten.load(path)
    for value in (float("nan"), 101.0):
        path = retyped(path, tmp_path / "plain.gguf", lambda *_: None, entries={"general.sampling.temp": value})
        with pytest.raises(CheckpointError, match=r"general\.sampling\.temp is .*, and no number up to 100"):
            hasten.load(path)
    model.generation = {"do_sample": True, "top_k": -1, "top_p": float("inf"), "min_p": True, "temperature": 10**400}
    write_gguf(model, tmp_path / "odd.gguf")
    assert recommended(hasten.load(tmp_path / "odd.gguf").generation) == {}
    model.generation = {"temperature": 0.7}
    write_gguf(model, tmp_path / "greedy.gguf")
    assert recommended(hasten.load(tmp_path / "greedy.gguf").generation) == {}
