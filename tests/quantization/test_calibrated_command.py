"""`hasten quantize --method …`: through the command line, with its report, picture and refusals."""

import gc
import json
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.cli.main import main
from hasten.engine.own_text import own_text
from hasten.quantization.resume import KeptText
from tiny_model import tiny_llama
from triton_cases import needs_gpu

TEXT = "def function(argument, other):\n    return [argument for _ in range(other)] + list(map(str, argument))\n"


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.py"
    file.write_text("".join(TEXT.replace("argument", f"name{i}") for i in range(60)))
    return file


def quantized(folder, text, out, *extra):
    options = ["--calibration", str(text), "--samples", "8", "--length", "32", "--output", str(out)]
    main(["quantize", str(folder), "--scheme", "int4", "--group-size", "32", *extra, *options])


@pytest.mark.parametrize("extra", [(), ("--gptaq", "--order", "activation")])
def test_gptq(extra, tiny_folder, text, tmp_path, capsys):
    picture = tmp_path / "errors.png"
    quantized(tiny_folder, text, tmp_path / "out", "--method", "gptq", *extra, "--json", "-", "--picture", str(picture))
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "8 calibration samples of 32 tokens, activations rounded to int8" in captured.err
    assert found["method"]["gptaq"] == bool(extra)
    assert found["method"]["order"] == (extra[2] if extra else "groups")
    assert found["calibration"] == {"text": str(text), "samples": 8, "length": 32, "seed": 0}
    assert found["predicted_memory_bytes"] > 0
    assert 4 < found["bits_per_weight"] < 32
    assert all(0 < layer["output_error"] < 1 for layer in found["layers"])
    assert all(layer["rtn_output_error"] is not None for layer in found["layers"])
    assert picture.stat().st_size > 1000
    model = hasten.load(tmp_path / "out", dtype="stored")
    assert hasten.generate(model, "def", max_new_tokens=2)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]


def test_the_model_writes_the_text(tiny_folder, tmp_path, capsys):
    options = ["--samples", "4", "--length", "16", "--json", "-"]
    main(
        [
            "quantize",
            str(tiny_folder),
            "--scheme",
            "int4",
            "--method",
            "gptq",
            *options,
            "--output",
            str(tmp_path / "o"),
        ]
    )
    captured = capsys.readouterr()
    assert "the model writes its calibration text first: about" in captured.err
    found = json.loads(captured.out)
    assert found["calibration"] == {"text": "self", "samples": 4, "length": 16, "seed": 0}
    assert hasten.load(tmp_path / "o").quantization


def test_a_run_that_is_repeated_reads_the_text_that_the_model_wrote(tiny_folder, tmp_path, capsys, monkeypatch):
    def interrupted(self, task):
        if task.prefix == "blocks.1.":
            raise KeyboardInterrupt
        return quantize_block(self, task)

    quantize_block = hasten.GPTQ.quantize_block
    options = ["--scheme", "int4", "--method", "gptq", "--samples", "4", "--length", "16"]
    command = ["quantize", str(tiny_folder), *options, "--output", str(tmp_path / "o")]
    monkeypatch.setattr(hasten.GPTQ, "quantize_block", interrupted)
    with pytest.raises(SystemExit):
        main(command)
    monkeypatch.undo()
    assert "writes its calibration text first" in capsys.readouterr().err
    main([*command, "--calibration-seed", "0"])  # the default
    err = capsys.readouterr().err
    assert "calibration text: what the model wrote before the interruption" in err
    assert "writes its calibration text first" not in err
    assert [path.name for path in tmp_path.glob("o*")] == ["o"]
    main([*command[:-1], str(tmp_path / "whole")])
    names = ("o", "whole")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_text_of_another_model_or_of_other_settings_is_not_read(tiny_folder, tmp_path):
    model = hasten.load(tiny_folder)
    wanted = {"samples": 2, "length": 4, "seed": 0}
    tokens = torch.arange(8).view(2, 4)
    KeptText(tmp_path / "o", model, wanted).save(tokens)
    assert torch.equal(KeptText(tmp_path / "o", model, wanted).read(), tokens)
    assert KeptText(tmp_path / "o", model, wanted | {"seed": 1}).read() is None
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] += 1
    assert KeptText(tmp_path / "o", model, wanted).read() is None


def test_nothing_is_left_where_no_text_was_written(tiny_folder, tmp_path):
    assert KeptText(tmp_path / "o", hasten.load(tiny_folder), {}).read() is None
    assert list(tmp_path.glob("o*")) == []


def test_the_model_that_wrote_the_text_is_gone_when_layers_are_quantized(tiny_folder, tmp_path, monkeypatch):
    models, alive = [], []

    def noted(model, **options):
        models.append(weakref.ref(model))
        return own_text(model, **options)

    def at_quantization(*arguments, **options):
        alive.extend(model() is not None for model in models)

    monkeypatch.setattr("hasten.engine.own_text.own_text", noted)
    monkeypatch.setattr("hasten.quantization.quantize_to_folder", at_quantization)
    options = ["--scheme", "int4", "--method", "gptq", "--samples", "2", "--length", "8"]
    gc.disable()  # it may not run for long: few objects, many bytes
    try:
        main(["quantize", str(tiny_folder), *options, "--output", str(tmp_path / "o")])
    finally:
        gc.enable()
    assert alive == [False]


