"""Damaged and hostile checkpoints: one clear error each, quickly, without a big allocation, nothing executed."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch

import hasten
from checkpoint_folders import read_raw, tensors, write_folder, write_raw
from hasten.errors import HastenWarning
from hostile_cases import refused

Q = "model.layers.0.self_attn.q_proj.weight"


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def change_header(folder: Path, change) -> Path:
    path = folder / "model.safetensors"
    header, data = read_raw(path)
    change(header)
    write_raw(path, header, data)
    return path


# -- files that are something else ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_refused_and_not_opened(folder, tmp_path, name, protocol):
    trace = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(trace), protocol=protocol)
    pickle.loads(bomb)
    assert trace.exists()  # it is a real bomb
    trace.unlink()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(bomb + bytes(100))
    with refused(name, "pickle", "convert" if name == "model.safetensors" else "Convert"):
        hasten.load(folder)
    assert not trace.exists()


def test_what_torch_save_writes_is_refused(folder):
    torch.save(tensors(), folder / "model.safetensors")
    with refused("model.safetensors", "pickle"):
        hasten.load(folder)


@pytest.mark.parametrize(
    ("start", "word"),
    [(b"GGUF\x03\0\0\0", "GGUF"), (b"version https://git-lfs", "git lfs pull"), (b"<!DOCTYPE ht", "web")],
)
def test_well_known_other_files_are_named(folder, start, word):
    (folder / "model.safetensors").write_bytes(start + bytes(200))
    with refused("model.safetensors", word):
        hasten.load(folder)


def test_things_that_are_not_files_are_refused(folder):
    for name in ("model.safetensors", "config.json"):
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)  # opening it would wait for ever
        with refused(name, "regular file"):
            hasten.load(folder)
        path.unlink()
        path.symlink_to("/dev/zero")  # reading it would never end
        with refused(name, "regular file"):
            hasten.load(folder)
        path.unlink()
        path.mkdir()
        with refused(name, "a folder"):
            hasten.load(folder)
        path.rmdir()
        path.symlink_to(folder / "nowhere")
        with refused(name, "symbolic link"):
            hasten.load(folder)
        path.unlink()
        path.write_bytes(content)
    assert hasten.load(folder).config.hidden_size == 8


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1, -500])
def test_a_truncated_file_is_refused_at_every_length(folder, keep):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    with refused(path):
        hasten.load(folder)


def test_trailing_bytes_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with refused(path, "data", "damaged"):
        hasten.load(folder)


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_is_not_true_is_refused(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with refused(path, f"{length:,}"):
        hasten.load(folder)


def test_a_header_past_the_limit_is_not_read(folder):
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**30))
        file.truncate(2**31)  # a sparse file: it has the length, and nothing in it
    with refused(path, "limit"):
        hasten.load(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[1, 2, 3]",
        b'"text"',
        b"\xff\xfe{}",
        b"{}",
        b'{"x": ' + b"9" * 5000 + b"}",
        b'{"x": {"dtype":"F32"}}',
        b'{"x": null}',
        b'{"x": ENTRY, "x": ENTRY}'.replace(b"ENTRY", b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'),
    ],
)
def test_a_header_that_is_not_one_is_refused(folder, header):
    path = folder / "model.safetensors"
    write_raw(path, header, bytes(4))
    with refused(folder):
        hasten.load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [10**12, 10**12]),
        ("shape", [0, 10**30]),
        ("shape", [-8, -8]),
        ("shape", [10**17] * 100_000),
        ("shape", [8, 8] + [1] * 100_000),
        ("shape", [8.0, 8.0]),
        ("shape", [True, 64]),
        ("shape", "88"),
        ("shape", [64]),
        ("shape", [4, 16]),
        ("shape", [9, 8]),
        ("dtype", 7),
        ("dtype", ["F32"]),
        ("dtype", "I8"),
        ("dtype", "F8_E4M3"),
        ("dtype", "BOOL"),
        ("dtype", "U64"),
        ("dtype", "NEW"),
        ("dtype", "BF16"),
        ("data_offsets", [0]),
        ("data_offsets", [0, 10**12]),
        ("data_offsets", [256, 0]),
        ("data_offsets", [-256, 0]),
        ("data_offsets", [0.0, 256.0]),
        ("data_offsets", None),
    ],
)
def test_a_malformed_entry_is_refused(folder, field, value):
    path = change_header(folder, lambda header: header[Q].update({field: value}))
    with refused(path, Q):
        hasten.load(folder)


@pytest.mark.parametrize("entry", [5, None, [], {}, {"dtype": "F32", "shape": [8, 8]}])
def test_an_entry_that_describes_no_tensor_is_named(folder, entry):
    path = change_header(folder, lambda header: header.update({Q: entry}))
    with refused(path, f"the entry of '{Q}' is malformed"):
        hasten.load(folder)


def test_overlapping_offsets_and_holes_are_refused(folder):
    path = folder / "model.safetensors"
    header, data = read_raw(path)
    other = "model.layers.1.self_attn.q_proj.weight"
    header[Q]["data_offsets"] = header[other]["data_offsets"]
    write_raw(path, header, data)
    with refused(path, "damaged"):
        hasten.load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_weights_of_a_dtype_that_is_not_a_weight_are_refused(tmp_path, dtype):
    weights = tensors()
    weights[Q] = torch.zeros(8, 8).to(dtype)
    folder = write_folder(tmp_path, weights=weights)
    with refused("model.safetensors", Q, "BF16", "unquantized"):
        hasten.load(folder)


def test_a_quantized_folder_says_so_first(tmp_path):
    folder = write_folder(tmp_path, config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with refused("config.json", "quantization_config", "gptq"):
        hasten.load(folder)


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinite_weights_are_refused(tmp_path, value, dtype):
    weights = tensors(dtype=dtype)
    weights[Q][3, 5] = value
    folder = write_folder(tmp_path, weights=weights)
    with refused("model.safetensors", Q, "1 values", "64"):
        hasten.load(folder)


def test_large_finite_weights_are_fine(tmp_path):
    weights = tensors()
    weights[Q].fill_(3e38)  # their sum is not finite
    assert hasten.load(write_folder(tmp_path, weights=weights), dtype="stored").dtype == torch.float32


def test_a_wrong_shape_is_refused(tmp_path):
    weights = tensors() | {Q: torch.zeros(8, 9)}
    with refused("model.safetensors", Q, "[8, 9]", "[8, 8]"):
        hasten.load(write_folder(tmp_path, weights=weights))


def test_a_missing_tensor_is_named(tmp_path):
    weights = tensors()
    del weights[Q]
    with refused(tmp_path, Q, "llama"):
        hasten.load(write_folder(tmp_path, weights=weights))


def test_more_layers_than_the_weights_have(tmp_path):
    with refused("model.layers.2.", "3 layers"):
        hasten.load(write_folder(tmp_path, config={"num_hidden_layers": 3}))


def test_fewer_layers_than_the_weights_have_warns_once(tmp_path):
    with pytest.warns(HastenWarning, match="9 tensors are not part") as caught:
        hasten.load(write_folder(tmp_path, config={"num_hidden_layers": 1}))
    assert len(caught) == 1


# -- shards -----------------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path, shards=3)
    gone = folder / "model-00002-of-00003.safetensors"
    gone.unlink()
    with refused(gone.name, "download or copy"):
        hasten.load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "../model.safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "sub/model.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "",
        ".",
        "..",
        "a\0.safetensors",
        "\ud800.safetensors",
        "a\nb.safetensors",
        "\x1b[31m.safetensors",
        "model.bin",
        "x" * 5000 + ".safetensors",
    ],
)
def test_an_index_names_only_files_of_its_folder(tmp_path, name):
    folder = write_folder(tmp_path / "model", shards=2)
    write_folder(tmp_path)  # what ../model.safetensors would reach
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q] = name
    path.write_text(json.dumps(index))
    with refused(folder):
        hasten.load(folder)


@pytest.mark.parametrize("value", [None, [], "x", {Q: 3}, {Q: None}, {}])
def test_a_malformed_index_is_refused(tmp_path, value):
    folder = write_folder(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with refused(folder):
        hasten.load(folder)


def test_an_index_that_names_a_tensor_its_file_lacks(tmp_path):
    folder = write_folder(tmp_path, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q] = next(file for file in index["weight_map"].values() if file != index["weight_map"][Q])
    path.write_text(json.dumps(index))
    with refused(path, Q):
        hasten.load(folder)
