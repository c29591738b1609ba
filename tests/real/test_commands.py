"""Every command on the published files: it runs without a warning, and what an error advises works."""

import io
import json
import re

import pytest
import torch
from safetensors.torch import load_file

from hasten.checkpoints.gguf.header import read_gguf
from hasten.cli.main import main
from real_models import TEXT

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]  # a HastenWarning is an error in every test
PROMPT = "The capital of France is"
GREEDY = ["--prompt", PROMPT, "--max-new-tokens", "8", "--temperature", "0"]


@pytest.fixture
def run(capfd):
    """A function that runs a command and returns what it printed to standard output and standard error."""

    def call(*words):
        capfd.readouterr()
        main([str(word) for word in words])
        return capfd.readouterr()

    return call


def error_of(run, capfd, *words):
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    assert stopped.value.code == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err


def test_generate_says_what_runs_and_continues(real, run):
    out, err = run("generate", real.name, *GREEDY)
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 8
    assert re.search(rf"^{real.name}: .*fused steps", err, re.MULTILINE)  # after what is compiled, once


def test_eval_by_the_short_name(real, run, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT[:1200])
    found = json.loads(run("eval", real.name, "--text", tmp_path / "text.txt", "--json", "-").out)
    assert 2 < found["perplexity"] < 60
    assert "fused steps" in found["path"]


def test_explain_names_the_kernel_of_each_type_of_the_file(real, run):
    file = read_gguf(real.file)
    types = {tensor.type.name for tensor in file.tensors.values() if tensor.type.format is not None}
    out, err = run("explain", real.file)
    kernels = dict(re.findall(r"^linear \((\w+).*\), .*: (\w+)$", out, re.MULTILINE))
    assert kernels == dict.fromkeys(types, "native")
    assert all(name in err.splitlines()[0] for name in types)


def test_plan_predicts_the_files_bytes(real, run):
    found = json.loads(run("plan", real.name, "--json", "-").out)
    stored = sum(tensor.bytes for tensor in read_gguf(real.file).tensors.values())
    assert found["parts"]["weights"] == pytest.approx(stored, rel=0.05)


def test_profile_names_the_parts_of_a_step(real, run, tmp_path):
    options = ["--measured", 1, "--prompt-tokens", 16, "--output", tmp_path / "p"]
    assert "profiler" not in run("profile", "generate", real.name, *options).err
    found = json.loads((tmp_path / "p/profile.json").read_text())
    assert [phase["name"] for phase in found["phases"]] == ["prefill", "decode"]


def test_chat_answers(smollm2, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.StringIO("Name the capital of France.\n"))
    main(["chat", smollm2.name, "--temperature", "0", "--max-new-tokens", "12"])
    assert "Paris" in capfd.readouterr().out


def test_plain_weights_are_those_of_transformers_and_are_quantized(real, run, capfd, tmp_path):
    """The advice of an error, followed: export --dequantize, then quantize, then run it."""
    err = error_of(run, capfd, "quantize", real.name, "--scheme", "int4", "--output", tmp_path / "int4")
    assert "quantized already" in err
    assert "--dequantize" in err
    run("export", real.name, tmp_path / "plain", "--dequantize", "--dtype", "float32")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "plain", real.folder))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    run("quantize", tmp_path / "plain", "--scheme", "int4", "--output", tmp_path / "int4")
    out, err = run("generate", tmp_path / "int4", *GREEDY)
    assert out.startswith(PROMPT)
    assert "int4: int4" in err  # and int8, where a model has a head of its own
    assert ", fused steps" in err


def test_an_adapter_is_trained_over_the_file_and_used(smollm2, run, tmp_path):
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr, me hearty!"}]}
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps(talk)] * 40))
    options = ["--lora.rank", "4", "--data.source", tmp_path / "chat.jsonl", "--techniques.no-compile"]
    run("train", "finetune", "--init", smollm2.name, *options, "--run.steps", 2, "--run.folder", tmp_path / "runs")
    (folder,) = tmp_path.glob("runs/**/adapter_config.json")
    out, err = run("generate", smollm2.name, "--adapter", folder.parent, *GREEDY)
    assert out.startswith(PROMPT)
    assert "fused steps" in err
