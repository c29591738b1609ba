"""Export: what is written, how it is tied, and that a failure leaves the old folder whole."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import hasten
from checkpoint_folders import tensors, write_folder
from full_disk import full_disk
from hasten.checkpoints.export import export_model
from hasten.errors import CheckpointError, ConfigError
from hasten.machine.files import locked
from hasten.model.context import TrainingContext
from references import make_reference

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2]])


def logits(model):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(TOKENS, torch.arange(8)[None], context)[0]


def reference_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("changed", ["nothing", "head", "embedding", "both alike"])
@pytest.mark.parametrize("name", ["llama-mqa", "gpt2", "gemma2"])
def test_tied_weights_are_untied_where_one_of_the_two_was_changed(name, changed, tmp_path):
    model = hasten.load(make_reference(name))
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        if changed in ("head", "embedding"):
            module = model.head if changed == "head" else model.embedding
            module.weight = torch.nn.Parameter(module.weight * 1.5 + 0.01)
        elif changed == "both alike":
            model.head.weight = torch.nn.Parameter(model.head.weight.clone())
    hasten.save(model, tmp_path)
    tied = changed in ("nothing", "both alike")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    expected = logits(model)
    assert (reference_logits(tmp_path) - expected).abs().max() < 1e-4
    again = hasten.load(tmp_path, dtype="stored")
    assert (again.head.weight is again.embedding.weight) is tied
    torch.testing.assert_close(logits(again), expected, rtol=1e-6, atol=1e-6)


def test_bfloat16_stays_bfloat16_bit_for_bit(tmp_path):
    folder = write_folder(tmp_path / "model", weights=tensors(dtype=torch.bfloat16))
    hasten.save(hasten.load(folder, dtype="stored"), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors().keys()
    for name, tensor in tensors(dtype=torch.bfloat16).items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], tensor)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_conversion(tmp_path, dtype):
    model = hasten.load(write_folder(tmp_path / "model"), dtype="stored")
    export_model(model, tmp_path / "out", dtype=dtype)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    assert model.dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match="int8"):
        export_model(model, tmp_path / "other", dtype=torch.int8)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "gpt2"])
def test_large_models_are_split_into_files(name, tmp_path):
    reference = make_reference(name)
    model = hasten.load(reference)
    export_model(model, tmp_path, shard_bytes=60_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    sizes = {file: sum(t.nbytes for t in load_file(tmp_path / file).values()) for file in files}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    for file, size in sizes.items():
        assert size <= 60_000 or len(load_file(tmp_path / file)) == 1
    assert torch.equal(logits(hasten.load(tmp_path, dtype="stored")), logits(model))
    assert (reference_logits(tmp_path) - logits(model)).abs().max() < 1e-4


def test_files_of_an_earlier_save_do_not_stay(tmp_path):
    model = hasten.load(write_folder(tmp_path / "model"), dtype="stored")
    out = tmp_path / "out"
    expected = logits(model)
    for shard_bytes in (1000, 1500, 10**9, 800):
        export_model(model, out, shard_bytes=shard_bytes)
        names = set(contents(out))
        index = out / "model.safetensors.index.json"
        weights = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        assert names == weights | {"config.json"} | ({index.name} if index.exists() else set())
        assert torch.equal(logits(hasten.load(out, dtype="stored")), expected)


def test_other_files_of_the_folder_stay(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    hasten.save(hasten.load(write_folder(tmp_path / "model"), dtype="stored"), out)
    assert set(contents(out)) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("shards", [1, 3])
def test_saving_over_the_folder_the_model_is_mapped_from(tmp_path, shards):
    folder = write_folder(tmp_path, shards=shards)
    model = hasten.load(folder, dtype="stored")
    with torch.no_grad():
        model.head.weight *= 2
    expected = logits(model)
    for _ in range(2):
        hasten.save(model, folder)
        assert torch.equal(logits(model), expected)  # the mapping still stands on the old file
        assert torch.equal(logits(hasten.load(folder, dtype="stored")), expected)


def test_a_chat_template_and_tokenizer_are_written(tmp_path):
    import tokenizers
    from tokenizers import models

    from hasten.text.tokenizer import Tokenizer

    model = hasten.load(write_folder(tmp_path / "model"), dtype="stored")
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    model.tokenizer = Tokenizer.from_tokenizers(backend, eos_token="</s>", chat_template="{{ messages }}")
    model.generation = {"temperature": 0.5}
    hasten.save(model, tmp_path / "out")
    again = hasten.load(tmp_path / "out", dtype="stored")
    assert again.tokenizer.encode("ab") == [0, 1]
    assert again.tokenizer.chat_template == "{{ messages }}"
    assert again.generation == {"temperature": 0.5}


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 100, 3000])
def test_a_disk_that_fills_up_leaves_the_old_files_as_they_were(tmp_path, limit):
    folder, other = (write_folder(tmp_path / name) for name in ("model", "other"))
    before = contents(folder)
    model = hasten.load(other, dtype="stored")
    with torch.no_grad():
        model.head.weight.fill_(7.0)
    with full_disk(limit), pytest.raises(CheckpointError, match=re.escape(f"{folder} cannot be written")):
        hasten.save(model, folder)
    assert contents(folder) == before


def test_a_failure_in_the_middle_leaves_the_old_files_as_they_were(tmp_path, monkeypatch):
    folder = write_folder(tmp_path)
    before = contents(folder)
    model = hasten.load(folder, dtype="stored")
    calls = []

    def fail(values, path, **options):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(values, path, **options)

    import hasten.checkpoints.export as module

    real = module.save_file
    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        export_model(model, folder, shard_bytes=1000)
    assert contents(folder) == before


def test_places_that_cannot_be_written(tmp_path):
    model = hasten.load(write_folder(tmp_path / "model"), dtype="stored")
    file = tmp_path / "file"
    file.write_text("x")
    for place in (file, file / "below", Path("/proc/none"), Path("/dev/null")):
        with pytest.raises(CheckpointError, match="cannot be written"):
            hasten.save(model, place)
    assert file.read_text() == "x"


KILLED = """
import os, signal, sys, hasten
model, replace, left = hasten.load(sys.argv[1], dtype="stored"), os.replace, [int(sys.argv[2])]
with_weights = model.state_dict()
for tensor in with_weights.values():
    tensor.mul_(2)
