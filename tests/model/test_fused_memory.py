"""A model of a mapped file holds its weights once: pages of the file are released when their numbers were copied."""

import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten.checkpoints import load
from hasten.model.fused import fuse
from hasten.ops.native import library
from tiny_model import tiny_llama

pytestmark = [
    pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)"),
    pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "max_position_embeddings": 64}


def resident(file: Path) -> int:
    """Bytes of a mapped file that are memory of this process."""
    found, own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            own = line.endswith(str(file))
        elif own and key == "Rss:":
            found += int(rest[0]) * 1024
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mapped")
    hasten.save(tiny_llama(**SIZES, vocab_size=4096).to(torch.bfloat16), folder)
    return folder


def test_fusing_releases_the_pages_of_what_it_copied(folder):
    file = folder / "model.safetensors"
    model = hasten.load(folder)
    prompt = {"prompts": [[1, 2, 3]], "max_new_tokens": 4, "temperature": 0}
    embedding = model.embedding.weight.nbytes
    assert resident(file) > 0.9 * (file.stat().st_size - embedding)
    fuse(model)
    assert resident(file) < 0.05 * file.stat().st_size
    assert hasten.generate(model, **prompt)[0].tokens == hasten.generate(fuse(hasten.load(folder)), **prompt)[0].tokens


def test_what_somebody_else_refers_to_keeps_its_numbers(folder):
    model = hasten.load(folder)
    weights = [model.blocks[0].mlp.up.weight, model.state_dict()["blocks.1.mlp.up.weight"], model.head.weight[:50]]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(2)  # copies the file's pages
    expected = [weight.clone() for weight in weights]
    fuse(model)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_loading_in_another_dtype_releases_the_pages_of_each_tensor(folder, monkeypatch):
    file, found = folder / "model.safetensors", []
    check = load.check_finite

    def checked(name, tensor, where):
        check(name, tensor, where)
        if name.endswith(("up_proj.weight", "lm_head.weight")):
            found.append(resident(file))

    monkeypatch.setattr(load, "check_finite", checked)
    assert hasten.load(folder, dtype="float32").dtype == torch.float32
    assert len(found) == 3
    assert max(found) < 0.3 * file.stat().st_size
