"""What a command makes of a quantized GGUF file: plain weights, an adapter beside its layers, or a helpful error."""

import json
import re

import numpy as np
import pytest
import torch

import hasten
from gguf_files import retyped
from hasten.checkpoints import hub, published
from hasten.checkpoints.adapter_files import load_adapter
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenWarning
from hasten.ops.linear import PackedLinear

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
quants = pytest.importorskip("gguf.quants")
PLAIN = "--techniques.no-compile"  # which test_lora.py compiles over packed layers


@pytest.fixture
def file(tiny, tmp_path):
    """Of one Q4_0 layer, and others in float16, as in a file of which some types have no kernel."""
    path, kind = tmp_path / "tiny-Q4_0.gguf", gguf.GGMLQuantizationType.Q4_0
    write_gguf(tiny, tmp_path / "plain.gguf", "F16")

    def change(name, values):
        return (kind, quants.quantize(values, kind)) if name == "blk.0.ffn_down.weight" else None

    return retyped(path, tmp_path / "plain.gguf", change)


def error_of(capfd, *words):
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err


def test_plain_weights_of_a_file_are_a_folder_that_others_read(file, tmp_path):
    transformers = pytest.importorskip("transformers")
    main(["export", str(file), str(tmp_path / "plain"), "--dequantize", "--dtype", "float32", "--json", "-"])
    read, plain = hasten.load(file, dtype="float32"), hasten.load(tmp_path / "plain", dtype="float32")
    assert plain.quantization is None
    down = read.blocks[0].mlp.down
    assert isinstance(down, PackedLinear)
    assert torch.equal(plain.blocks[0].mlp.down.weight, down.dequantize())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert torch.equal(theirs["model.layers.0.mlp.down_proj.weight"], down.dequantize())
    hasten.save(read, tmp_path / "saved", dequantize=True)
    assert hasten.load(tmp_path / "saved").quantization is None


def test_a_dtype_that_a_file_cannot_hold_is_refused(tiny_folder, tmp_path, capfd):
    words = ["quantize", tiny_folder, "--scheme", "int8", "--format", "gguf", "--dtype", "float32"]
    err = error_of(capfd, *words, "--output", tmp_path / "out.gguf")
    assert "--dtype float32 is not possible in" in err
    assert "or write a folder" in err
    assert "--dtype float32 is not possible in" in error_of(
        capfd, "merge", tiny_folder, tmp_path, tmp_path / "out.gguf", "--dtype", "float32"
    )
    assert not list(tmp_path.glob("out.gguf*"))


def test_a_quantized_model_says_how_it_is_quantized_again(file, tmp_path, capfd, monkeypatch):
    words = f"hasten export {file} {tmp_path / 'x.gguf'} --dequantize".split()[1:]
    assert f"then hasten export tiny-Q4_0-plain {tmp_path / 'x.gguf'}" in error_of(capfd, *words)
    err = error_of(capfd, "quantize", file, "--scheme", "int8", "--output", tmp_path / "out")
    assert "1 layers of this model are quantized already, such as blocks.0.mlp.down" in err
    advice = f"hasten export {file} tiny-Q4_0-plain --dequantize"
    assert advice in err
    monkeypatch.chdir(tmp_path)
    main(advice.split()[1:])
    main(["quantize", "tiny-Q4_0-plain", "--scheme", "int8", "--output", str(tmp_path / "out")])
    assert len(hasten.load(tmp_path / "out").quantization) == 15


def test_a_short_name_is_planned_as_its_file_is(file, monkeypatch, capfd):
    monkeypatch.setitem(published.PUBLISHED, "tiny-file", None)
    monkeypatch.setattr(hub, "published_file", lambda name: file)
    main(["plan", "tiny-file", "--device", "epyc"])
    main(["plan", str(file), "--device", "epyc"])
    short, whole = capfd.readouterr().out.split("tiny-file,")[1].split(f"{file.name},")
    assert short == whole


