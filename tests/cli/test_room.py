"""A model that memory does not suffice for is refused before it is loaded, with what needs it and what would fit."""

import re
import warnings

import pytest
import torch

import hasten
from hasten.checkpoints.load import open_checkpoint
from hasten.cli import room
from hasten.cli.generate import Generate
from hasten.cli.main import main
from hasten.cli.room import use_of
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.planning.held import held_bytes
from hasten.planning.memory import inference_memory
from hasten.planning.shapes import shape_config
from hasten.quantization import Int8, quantize
from hasten.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model, of 14 M parameters, in bf16 and in int8."""
    place = tmp_path_factory.mktemp("room")
    config = shape_config("gpt2-124m")
    source = dict(config.source) | {"n_layer": 1, "n_embd": 256, "n_head": 4, "n_inner": 1024}
    model = initialize(read_config(source), seed=0, dtype=torch.bfloat16).eval()
    hasten.save(model, place / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hasten.save(quantize(model, Int8()), place / "int8")
    return place


def refused(monkeypatch, capsys, free, *line):
    """What a command says where so many bytes are free."""
    monkeypatch.setattr(room, "available_memory", lambda device: free)
    with pytest.raises(SystemExit) as ended:
        main([*map(str, line)])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "FOLDER", "--prompt-ids", "1"],
        ["chat", "FOLDER"],
        ["serve", "FOLDER", "--port", "0"],
        ["profile", "generate", "FOLDER"],
        ["generate", "FOLDER", "--prompt-ids", "1", "--tensor-parallel", "2"],
    ],
)
def test_every_command_that_loads_a_model_refuses(folders, monkeypatch, capsys, line):
    line = [str(folders / "plain") if word == "FOLDER" else word for word in line]
    said = refused(monkeypatch, capsys, 10 << 20, *line)
    ranks = "--tensor-parallel" in line
    what = r"each of 2 ranks of .*plain" if ranks else r"running .*plain"
    weights, free = (r"0\.01", r"0\.00") if ranks else (r"0\.03", r"0\.01")
    assert re.search(rf"{what} needs about 0\.0\d GB on cpu \({weights} GB weights.*\) and {free} GB are free", said)
    assert "take a smaller or a quantized model, or a machine with more memory" in said


def test_the_advice_is_what_fits(folders, monkeypatch, capsys):
    line = ["generate", folders / "plain", "--prompt-ids", "1"]
    source = open_checkpoint(folders / "plain")

    def need(**options):
        return inference_memory(
            source.config, use_of(Generate(model="", prompt_ids=(1,), **options), source, "cpu")
        ).peak

    needs = {"own": need(), "float32": need(dtype="float32"), "int8": need(quantize="int8")}
    assert needs["int8"] < needs["own"] < needs["float32"]
    assert "give --quantize int8" in refused(monkeypatch, capsys, needs["own"] - 1, *line)
    assert "leave --dtype out" in refused(monkeypatch, capsys, needs["own"], *line, "--dtype", "float32")
    said = refused(monkeypatch, capsys, needs["int8"], *line, "--dtype", "float32")
    assert "give --quantize int8 without --dtype" in said
    assert "take a smaller or a quantized" in refused(monkeypatch, capsys, 1 << 20, "chat", folders / "int8")


def test_a_tokenizer_is_counted_before_it_is_read(tiny_folder, monkeypatch, capsys):
    """A large one takes hundreds of megabytes: reading it must not be what ends a command without a word."""
    monkeypatch.setattr(Tokenizer, "from_folder", lambda folder: pytest.fail("read before there was room for it"))
    monkeypatch.setattr(
        "hasten.checkpoints.source.TOKENIZER", (1 << 30) / (tiny_folder / "tokenizer.json").stat().st_size
    )
    said = refused(monkeypatch, capsys, 1 << 29, "generate", tiny_folder, "--prompt", "x")
    assert "1.1 GB tokenizer" in said


@pytest.mark.parametrize("name", ["plain", "int8"])
def test_what_is_counted_is_what_is_loaded(folders, name):
    model = hasten.load(folders / name)
    held = sum(tensor.nbytes for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values())
    assert held_bytes(open_checkpoint(folders / name)) == pytest.approx(held, rel=0.02)
    wide = hasten.load(folders / "plain", dtype="float32")
    assert held_bytes(open_checkpoint(folders / "plain"), itemsize=4) == sum(p.nbytes for p in wide.parameters())
