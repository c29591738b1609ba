"""Models by their hub id: what is downloaded, and what is said where it cannot be."""

import hashlib
import shutil
import time
from pathlib import Path

import pytest
import torch

import hasten
from checkpoint_folders import CONFIG, write_folder
from hasten.errors import CheckpointError, ResourceError
from hasten.model.context import TrainingContext

# -- hub ids ----------------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2]])


def logits(model, tokens=TOKENS):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1])[None], context)[0]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and an empty cache of the hub's."""
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_a_hub_id_without_a_network_is_a_clear_error(offline):
    start = time.process_time()
    with pytest.raises(ResourceError, match="somebody/some-model is not a folder here, and the hub") as caught:
        hasten.load("somebody/some-model", dtype="stored")
    assert time.process_time() - start < 5
    assert "\n" not in str(caught.value)


def test_a_hub_snapshot_of_symbolic_links_loads_offline(offline, tmp_path):
    plain = write_folder(tmp_path / "plain", shards=2)
    root, revision = offline / "models--somebody--tiny", "0123456789abcdef0123456789abcdef01234567"
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(revision)
    for file in plain.iterdir():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    assert torch.equal(logits(hasten.load("somebody/tiny", dtype="stored")), logits(hasten.load(plain, dtype="stored")))
    assert torch.equal(logits(hasten.load(snapshot, dtype="stored")), logits(hasten.load(plain, dtype="stored")))


def test_only_what_a_model_is_read_from_is_downloaded(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    folder = write_folder(tmp_path)
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hasten.load("owner/name", dtype="stored").config.hidden_size == CONFIG["hidden_size"]
    assert asked.pop("name") == "owner/name"
    offered = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt"]
    unwanted = [
        "pytorch_model.bin",
        "model.py",
        "consolidated.safetensors",
        "original/x.safetensors",
        "onnx/model.json",
    ]
    assert list(filter_repo_objects(offered + unwanted, **asked)) == offered


@pytest.mark.parametrize(
    "error", [ConnectionError("no route\nto host"), OSError(), ValueError("bad id"), KeyError("x")]
)
def test_whatever_the_hubs_client_raises_is_one_clear_error(monkeypatch, error):
    import huggingface_hub

    def fail(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ResourceError, match="owner/name") as caught:
        hasten.load("owner/name", dtype="stored")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "./x/y", "../x", "/x/y", "-a/b", "a b/c", "owner/na?me", "https://x/y"]
)
def test_what_is_no_hub_id_is_not_looked_for(monkeypatch, tmp_path, name):
    import huggingface_hub

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # where none of these names is a folder
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="not a folder"):
        hasten.load(name, dtype="stored")
