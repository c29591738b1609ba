"""Quantized embeddings: one matrix with a tied head or one of its own, in memory, in files and in others' readers."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open

import hasten
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenWarning
from hasten.machine import precision
from hasten.model.fused import refusal
from hasten.ops.linear.embedding import PackedEmbedding
from hasten.quantization import GPTQ, Int4, Int8, quantize, quantize_to_folder
from hasten.quantization.rounding import round_weight
from quantized_folders import exact, logits, theirs
from references import make_reference, tiny_llama

ALIKE = Int4(group_size=32, lm_head="same", embedding="same")
SCHEMES = [Int8(embedding="int8"), Int4(group_size=32, embedding="int8"), ALIKE]
pytestmark = pytest.mark.filterwarnings("ignore::hasten.HastenWarning")


def reference(tied):
    return hasten.load(make_reference("qwen3" if tied else "llama"))


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_in_memory_and_in_a_file(scheme, tied, tmp_path):
    model = reference(tied)
    plain, exact_rows = logits(model), model.embedding.weight.detach().clone()
    quantize_to_folder(model, scheme, tmp_path / "streamed")
    assert torch.equal(logits(model), plain)  # as it was
    quantize(model, scheme)
    assert isinstance(model.embedding, PackedEmbedding)
    assert model.tied is tied is model.config.tie_embeddings
    assert ("embedding" in model.quantization) is not tied
    assert (model.device.type, model.dtype, model.compute_dtype) == ("cpu", torch.float32, torch.float32)
    name = "head" if tied else "embedding"
    assert model.quantization[name].weight.bits == (4 if scheme is ALIKE else 8)
    rounded = round_weight(exact_rows, model.quantization[name].weight)
    ids = torch.tensor([[3, 7], [100, 0]])
    assert torch.equal(model.embedding(ids), rounded.dequantize()[ids])
    assert (logits(model) - plain).std() < 0.6 * plain.std()
    hasten.save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is tied
    assert any("embed_tokens.weight_packed" in key for key in names(tmp_path / "saved"))
    assert any(key.startswith("lm_head") for key in names(tmp_path / "saved")) is not tied
    again = hasten.load(tmp_path / "saved", dtype="stored")
    assert again.quantization == model.quantization
    assert again.tied is tied
    assert torch.equal(logits(again), logits(model))
    hasten.save(again, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        first = (tmp_path / "saved" / file).read_bytes()
        assert first == (tmp_path / "streamed" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
@pytest.mark.parametrize("scheme", [Int8(lm_head="same", embedding="int8"), ALIKE], ids=str)
def test_transformers_reads_it_where_all_layers_are_alike(scheme, tied, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = quantize(reference(tied), scheme)
    with pytest.warns(HastenWarning, match="only with dequantize=True and all layers quantized alike"):
        hasten.save(model, tmp_path)
    options = transformers.CompressedTensorsConfig(dequantize=True)
    ours, found = logits(exact(hasten.load(tmp_path, dtype="stored"))), theirs(tmp_path, quantization_config=options)
    # They round the weights to the dtype of the scales, which is float16 in int4.
    assert (found - ours).abs().max() < (5e-2 if scheme is ALIKE else 1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
def test_calibrated(tied, tmp_path):
    """An embedding of its own is rounded to nearest; a tied one is the head, quantized for the head's inputs."""
    tokens = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(0))
    model = reference(tied)
    exact_rows, reports = model.embedding.weight.detach().clone(), []
    options = {"method": GPTQ(), "calibration": tokens}
    quantize_to_folder(model, ALIKE, tmp_path / "streamed", **options)
    hasten.save(quantize(model, ALIKE, report=reports.append, **options), tmp_path / "saved")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "streamed" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()
    nearest = round_weight(exact_rows, model.quantization["head"].weight)
    assert torch.equal(model.embedding.to_weight().values, nearest.values) is not tied
    assert [report.name for report in reports] == list(model.quantization)


def test_fused_and_served_it_says_the_same():
    model = tiny_llama(tie_word_embeddings=True).to(torch.bfloat16)
    if refusal(model) is not None:
        pytest.skip("the native kernels cannot be built here")
    quantize(model, ALIKE)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=4)
    table = model.head.to_weight()
    hasten.fuse(model)
    assert model.tied
    tokens = hasten.generate(model, [[5, 6, 7]], temperature=0, max_new_tokens=4)[0].tokens
    assert hasten.LLM(model).generate([[5, 6, 7]], params)[0].tokens == tokens
    hasten.unfuse(model)
    assert model.tied
    assert torch.equal(model.head.to_weight().values, table.values)


def test_where_16_bit_products_are_emulated_rows_come_out_in_float32(monkeypatch):
    monkeypatch.setattr(precision, "_flags", lambda: ("avx2", "fma"))
    model = tiny_llama().to(torch.bfloat16)
    model.bind()
    quantize(model, Int8(embedding="int8"))
    assert (model.dtype, model.compute_dtype) == (torch.bfloat16, torch.float32)
    assert model.embedding(torch.tensor([3])).dtype == torch.float32
    wide = logits(model)
    model.float().bind()
    assert (logits(model) - wide).abs().max() < 0.1 * wide.std()


def test_a_tied_head_decides():
    with pytest.raises(ConfigError, match="one matrix, so embedding='same' and lm_head='int8' contradict"):
        quantize(reference(tied=True), Int4(group_size=32, embedding="same"))
    assert quantize(reference(tied=True), Int4(group_size=32, lm_head="none")).embedding.weight.dtype == torch.float32


def test_the_command(tiny_folder, tmp_path, capsys):
    for embedding, extra in (("none", 16), ("int8", 0)):
        out = tmp_path / embedding
        main(
            [
                "quantize",
                str(tiny_folder),
                "--scheme",
                "int8",
                "--embedding",
                embedding,
                "--output",
                str(out),
                "--json",
                "-",
            ]
        )
        found = json.loads(capsys.readouterr().out)
        assert (found["bits_per_weight"] < 9) is (extra == 0)
        assert ("embedding" in {layer["name"] for layer in found["layers"]}) is (extra == 0)
    main(["generate", str(out), "--prompt", "def", "--max-new-tokens", "3"])
