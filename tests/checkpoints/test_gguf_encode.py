"""What a GGUF file holds in blocks is written again in the same blocks, bit for bit."""

import re

import numpy as np
import pytest
import torch

import hasten
from gguf_files import retyped
from hasten.checkpoints.gguf.encode import ENCODERS, encode
from hasten.checkpoints.gguf.header import read_gguf
from hasten.checkpoints.gguf.types import TYPES
from hasten.checkpoints.gguf.write import write_gguf
from hasten.checkpoints.load import load_as_stored
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenWarning
from hasten.ops.linear.blocks import NUMBERS
from tiny_model import tiny_llama

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
quants = pytest.importorskip("gguf.quants")


def blocks(name, rows, columns, seed=0):
    """Random rows of a type, uint8 (rows, bytes of a row); all their scales are finite."""
    kind = TYPES[name]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // kind.elements, kind.bytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    for at in halves.get(name, (0, 2) if name in ("Q4_1", "Q5_1") else (0,)):
        raw[..., at + 1] = 0x20 + raw[..., at + 1] % 8
    if name == "MXFP4":
        raw[..., 0] = 100 + raw[..., 0] % 20
        for shift in (0, 4):  # of the two zeros the positive one
            negative = (raw[..., 1:] >> shift & 15) == 8
            raw[..., 1:][negative] &= 0xF0 if shift == 0 else 0x0F
    return raw.reshape(rows, -1)


def test_every_type_that_is_packed_as_it_is_stored_is_written():
    assert set(ENCODERS) == set(NUMBERS)


@pytest.mark.parametrize("name", ENCODERS)
def test_numbers_go_back_to_the_blocks_that_they_came_from(name):
    raw = torch.from_numpy(blocks(name, 7, 768))
    assert torch.equal(encode(name, TYPES[name].weight(raw)), raw)


def test_of_two_zeros_the_positive_one_is_written():
    raw = torch.from_numpy(blocks("MXFP4", 1, 32))
    raw[0, 1:] = 0x88
    again = encode("MXFP4", TYPES["MXFP4"].weight(raw))
    assert not again[0, 1:].any()
    assert torch.equal(TYPES["MXFP4"].weight(again).dequantize(), TYPES["MXFP4"].weight(raw).dequantize())


def same_tensors(first, second):
    """Assert that two files hold the same tensors: names, types, shapes, bytes."""
    first, second = read_gguf(first), read_gguf(second)
    assert {name: (one.type.name, one.shape) for name, one in first.tensors.items()} == {
        name: (one.type.name, one.shape) for name, one in second.tensors.items()
    }
    assert [name for name in first.tensors if not torch.equal(first.raw(name), second.raw(name))] == []