@pytest.mark.parametrize("embedding", ["Q8_0", "Q4_1"])
def test_a_folder_of_a_file_is_read_by_others_whatever_types_it_has(embedding, tiny, tmp_path):
    """Of an int8 embedding, it holds that alone; beside a type that no folder holds, all is plain."""
    transformers = pytest.importorskip("transformers")
    kind = gguf.GGMLQuantizationType[embedding]
    write_gguf(tiny, tmp_path / "plain.gguf", "F16")

    def change(name, values):
        return (kind, quants.quantize(values, kind)) if name in ("token_embd.weight", "output.weight") else None

    file = retyped(tmp_path / "x.gguf", tmp_path / "plain.gguf", change)
    text = "2 layers like head .* all are written as plain" if embedding == "Q4_1" else "dequantize=True.*--dequantize"
    with pytest.warns(HastenWarning, match=text):
        hasten.save(hasten.load(file), tmp_path / "folder")
    again = hasten.load(tmp_path / "folder")
    assert (again.quantization is None) == (embedding == "Q4_1")
    if embedding == "Q4_1":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").state_dict()
        assert torch.equal(theirs["lm_head.weight"], again.head.weight)


def test_layers_that_are_plain_are_quantized_after_loading(file):
    model = hasten.load(file)
    with pytest.warns(HastenWarning, match="1 layers are quantized already, and stay as they are"):
        hasten.quantize(model, hasten.Int8())
    assert model.blocks[0].mlp.down.format.element == "int4"
    assert model.blocks[1].mlp.down.format.element == "int8"
    assert len(model.quantization) == 15
    with pytest.raises(ConfigError, match="15 layers of this model are quantized already"):
        hasten.quantize(model, hasten.Int8())


def test_explain_names_the_kernel_of_each_format(file, tmp_path, capsys):
    kind = gguf.GGMLQuantizationType.Q4_1
    retyped(
        tmp_path / "two.gguf",
        tmp_path / "plain.gguf",
        lambda name, values: (kind, quants.quantize(values, kind)) if "attn_k" in name else None,
    )
    for path, found in (
        (file, "linear (Q4_0 as int4), layer 0: native"),
        (tmp_path / "two.gguf", "linear (Q4_1 as int4 with minima), layers 0-1: native"),
    ):
        main(["explain", str(path), "--no-fuse"])
        assert found in capsys.readouterr().out


