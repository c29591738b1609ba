"""What a calibrated run keeps on the disk: the samples' states if asked, finished blocks of one model, a full disk."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.errors import CheckpointError, ConfigError, ResourceError
from hasten.quantization import GPTQ, Int4, gptq, quantize, quantize_to_folder, resume
from hasten.quantization.cost import predicted_bytes
from hasten.quantization.report import draw_errors
from hasten.quantization.resume import WorkFolder
from references import make_reference

SAMPLES = torch.randint(0, 101, (24, 32), generator=torch.Generator().manual_seed(1))
SCHEME = Int4(group_size=32)


@pytest.fixture(scope="module")
def model():
    return hasten.load(make_reference("llama"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The weights that GPTAQ finds where nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    quantize_to_folder(model, SCHEME, folder, method=GPTQ(gptaq=True), calibration=SAMPLES)
    return load_file(folder / "model.safetensors")


def same(folder, weights):
    found = load_file(folder / "model.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_spilled_states_give_the_same_bits(model, whole, tmp_path):
    seen = set()
    options = {"method": GPTQ(gptaq=True), "calibration": SAMPLES, "spill": True}
    quantize_to_folder(
        model,
        SCHEME,
        tmp_path / "out",
        report=lambda report: seen.update(path.name for path in (tmp_path / "out.partial").glob("*.spill")),
        **options,
    )
    assert seen == {"states.spill", "before.spill"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert same(tmp_path / "out", whole)
    states = SAMPLES.numel() * model.config.hidden_size * 4
    saved = predicted_bytes(model, SAMPLES, GPTQ(gptaq=True)) - predicted_bytes(
        model, SAMPLES, GPTQ(gptaq=True), spill=True
    )
    assert saved == 2 * states


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot ask for room beforehand")
def test_no_room_to_spill_is_one_error(model, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        quantize_to_folder(model, SCHEME, tmp_path / "out", method=GPTQ(), calibration=SAMPLES, spill=True)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_one_error_and_the_run_goes_on_when_there_is_room(model, whole, tmp_path, monkeypatch):
    write, names = WorkFolder._write, []

    def limited(work, name, tensors, metadata):
        names.append(name)
        if name == "block-00002":
            raise OSError(28, "No space left on device")
        write(work, name, tensors, metadata)

    monkeypatch.setattr(WorkFolder, "_write", limited)
    options = {"method": GPTQ(gptaq=True), "calibration": SAMPLES}
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space left on device.*make room"):
        quantize_to_folder(model, SCHEME, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    reports = []
    monkeypatch.setattr(
        GPTQ, "quantize_block", lambda *a, own=GPTQ.quantize_block: (reports.append(a[1].prefix), own(*a))
    )
    quantize_to_folder(model, SCHEME, tmp_path / "out", **options)
    assert reports == ["blocks.2.", "blocks.3.", ""]
    assert same(tmp_path / "out", whole)


def test_blocks_of_an_earlier_versions_rules_are_not_continued(tmp_path, monkeypatch):
    def stop(self, task):
        if task.prefix == "blocks.1.":
            raise KeyboardInterrupt
        return run(self, task)

    run = GPTQ.quantize_block
    monkeypatch.setattr(GPTQ, "quantize_block", stop)
    model, options = hasten.load(make_reference("llama")), {"method": GPTQ(), "calibration": SAMPLES}
    monkeypatch.setattr(resume, "RULES", 1)
    with pytest.raises(KeyboardInterrupt):
        quantize_to_folder(model, SCHEME, tmp_path / "out", **options)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="1 finished blocks of a run with other settings"):
        quantize_to_folder(model, SCHEME, tmp_path / "out", **options)


def test_a_model_of_which_one_weight_differs_does_not_go_on(tmp_path, monkeypatch):
    def stop(self, task):
        if task.prefix == "blocks.1.":
            raise KeyboardInterrupt
        return run(self, task)

    run = GPTQ.quantize_block
    monkeypatch.setattr(GPTQ, "quantize_block", stop)
    tuned = hasten.load(make_reference("llama"))
    options = {"method": GPTQ(), "calibration": SAMPLES}
    with pytest.raises(KeyboardInterrupt):
        quantize_to_folder(tuned, SCHEME, tmp_path / "out", **options)
    with torch.no_grad():
        tuned.blocks[3].mlp.down.weight[5, 7] += 1e-3
    with pytest.raises(ConfigError, match="other settings, text or weights"):
        quantize_to_folder(tuned, SCHEME, tmp_path / "out", **options)


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(figure, file, **options):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = tmp_path / "errors.png"
    before.write_bytes(b"whole")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(ResourceError, match=r"cannot write picture .*errors\.png: No space left on device"):
        draw_errors([], "gptq", before)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


@pytest.mark.parametrize("method", [GPTQ, "gptq"])
def test_a_method_that_is_none_is_one_error(model, method):
    with pytest.raises(ConfigError, match=r"the method is hasten\.GPTQ\(\.\.\.\).*found (the class GPTQ|str)"):
        quantize(model, SCHEME, method=method, calibration=SAMPLES)


def test_predicted_memory_holds_what_experts_are_given(monkeypatch):
    given = []
    collect = gptq.inputs_of_each

    def counted(*arguments):
        rows = collect(*arguments)
        given.append(sum(part.nbytes for parts in rows.values() for part in parts))
        return rows

    monkeypatch.setattr(gptq, "inputs_of_each", counted)
    mixtral, unrouted = (hasten.load(make_reference("mixtral")) for _ in range(2))
    unrouted.config = replace(unrouted.config, experts_per_token=0)
    predicted = predicted_bytes(mixtral, SAMPLES, GPTQ()) - predicted_bytes(unrouted, SAMPLES, GPTQ())
    quantize(mixtral, SCHEME, method=GPTQ(), calibration=SAMPLES)
    assert max(given) == predicted > 0