@pytest.fixture
def mixed(tmp_path):
    """A file of all types that are packed, a matrix in F16, one in BF16, and norms that no 16 bits hold."""
    model = tiny_llama(hidden_size=256, intermediate_size=256, num_attention_heads=4, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += torch.linspace(0, 1e-3, len(parameter))
    write_gguf(model, tmp_path / "plain.gguf", "F16")
    names = iter([*ENCODERS, *ENCODERS])

    def change(name, values):
        if values.ndim < 2:
            return None
        if name == "token_embd.weight":
            return gguf.GGMLQuantizationType.F16, values.astype(np.float16)
        if name == "blk.1.attn_k.weight":
            return gguf.GGMLQuantizationType.BF16, quants.quantize(values, gguf.GGMLQuantizationType.BF16)
        kind = next(names)
        return gguf.GGMLQuantizationType[kind], blocks(kind, *values.shape)

    path = retyped(tmp_path / "mixed.gguf", tmp_path / "plain.gguf", change)
    assert set(ENCODERS) <= {tensor.type.name for tensor in read_gguf(path).tensors.values()}
    return path


def test_a_file_is_exported_again_with_every_tensor_as_it_is(mixed, tmp_path, capfd):
    main(["export", str(mixed), str(tmp_path / "again.gguf")])
    assert "warning" not in capfd.readouterr().err
    same_tensors(mixed, tmp_path / "again.gguf")


def test_a_model_that_was_fused_writes_the_same_blocks(mixed, tmp_path):
    model = hasten.load(mixed)
    hasten.generate(model, [1, 2, 3], max_new_tokens=1)
    write_gguf(model, tmp_path / "again.gguf")
    first, second = read_gguf(mixed), read_gguf(tmp_path / "again.gguf")
    for name, tensor in first.tensors.items():
        if tensor.type.name in ENCODERS:
            assert torch.equal(first.raw(name), second.raw(name)), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_matrix_is_written_as_it_is(tied, tmp_path):
    model = tiny_llama(hidden_size=256, intermediate_size=256, tie_word_embeddings=tied)
    write_gguf(model, tmp_path / "plain.gguf", "F16")
    kind = gguf.GGMLQuantizationType.Q6_K
    change = lambda _, values: (kind, blocks("Q6_K", *values.shape)) if values.ndim > 1 else None  # noqa: E731
    path = retyped(tmp_path / "q6_k.gguf", tmp_path / "plain.gguf", change)
    assert write_gguf(load_as_stored(path), tmp_path / "again.gguf") == "Q6_K"
    same_tensors(path, tmp_path / "again.gguf")


def test_a_type_for_a_file_without_plain_matrices_is_refused_and_the_advice_works(tmp_path, capfd, monkeypatch):
    write_gguf(tiny_llama(), tmp_path / "q8.gguf", "Q8_0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["export", "q8.gguf", "out.gguf", "--gguf", "F16"])
    err = capfd.readouterr().err
    assert "--gguf F16 has no effect: all matrices of q8.gguf are quantized" in err
    assert not (tmp_path / "out.gguf").exists()
    first, second = re.search(r"take (hasten export .*), then (hasten export .*)\n", err).groups()
    for line in (first, second):
        main(line.split()[1:])
    assert read_gguf(tmp_path / "out.gguf").tensors["blk.0.attn_v.weight"].type.name == "F16"


def test_a_type_that_is_read_and_not_written_is_written_plain_with_a_warning(tmp_path, tiny):
    write_gguf(tiny, tmp_path / "plain.gguf", "F16")
    kind, raw = gguf.GGMLQuantizationType.NVFP4, np.full((128, 36), 0x33, np.uint8)
    change = lambda name, _: (kind, raw) if name == "blk.0.ffn_up.weight" else None  # noqa: E731
    path = retyped(tmp_path / "nvfp4.gguf", tmp_path / "plain.gguf", change)
    with pytest.warns(HastenWarning, match=r"1 matrices .* such as blocks.0.mlp.up.weight \(NVFP4, now BF16\)"):
        write_gguf(load_as_stored(path), tmp_path / "again.gguf")
    assert read_gguf(tmp_path / "again.gguf").tensors["blk.0.ffn_up.weight"].type.name == "BF16"


def test_scales_that_float16_does_not_hold_are_refused_with_advice_that_works(tmp_path, monkeypatch):
    """The IQ types' scales are products of two numbers: their int8 form has no type of GGUF."""
    write_gguf(tiny_llama(hidden_size=256, intermediate_size=256), tmp_path / "plain.gguf", "F16")
    kind = gguf.GGMLQuantizationType.IQ3_S
    raw = np.random.default_rng(0).integers(0, 99, (256, 110), dtype=np.uint8)
    change = lambda name, _: (kind, raw) if name == "blk.0.ffn_down.weight" else None  # noqa: E731
    retyped(tmp_path / "iq3.gguf", tmp_path / "plain.gguf", change)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has scales that float16 does not hold") as refusal:
        write_gguf(load_as_stored("iq3.gguf"), "out.gguf")
    main(re.search(r"\((hasten export .*)\), then those", str(refusal.value))[1].split()[1:])
    main(["export", "iq3-plain", "out.gguf"])
    assert read_gguf(tmp_path / "out.gguf").tensors["blk.0.ffn_down.weight"].type.name == "BF16"
