"""`hasten convert` and the GPTQ layout as it is written: every number as it was, or a refusal."""

import json

import pytest
import torch
from safetensors.torch import load_file

import hasten
from column_folders import packed_across, packed_down, write
from full_disk import full_disk
from hasten.checkpoints.convert import convert
from hasten.checkpoints.export import export_model
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from hasten.errors import CheckpointError, ConfigError
from hasten.model.layer_format import LayerFormat
from hasten.ops.linear.embedding import PackedEmbedding
from hasten.quantization import GPTQ, Int4, Mixed, quantize, quantize_to_folder
from hasten.quantization.schemes import layers_to_quantize
from linear_cases import random_weight
from quantized_folders import Q, change_tensors, logits, refused
from references import make_reference
from tiny_model import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::hasten.HastenWarning")

CASES = {
    "gptq symmetric": {"method": "gptq", "symmetric": True},
    "gptq v2 row": {"method": "gptq", "version": "gptq_v2", "group": -1},
    "gptq g16": {"method": "gptq", "group": 16},
    "gptq int8 groups": {"method": "gptq", "bits": 8},
    "gptq 3 bits": {"method": "gptq", "bits": 3},
    "activation order": {"method": "gptq", "act_order": True},
    "awq": {"method": "awq", "group": 64},
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_every_number_is_as_it_was(case, plain_folder, tmp_path):
    folder, weights = write(plain_folder, tmp_path / "out", **CASES[case])
    convert(folder, tmp_path / "compressed")
    convert(tmp_path / "compressed", tmp_path / "gptq", format="gptq")
    expected = logits(hasten.load(folder, dtype="stored"))
    assert torch.equal(logits(hasten.load(tmp_path / "compressed", dtype="stored")), expected)
    assert torch.equal(logits(hasten.load(tmp_path / "gptq", dtype="stored")), expected)
    again = load_file(tmp_path / "gptq" / "model.safetensors")
    if CASES[case].get("symmetric") or "v2" in case:  # the convention for zero points is the same then
        assert all(torch.equal(again[name], tensor) for name, tensor in load_file(folder / "model.safetensors").items())
    assert not {name for name in again if name in weights}


def test_a_lost_order_is_refused_where_columns_of_others_stand_in_their_own(plain_folder, tmp_path):
    folder, _ = write(plain_folder, tmp_path / "out", method="gptq", act_order=True)
    plain = "model.layers.1.mlp.up_proj.g_idx"
    change_tensors(folder, lambda t: t.update({plain: torch.arange(len(t[plain])).int() // 32}))
    convert(folder, tmp_path / "compressed")
    assert torch.equal(
        logits(hasten.load(tmp_path / "compressed", dtype="stored")), logits(hasten.load(folder, dtype="stored"))
    )
    change_tensors(tmp_path / "compressed", lambda t: t.pop(f"{Q}.weight_g_idx"))
    refused(tmp_path / "compressed", f"{Q}.weight_packed", "lacks", "weight_g_idx")


def test_a_full_disk_leaves_nothing(int4_folder, tmp_path):
    with full_disk(20_000), pytest.raises(CheckpointError, match="cannot be written: File too large"):
        convert(int4_folder, tmp_path / "out", format="gptq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_is_written_by_the_published_definition(symmetric, tmp_path):
    scheme = Int4(group_size=32, symmetric=symmetric, lm_head="none")
    model = quantize(hasten.load(make_reference("llama-biases")), scheme)
    export_model(model, tmp_path, format="gptq")
    stored, weight = load_file(tmp_path / "model.safetensors"), model.blocks[0].mlp.down.to_weight()
    own = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if ".0.mlp.down_proj." in name}
    zeros = torch.full(weight.scales.shape, 8) if symmetric else weight.zeros
    assert torch.equal(own.pop("qweight"), packed_down(weight.values.t(), 4))
    assert torch.equal(own.pop("qzeros"), packed_across(zeros.t().int() - int(symmetric), 4))
    assert torch.equal(own.pop("scales"), weight.scales.t())
    assert torch.equal(own.pop("g_idx"), torch.arange(96, dtype=torch.int32) // 32)
    assert list(own) == ["bias"]
    given = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert given == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",  # whose zero points cannot be 0
        "pack_dtype": "int32",
    }
    again = hasten.load(tmp_path, dtype="stored")
    assert again.quantization == model.quantization
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["phi3", "gpt2", "mixtral"])
def test_fused_transposed_and_expert_modules_are_written(name, tmp_path):
    model = quantize(hasten.load(make_reference(name)), Int4(group_size=32, lm_head="none"))
    export_model(model, tmp_path / "gptq", format="gptq")
    assert torch.equal(logits(hasten.load(tmp_path / "gptq", dtype="stored")), logits(model))
    convert(tmp_path / "gptq", tmp_path / "back")
    hasten.save(model, tmp_path / "own")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "own/model.safetensors").read_bytes()


def unconvertible(source, target, *words, format="gptq"):
    with pytest.raises(ConfigError) as caught:
        convert(source, target, format=format)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not target.exists()


def test_what_would_not_be_exact_is_refused(int4_folder, plain_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "new"
    unconvertible(plain_folder, out, "is not quantized", "hasten quantize", "hasten export")
    unconvertible(int4_folder, out, "'awq'", "known: compressed-tensors, gptq", format="awq")

    def tiny(tensors):  # what float16 cannot hold
        tensors[f"{Q}.weight_scale"] = torch.full((64, 2), 1e-30, dtype=torch.bfloat16)

    change_tensors(int4_folder, tiny)
    unconvertible(int4_folder, out, Q, "float16", "exactly", "--format compressed-tensors")
    convert(int4_folder, out)


def test_a_head_that_fills_no_word_is_named(tmp_path):
    model = quantize(hasten.load(make_reference("llama")), Int4(group_size=32, lm_head="same"))  # 101 tokens
    with pytest.raises(ConfigError, match=r"lm_head\.weight: GPTQ packs 101×64 values of 4 bits in no"):
        export_model(model, tmp_path, format="gptq")


def test_mixed_widths_are_refused_before_any_work(tmp_path, tiny_folder, capsys):
    command = ["quantize", str(tiny_folder), "--scheme", "int4", "--format", "gptq", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main([*command, "--lm-head", "int8"])
    assert "GPTQ's layout takes integers of one width" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    main([*command, "--group-size", "32", "--json", str(tmp_path / "a.json")])
    main(["convert", str(tmp_path / "out"), str(tmp_path / "back"), "--json", "-"])
    assert '"format": "compressed-tensors"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "out"), str(tmp_path / "back")])
    assert "OUTPUT" in capsys.readouterr().err
    assert torch.equal(
        logits(hasten.load(tmp_path / "out", dtype="stored")), logits(hasten.load(tmp_path / "back", dtype="stored"))
    )


def test_columns_in_the_order_of_activation_are_no_gguf(plain_folder, tmp_path):
    folder, _ = write(plain_folder, tmp_path / "act", method="gptq", symmetric=True, act_order=True)
    with pytest.raises(ConfigError, match="columns are in the order of activation"):
        write_gguf(hasten.load(folder, dtype="stored"), tmp_path / "act.gguf")
    assert not (tmp_path / "act.gguf").exists()


@pytest.mark.parametrize(("name", "format"), [("phi3", "int3-g32"), ("phi3", "int4-g64"), ("gpt2", "int8")])
def test_parts_of_one_tensor_need_one_format_and_it_is_said_before_calibrating(name, format, tmp_path):
    model = hasten.load(make_reference(name))
    table = dict.fromkeys(layers_to_quantize(model), "int4-g32") | {"blocks.0.attention.q": format}
    with pytest.raises(ConfigError, match="are one tensor in the file"):
        quantize_to_folder(model, Mixed(table=table), tmp_path / "out", method=GPTQ())  # without samples
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lm_head", ["same", "int8"])
def test_gptq_holds_no_quantized_embedding(lm_head, tmp_path):
    scheme = Int4(group_size=32, lm_head=lm_head, scale_dtype="float16")
    with pytest.raises(ConfigError, match="--lm-head none"):
        quantize_to_folder(tiny_llama(tie_word_embeddings=True), scheme, tmp_path / "out", format="gptq")


def test_plain_tensors_keep_their_own_dtypes(plain_folder, tmp_path):
    folder, _ = write(plain_folder, tmp_path / "mixed", method="gptq", symmetric=True)
    change_tensors(folder, lambda t: t.update({k: v.half() for k, v in t.items() if k == "lm_head.weight"}))
    change_tensors(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float() + 1e-5}))
    convert(folder, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("lm_head.weight", "model.norm.weight"):
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "fp8 g32"])
def test_an_embedding_of_floats_is_written_as_the_plain_one_it_stands_for(name, tmp_path):
    model, weight = tiny_llama(vocab_size=304, hidden_size=256), random_weight(name, 304, 256)
    model.embedding = PackedEmbedding.from_weight(weight, dtype=torch.float32)
    model.quantization = {"embedding": LayerFormat(weight.format, "none")}
    export_model(model, tmp_path)
    written = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(written, weight.dequantize(written.dtype))
    assert hasten.load(tmp_path, dtype="stored").quantization is None
