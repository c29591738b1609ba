"""Damaged and hostile checkpoints: one clear error each, quickly, without a big allocation, nothing executed."""

import json
import os
import pickle
import struct
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hasten
from checkpoint_folders import CONFIG, read_raw, tensors, write_folder, write_raw
from hasten.errors import CheckpointError, HastenError, HastenWarning
from hasten.machine import PeakMemory

CPU_SECONDS = 2.0
BYTES = 50_000_000
Q = "model.layers.0.self_attn.q_proj.weight"


@contextmanager
def refused(*words, kind=CheckpointError):
    """The block raises one typed error that says all these words, cheaply."""
    start = time.process_time()
    with PeakMemory() as peak, pytest.raises(kind) as caught:
        yield
    assert time.process_time() - start < CPU_SECONDS
    assert peak.bytes < BYTES
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    for word in words:
        assert str(word) in message, message


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
def test_a_malformed_entry_is_refused_and_named(folder, field, value):
    path = change_header(folder, lambda header: header[Q].update({field: value}))
    with refused(path, Q):
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
    assert hasten.load(write_folder(tmp_path, weights=weights)).dtype == torch.float32


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


# -- anything at all --------------------------------------------------------------------------------------------------


def load_or_refuse(folder: Path) -> None:
    """Loading works, or raises our own error: never another."""
    try:
        hasten.load(folder)
    except HastenError as error:
        message = str(error)
        assert message


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("fuzz"))
    return folder, (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()


FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=6))
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_any_change_of_header_bytes_loads_or_is_refused(sound, changes):
    folder, weights, config = sound
    raw = bytearray(weights)
    for place, value in changes:
        raw[place] = value
    (folder / "model.safetensors").write_bytes(raw)
    (folder / "config.json").write_bytes(config)
    load_or_refuse(folder)


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 330), st.integers(0, 127)), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_any_change_of_config_bytes_loads_or_is_refused(sound, changes):
    folder, weights, config = sound
    raw = bytearray(config)
    for place, value in changes:
        raw[place % len(raw)] = value
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_bytes(raw)
    load_or_refuse(folder)


ROPE_FIELDS = ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "attention_factor"]
ROPE_FIELDS += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"]
ROPE_FIELDS += ["original_max_position_embeddings", "partial_rotary_factor", "full_attention", "sliding_attention"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["linear", "llama3", "yarn", "longrope", "su", "default", "relu", 1, 2, 4, 8]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(ROPE_FIELDS),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)
FIELDS = [*CONFIG, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window"]
FIELDS += ["max_window_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"]
FIELDS += ["decoder_sparse_step", "n_embd", "n_head", "n_layer", "n_positions", "n_inner", "multi_query", "rope_theta"]
FIELDS += ["query_pre_attn_scalar", "attn_logit_softcapping", "original_max_position_embeddings", "hidden_activation"]
FAMILY_NAMES = ["llama", "gpt2", "gpt_bigcode", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral"]
FAMILY_NAMES += ["qwen3_moe"]


@settings(FUZZ, max_examples=400)
@given(
    family=st.sampled_from(FAMILY_NAMES),
    changes=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
)
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_any_values_of_config_fields_load_or_are_refused(sound, family, changes):
    folder, weights, _ = sound
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes | {"model_type": family}))
    load_or_refuse(folder)