def test_what_cannot_be_quantized_is_refused_before_text_is_written(tiny_folder, tmp_path, capsys):
    main(["quantize", str(tiny_folder), "--scheme", "int8", "--output", str(tmp_path / "int8")])
    capsys.readouterr()
    options = ["--scheme", "int4", "--method", "gptq", "--output", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        main(["quantize", str(tmp_path / "int8"), *options])
    err = capsys.readouterr().err
    assert "are quantized already" in err
    assert "writes its calibration text" not in err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--length", "100000"], "positions; found a calibration length of 100000"),
        (["--samples", "0"], "calibration samples must be a whole number, at least 1; found 0"),
        (["--calibration-seed", "-1"], "the calibration seed must be a whole number, at least 0"),
    ],
)
def test_numbers_of_the_text_are_checked_before_its_memory(option, words, tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hasten.cli.written_text.available_memory", lambda device: 10_000)
    options = ["--scheme", "int4", "--method", "gptq", "--output", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        main(["quantize", str(tiny_folder), *options, *option])
    assert words in capsys.readouterr().err


def test_without_the_memory_to_run_the_model_text_is_asked_for(tiny_folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hasten.cli.written_text.available_memory", lambda device: 10_000)
    command = ["quantize", str(tiny_folder), "--scheme", "int4", "--method", "gptq", "--output", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        main(command)
    err = capsys.readouterr().err
    assert "writing calibration text with" in err
    assert "give text: --calibration FILE, or stdlib" in err
    main([*command, "--calibration", str(text), "--samples", "4", "--length", "16"])


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_computes_it_too(tiny_folder, text, tmp_path):
    errors = {}
    for device in ("cpu", "cuda"):
        file = tmp_path / f"{device}.json"
        quantized(tiny_folder, text, tmp_path / device, "--method", "gptq", "--device", device, "--json", str(file))
        errors[device] = [layer["output_error"] for layer in json.loads(file.read_text())["layers"]]
    # Near ties are rounded otherwise; what the layers lose is the same.
    assert errors["cuda"] == pytest.approx(errors["cpu"], rel=0.05)
    assert hasten.generate(hasten.load(tmp_path / "cuda", device="cuda", dtype="stored"), "def", max_new_tokens=2)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_need_not_hold_the_model(text, tmp_path):
    model = tiny_llama(hidden_size=512, intermediate_size=1408, num_hidden_layers=24)
    hasten.save(model, tmp_path / "model")
    gc.collect()
    held = torch.cuda.memory_allocated()  # by what ran before in this process
    torch.cuda.reset_peak_memory_stats()
    where = ["--method", "gptq", "--device", "cuda", "--json", str(tmp_path / "found.json")]
    quantized(tmp_path / "model", text, tmp_path / "out", *where)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["peak_memory_bytes"] - held < found["bytes_before"] / 2


def test_the_table_names_both_errors(tiny_folder, text, tmp_path, capsys):
    quantized(tiny_folder, text, tmp_path / "out", "--method", "gptq")
    out = capsys.readouterr().out
    assert "output error: rtn   method" in out
    assert "bits per weight" in out
    assert re.search(r"peak memory \d\.\d\d GB \(\d\.\d\d predicted\)", out)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--calibration", "x"], ["--calibration has no effect with --method rtn, only with gptq"]),
        (["--damping", "0.1"], ["--damping has no effect with --method rtn, only with gptq"]),
        (["--calibration", ""], ["--calibration has no effect with --method rtn"]),
        (["--gptaq"], ["--gptaq has no effect with --method rtn, only with gptq"]),
        (["--spill"], ["--spill has no effect with --method rtn"]),
        (["--method", "gptq", "--damping", "2"], ["damping must be from 0 to 1; found 2.0"]),
        (["--method", "gptq", "--calibration", "/no/such/file"], ["/no/such/file"]),
        (["--method", "gptq", "--length", "100000"], ["shorter than one sample", "--length"]),
        (["--method", "gptq", "--length", "1000", "--samples", "1"], ["positions"]),
        (["--method", "gptq", "--picture", "/no/such/folder/x.png"], ["no folder"]),
        (["--device", "gpu"], ["device 'gpu' is not known", "cuda:<index>"]),
    ],
)
def test_what_cannot_be_is_one_line(extra, words, tiny_folder, text, tmp_path, capsys):
    if "--calibration" not in extra and "--length" in extra:
        extra = [*extra, "--calibration", str(text)]
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(tiny_folder), "--scheme", "int4", *extra, "--output", str(tmp_path / "out")])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_terminal_shows_the_time_left(tiny_folder, text, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    quantized(tiny_folder, text, tmp_path / "out", "--method", "gptq")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    assert re.search(r"quantized layers .* \d+/15 \d:\d\d:\d\d left (\d|-):", shown), shown