def killing(source, target):
    if ".saving" in str(source) and ".partial" not in str(source):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killing
hasten.save(model, sys.argv[1])
"""


@pytest.mark.parametrize("moved", [0, 1])
def test_a_process_killed_while_files_are_moved_leaves_no_model_of_old_and_new(tmp_path, moved):
    folder = write_folder(tmp_path)
    model = hasten.load(folder, dtype="stored")
    command = [sys.executable, "-c", KILLED, str(folder), str(moved)]
    assert subprocess.run(command, check=False).returncode == -9
    assert (folder / ".saving").exists()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hasten.load(folder, dtype="stored")
    hasten.save(model, folder)
    assert not (folder / ".saving").exists()
    assert hasten.load(folder, dtype="stored")


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    model = hasten.load(write_folder(tmp_path / "model"), dtype="stored")
    with locked(tmp_path / "out" / ".saving" / "lock", waiting=None):
        with pytest.raises(ConfigError, match=r"another process writes into .*out; wait"):
            hasten.save(model, tmp_path / "out")
        assert (tmp_path / "out" / ".saving" / "lock").exists()
    hasten.save(model, tmp_path / "out")
    assert hasten.load(tmp_path / "out", dtype="stored")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    from hasten.cli.export import Export

    folder = write_folder(tmp_path / "model")
    Export(model=str(folder), output=tmp_path / "out", dtype="bfloat16", json="-").run()
    done = json.loads(capsys.readouterr().out)
    assert done["dtype"] == "bfloat16"
    assert done["files"] == ["model.safetensors"]
    assert hasten.load(tmp_path / "out", dtype="stored").dtype == torch.bfloat16
    Export(model=str(folder), output=tmp_path / "same").run()
    assert "llama, float32" in capsys.readouterr().out
    assert hasten.load(tmp_path / "same", dtype="stored").dtype == torch.float32


def test_the_command_line_needs_no_torch_to_be_parsed():
    code = (
        "import sys, tyro; from hasten.cli.export import Export;"
        "e = tyro.cli(Export, args=['a/b', 'out', '--dtype', 'float16']);"
        "assert (e.model, str(e.output), e.dtype) == ('a/b', 'out', 'float16'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