@pytest.fixture
def nvfp4(file, tmp_path):
    """Of Q4_0 layers and of NVFP4 ones, which no kernel takes."""
    kinds = gguf.GGMLQuantizationType

    def change(name, values):
        if values.ndim != 2:
            return None
        if "attn_q" in name:
            return kinds.NVFP4, np.full((len(values), values.shape[1] // 64 * 36), 0x33, np.uint8)
        return kinds.Q4_0, quants.quantize(values, kinds.Q4_0)

    return retyped(tmp_path / "nvfp4.gguf", file.parent / "plain.gguf", change)


@pytest.mark.filterwarnings("always")
def test_a_type_without_a_kernel_is_named_and_the_advice_ends_the_warning(nvfp4, tmp_path, capfd):
    main(["explain", str(nvfp4)])
    out, err = capfd.readouterr()
    assert "linear (NVFP4 as bfloat16), layers 0-1" in out
    assert "nvfp4.gguf: NVFP4 as bfloat16 and Q4_0" in err
    assert err.startswith("nvfp4.gguf: "), "the first line says which path runs"
    assert err.count("warning") == err.count("q_proj (NVFP4)") == err.count("--quantize int8") == 1
    main(["explain", str(nvfp4), "--quantize", "int8"])
    out, err = capfd.readouterr()
    assert "linear (int8), layers 0-1" in out
    assert "nvfp4.gguf: Q4_0 and int8" in err
    assert "no kernel takes" not in err
    assert "layer -1" not in out
    assert "the head: " in out
    main(["export", str(nvfp4), str(tmp_path / "plain"), "--dequantize"])
    assert "warning" not in capfd.readouterr().err, "a model that is only written again costs nothing"


@pytest.mark.filterwarnings("always")
def test_training_is_not_advised_an_option_of_generating(nvfp4, tmp_path, capfd):
    (tmp_path / "text.txt").write_text("a name is a name\n" * 200)
    words = ["train", "finetune", "--init", nvfp4, "--data.source", tmp_path / "text.txt", "--data.context", 16]
    words += ["--run.folder", tmp_path, "--run.steps", 1, "--data.validation-fraction", 0, "--lora.rank", 2, PLAIN]
    main([str(word) for word in words])
    err = capfd.readouterr().err
    assert "--quantize" not in err
    assert "no kernel takes" not in err
    with pytest.warns(HastenWarning, match=r"which every token reads; hasten.quantize\(model, hasten.Int8\(\)\)"):
        hasten.load(nvfp4)


def test_a_file_is_no_folder_to_convert_and_the_advice_makes_one(file, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = error_of(capfd, "convert", file, tmp_path / "out", "--format", "gptq")
    first, second = re.search(
        r": (hasten export .*) writes its plain weights, and (hasten .*) quantizes these", err
    ).groups()
    for line in (first, second):
        main(line.split()[1:])
    assert hasten.load(tmp_path / "out").quantization


def test_a_place_that_is_written_twice_is_refused_by_the_options_of_the_command(file, tmp_path, capfd):
    out = tmp_path / "out.gguf"
    err = error_of(capfd, "merge", file, tmp_path, out, "--json", out)
    assert f"OUTPUT {out} is also where --json is to be written; name another file" in err


def test_what_is_no_adapter_is_refused_before_the_model_is_loaded(file, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("hasten.checkpoints.load.load_quietly", lambda *_, **__: pytest.fail("loaded"))
    err = error_of(capfd, "merge", file, tmp_path / "run/model", tmp_path / "merged")
    assert "is no folder with an adapter (adapter_config.json); that of a run is in runs/NAME/adapter" in err


@pytest.mark.filterwarnings("always:2 layers like")
def test_an_adapter_is_trained_beside_the_layers_of_a_file(file, tmp_path, capfd):
    text = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "name a name"}, {"role": "assistant", "content": "names return name"}]
    text.write_text("".join(json.dumps({"messages": turns, "n": i}) + "\n" for i in range(40)))
    words = ["train", "finetune", "--init", file, "--data.source", text, "--data.context", 64, "--run.folder", tmp_path]
    words += ["--run.steps", 2, "--run.epochs", "None", "--data.validation-fraction", 0, PLAIN]
    err = error_of(capfd, *words)
    assert f"--lora.rank 16), or all of its weights after hasten export {file} tiny-Q4_0-plain --dequantize" in err
    main([str(word) for word in [*words, "--lora.rank", 2]])
    folder = next(tmp_path.rglob("adapter_config.json")).parent
    main(["generate", str(file), "--adapter", str(folder), "--prompt", "name", "--max-new-tokens", "3"])
    model = hasten.load(file, dtype="float32")
    layer = load_adapter(folder, model)["blocks.0.mlp.down"]
    wanted = (model.blocks[0].mlp.down.dequantize().double() + layer.delta).float()
    for merged in ("merged", "merged.gguf"):
        main(["merge", str(file), str(folder), str(tmp_path / merged)])
        down = hasten.load(tmp_path / merged, dtype="float32").blocks[0].mlp.down
        assert (down.dequantize() - wanted).norm() < 0.2 * wanted.norm()  # rounded to four bits again
    retype = {"attn_q": gguf.GGMLQuantizationType.Q4_1}  # of which hasten rounds to none
    other = retyped(
        tmp_path / "other.gguf",
        tmp_path / "plain.gguf",
        lambda name, values: next(((k, quants.quantize(values, k)) for n, k in retype.items() if n in name), None),
    )
    model = hasten.load(other, dtype="float32")
    layer = load_adapter(folder, model)["blocks.0.attention.q"]
    for merged, dtype in (("plain-merged", ["--dtype", "float32"]), ("plain-merged.gguf", [])):
        main(["merge", str(other), str(folder), str(tmp_path / merged), *dtype])
        assert "all are written as plain weights" in capfd.readouterr().err
        read = hasten.load(tmp_path / merged, dtype="float32")
        wanted = model.blocks[0].attention.q.dequantize() + layer.delta.float()
        assert read.quantization is None
        assert torch.allclose(read.blocks[0].attention.q.weight, wanted, atol=1e-2 * wanted.abs().max().item())
