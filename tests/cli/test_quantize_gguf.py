"""`hasten quantize --format gguf`: the integers of the folder, in a file; nothing is lost where that fails."""

import json
import re
import shlex

import pytest
import torch

import hasten
from hasten.checkpoints.gguf.header import read_gguf
from hasten.cli.main import main
from hasten.ops.linear import PackedLinear
from tiny_model import tiny_llama

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:1 int8 layers become Q8_0")  # the head
INT4 = ["--scheme", "int4", "--activations", "float"]


def quantize(folder, output, *options, format="gguf"):
    main(["quantize", str(folder), "--output", str(output), *options, "--format", format])


def refused(capfd, *words, **of):
    with pytest.raises(SystemExit):
        quantize(*of.pop("call"), **of)
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert all(str(word) in err for word in words), err


@pytest.mark.parametrize("method", [["rtn"], ["gptq", "--samples", "4", "--length", "32"]], ids=lambda words: words[0])
def test_a_file_has_the_integers_of_the_folder(method, tiny_folder, tmp_path, capfd):
    file, folder, text = tmp_path / "tiny.gguf", tmp_path / "folder", tmp_path / "text.txt"
    quantize(tiny_folder, file, *INT4, "--method", *method, "--json", "-")
    told = json.loads(capfd.readouterr().out)
    assert told["bytes"] == file.stat().st_size
    weights = sum(torch.Size(one.shape).numel() for one in read_gguf(file).tensors.values())
    assert told["bits_per_weight"] == 8 * sum(one.bytes for one in read_gguf(file).tensors.values()) / weights
    assert list(tmp_path.iterdir()) == [file]
    quantize(tiny_folder, folder, *INT4, "--group-size", "32", "--method", *method, format="compressed-tensors")
    ours, read = hasten.load(folder), hasten.load(file)
    for name, layer in ours.named_modules():
        if isinstance(layer, PackedLinear) and layer.format.element == "int4":
            assert torch.equal(read.get_submodule(name).to_weight().dequantize(), layer.to_weight().dequantize())
    text.write_text("def add(a, b):\n    return a + b\n" * 5)
    capfd.readouterr()
    main(["eval", str(file), "--against", str(folder), "--text", str(text), "--context", "32", "--json", "-"])
    assert json.loads(capfd.readouterr().out)["kl_mean"] < 1e-3  # the head's scales are rounded


def test_what_would_fail_is_refused_before_any_work(tiny_folder, tmp_path, capfd):
    file = tmp_path / "tiny.gguf"
    refused(capfd, "zero points", call=(tiny_folder, file, *INT4, "--asymmetric"))
    refused(capfd, "no type of GGUF", call=(tiny_folder, file, "--scheme", "int3"))
    refused(capfd, tmp_path / "tiny", "ends in .gguf", call=(tiny_folder, tmp_path / "tiny", *INT4))
    refused(capfd, file, "--format gguf", call=(tiny_folder, file, *INT4), format="compressed-tensors")
    refused(capfd, "--json", call=(tiny_folder, file, *INT4, "--json", str(file)))
    assert not list(tmp_path.iterdir())
    (tmp_path / "tiny.gguf.folder").mkdir()
    refused(capfd, "tiny.gguf.folder", "hasten export", call=(tiny_folder, file, *INT4, "--overwrite"))
    assert (tmp_path / "tiny.gguf.folder").exists()
    (tmp_path / "tiny.gguf.folder").rmdir()
    file.mkdir()
    refused(capfd, file, call=(tiny_folder, file, *INT4, "--overwrite"))


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model; transformers does not")
@pytest.mark.parametrize(("scheme", "stored"), [("int4", "Q4_0"), ("int8", "Q8_0")])
def test_rows_that_no_block_divides_get_advice_that_works(scheme, stored, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hasten.save(tiny_llama(intermediate_size=144), "odd")
    quantize("odd", "packed", "--scheme", scheme, format="compressed-tensors")
    capfd.readouterr()
    exported = f"odd-{stored}.gguf", f"packed-plain-{stored}.gguf"
    calls = (
        ["quantize", "odd", "--output", "odd.gguf", "--format", "gguf", "--scheme", scheme],
        ["export", "packed", "packed.gguf"],
    )
    for call, file in zip(calls, exported, strict=True):
        with pytest.raises(SystemExit):
            main(call)
        said = capfd.readouterr().err
        found = re.search(
            r"down.weight has rows of 144 weights, .*: take (hasten .*), which writes such rows in float16", said
        )
        for command in found[1].split(", then "):
            main(shlex.split(command)[1:])
        types = {tensor.name: tensor.type.name for tensor in read_gguf(tmp_path / file).tensors.values()}
        assert types["blk.0.ffn_down.weight"] == "F16"
        assert types["blk.0.ffn_up.weight"] == stored
        assert hasten.load(file).config.intermediate_size == 144


def test_a_file_is_replaced_only_if_asked_and_never_the_model(tiny_folder, tmp_path, capfd):
    model, file = tmp_path / "model.gguf", tmp_path / "tiny.gguf"
    main(["export", str(tiny_folder), str(model)])
    refused(capfd, model, "the model itself", call=(model, model, *INT4, "--overwrite"))
    file.write_bytes(b"mine")
    refused(capfd, file, "--overwrite", call=(model, file, *INT4))
    assert file.read_bytes() == b"mine"
    quantize(model, file, *INT4, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "tiny.gguf"]
    assert hasten.load(file).quantization


def test_where_the_file_cannot_be_written_the_folder_stays(tiny_folder, tmp_path, capfd, monkeypatch):
    file = tmp_path / "tiny.gguf"

    def full(*_, **__):
        raise OSError(28, "No space left")

    monkeypatch.setattr("hasten.checkpoints.gguf.write._blocks", full)
    refused(capfd, "No space left", "hasten export", call=(tiny_folder, file, *INT4))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf.folder"]
    main(["export", f"{file}.folder", str(file)])
    assert hasten.load(file).quantization
