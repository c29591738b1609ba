"""Damaged and hostile config.json files and folders: one clear error each."""

import json
import os
from contextlib import contextmanager

import pytest

import hasten
from checkpoint_folders import CONFIG, write_folder
from hasten.errors import HastenError
from hostile_cases import refused


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


# -- config.json ------------------------------------------------------------------------------------------------------

SIZES = [name for name, value in CONFIG.items() if type(value) is int]
BAD = ["1e12", "1" + "0" * 30, "-1", "0", '"64"', "true", "NaN", "1e400", "[]", "{}", "2.5"]


@pytest.mark.parametrize("literal", [*BAD, "1000000000000"])
@pytest.mark.parametrize("field", SIZES)
def test_a_size_that_cannot_be_is_refused_and_named(folder, field, literal):
    path = folder / "config.json"
    path.write_text(path.read_text().replace(f'"{field}": {CONFIG[field]}', f'"{field}": {literal}'))
    with refused(path, field, "from 1 to"):
        hasten.load(folder)


@pytest.mark.parametrize("literal", [*BAD, "1000000000000", "9" * 5000, "[" * 500 + "]" * 500])
@pytest.mark.parametrize("field", [*sorted(set(CONFIG) - set(SIZES)), "rope_scaling", "layer_types", "sliding_window"])
def test_any_other_field_is_refused_or_harmless(folder, field, literal):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {field: "HERE"}).replace('"HERE"', literal))
    harmless = {"layer_types", "sliding_window"}  # a Llama has neither
    fine = {("rms_norm_eps", "0"), ("rope_theta", "1e12"), ("rope_theta", "1000000000000")}
    fine |= {("rope_theta", "2.5"), ("tie_word_embeddings", "true"), ("rope_scaling", "{}")}
    if literal != "9" * 5000 and (field in harmless or (field, literal) in fine):
        assert hasten.load(folder).config.hidden_size == 8
    else:
        with refused(folder):
            hasten.load(folder)


def test_a_huge_count_of_experts_or_layers_is_not_built(folder):
    config = CONFIG | {"num_hidden_layers": 1024, "num_experts": 4096, "num_experts_per_tok": 1}
    config |= {"model_type": "qwen3_moe", "moe_intermediate_size": 1 << 20, "hidden_size": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    with refused(folder):
        hasten.load(folder)


def test_missing_and_malformed_config(folder):
    path = folder / "config.json"
    path.unlink()
    with refused(folder, "config.json"):
        hasten.load(folder)
    for text, word in (
        ("[1]", "object"),
        ("{", "JSON"),
        ("", "JSON"),
        ("[" * 100_000, "nested"),
        ('{"a": "\\u0', "JSON"),
    ):
        path.write_text(text)
        with refused(path, word):
            hasten.load(folder)
    path.write_bytes(b"\xff\xfe\x00")
    with refused(path):
        hasten.load(folder)
    path.write_text(json.dumps({**CONFIG, "padding": "x" * 2_000_000}))
    with refused(path, "too many"):
        hasten.load(folder)


@pytest.mark.parametrize("value", ["bert", None, 7, ["llama"], {"llama": 1}, "x" * 10_000])
def test_an_unknown_model_type_lists_the_known_ones(tmp_path, value):
    folder = write_folder(tmp_path, config={"model_type": value})
    with refused("config.json", "model_type", "gpt2", "qwen3_moe", "gemma3_text"):
        hasten.load(folder)


# -- the folder itself ------------------------------------------------------------------------------------------------


def test_what_is_not_a_folder(tmp_path, folder):
    with refused("config.json", "is a file"):
        hasten.load(folder / "config.json")
    with refused(tmp_path / "nothing", "not a folder"):
        hasten.load(tmp_path / "nothing")
    for name in ("", "a\0b", "x" * 5000, "~nobody-of-this-name/x/y"):
        with pytest.raises(HastenError):
            hasten.load(name)
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused(empty, "config.json"):
        hasten.load(empty)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with refused(folder, "no weights"):
        hasten.load(folder)


@contextmanager
def as_nobody():
    """Without the rights of root, whom no permission stops."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_unreadable_files(folder, name):
    for parent in folder.parents[:2]:
        parent.chmod(0o755)  # pytest's own folders are closed to others
    (folder / name).chmod(0)
    try:
        with as_nobody(), refused("ermission"):
            hasten.load(folder)
    finally:
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"type": "BPE"}}', "\ud7ff"])
def test_a_broken_tokenizer_is_named(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with refused("tokenizer.json"):
        hasten.load(folder)
