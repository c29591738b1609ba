"""A damaged or hostile GGUF file is refused by one error of ours, before anything is allocated for its claims."""

import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hasten
from hasten.checkpoints.gguf.architectures import ARCHITECTURES
from hasten.checkpoints.gguf.config import config_values
from hasten.checkpoints.gguf.header import GGUFFile, GGUFTensor, read_gguf
from hasten.checkpoints.gguf.names import place_of
from hasten.checkpoints.gguf.open import open_gguf
from hasten.checkpoints.gguf.tokenizer import read_tokenizer
from hasten.checkpoints.gguf.types import TYPES
from hasten.checkpoints.gguf.write import Item, config_entries, write_gguf
from hasten.errors import CheckpointError, HastenError
from hasten.model.families import read_config
from hasten.model.families.family import parameter_names
from hostile_cases import CPU_SECONDS, refused
from references import IN_GGUF, state, stated, values_of
from tiny_model import tiny_llama

HUGE = (1 << 64) - 1


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name, shape, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(entries=(), tensors=(), *, version=3, counts=None):
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join([*entries, *tensors])


NUMBER = entry("a", 4, struct.pack("<I", 1))
CASES = {
    "empty": (b"", "is not a GGUF file"),
    "another": (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
    "big-endian": (header(version=3 << 24), "it is big-endian"),
    "version 1": (header(version=1), "of version 1, and 2 and 3 are read"),
    "tensors claimed": (header(counts=(HUGE, 0)), "it claims 18,446,744,073,709,551,615 tensors"),
    "entries claimed": (header(counts=(0, 65_000)), "it claims 65,000 metadata entries"),
    "long key": (header([struct.pack("<QI", 1 << 40, 4) + bytes(20)]), "it claims 1,099,511,627,776 bytes of text"),
    "not UTF-8": (header([text(b"\xff\xfe") + bytes(12)]), "is not UTF-8"),
    "twice": (header([NUMBER, NUMBER]), "the metadata entry 'a' is in it twice"),
    "type": (header([entry("a", 13, bytes(9))]), "'a' is of the unknown type 13"),
    "nested": (header([entry("a", 9, struct.pack("<IQ", 9, 1) + bytes(40))]), "'a' is a list of lists"),
    "array type": (header([entry("a", 9, struct.pack("<IQ", 99, 1))]), "'a' is of the unknown type 99"),
    "array count": (header([entry("a", 9, struct.pack("<IQ", 6, 1 << 60))]), "numbers in a"),
    "text count": (header([entry("a", 9, struct.pack("<IQ", 8, 1 << 20))]), "it claims 1,048,576 texts in a"),
    "cut": (header([NUMBER], counts=(0, 2)) + bytes(9), "it claims"),
    "alignment": (header([entry("general.alignment", 4, struct.pack("<I", 3))]), "alignment is 3, no power of two"),
    "split": (
        header([entry("split.count", 2, struct.pack("<H", 3)), entry("split.no", 2, struct.pack("<H", 1))]),
        "is one of 3 parts of a model, and parts are found by their names: call this one NAME-00002-of-00003.gguf",
    ),
    "rank": (header(tensors=[tensor("t", (1,) * 5)]), "'t' has 5 dimensions"),
    "no numbers": (header(tensors=[tensor("t", (0, 4))]), "'t' has the shape [4, 0]"),
    "shape": (header(tensors=[tensor("t", (1 << 40, 1 << 40))]), "'t' has the shape"),
    "Q1_0": (header(tensors=[tensor("t", (256,), 41)]), "'t' is of type Q1_0, which hasten does not read"),
    "unknown type": (header(tensors=[tensor("t", (256,), 1 << 31)]), "'t' is of type 2147483648"),
    "rows": (header(tensors=[tensor("t", (100,), 2)]), "'t' has rows of 100 numbers, which Q4_0 cannot hold"),
    "offset": (header(tensors=[tensor("t", (8,), 0, 32)]) + bytes(200), "'t' begins at byte 32"),
    "overlap": (header(tensors=[tensor("t", (8,)), tensor("u", (8,))]) + bytes(200), "'u' begins at byte 0"),
    "same name": (header(tensors=[tensor("t", (8,)), tensor("t", (8,), 0, 32)]) + bytes(99), "'t' is in it twice"),
    "past the end": (header(tensors=[tensor("t", (1 << 30,))]), "'t' ends at byte 4,294,96"),
    "behind the last": (header(tensors=[tensor("t", (8,))]) + bytes(99), "bytes follow the last tensor"),
    "no architecture": (header([NUMBER]), "general.architecture is None; hasten knows llama"),
    "architecture": (header([entry("general.architecture", 8, text("mamba"))]), "general.architecture is 'mamba'"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_header_is_refused_cheaply(name, tmp_path):
    raw, words = CASES[name]
    (tmp_path / "x.gguf").write_bytes(raw)
    with refused(tmp_path / "x.gguf", words):
        hasten.load(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file, its bytes, and how many of them are its header."""
    pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
    from hasten.checkpoints.gguf.write import write_gguf

    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    model = tiny_llama(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    write_gguf(model, path, "Q4_0")
    return path, path.read_bytes(), path.stat().st_size - len(read_gguf(path).data[0])


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_any_change_of_bytes_loads_or_is_refused(sound, data):
    path, raw, size = sound
    damaged = bytearray(raw)
    # Two thirds where names, counts and types stand; the vocabulary and the merges fill the rest.
    places = st.integers(0, 1500) | st.integers(size - 1500, size - 1) | st.integers(0, len(raw) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        damaged[place] = value
    path.write_bytes(damaged[: data.draw(st.sampled_from([len(raw)] * 4 + [size, size // 2, 100]))])
    try:
        hasten.load(path)
    except HastenError as error:
        message = str(error)
        assert str(path) in message


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length", "llama.attention.head_count"])
@pytest.mark.parametrize("claim", [0, 1000, (1 << 32) - 1])
def test_a_config_of_another_model_is_refused_cheaply(sound, key, claim):
    path, raw, _ = sound
    place = raw.index(key.encode()) + len(key) + 4
    path.write_bytes(raw[:place] + struct.pack("<I", claim) + raw[place + 4 :])
    with refused(path):
        hasten.load(path)


@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_scales_that_are_not_finite_are_refused(sound):
    path, raw, size = sound
    for name in ("blk.0.ffn_up.weight", "token_embd.weight", "output_norm.weight"):
        path.write_bytes(raw)
        begin = size + read_gguf(path).tensors[name].begin
        path.write_bytes(raw[:begin] + b"\xff\xff\xff\xff" + raw[begin + 4 :])
        with refused("values that are NaN or infinite"):
            hasten.load(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.expert_count", np.array([1, 2]), "llama.expert_count must be a number; found array([1, 2])"),
        ("llama.embedding_length", "abc", "llama.embedding_length must be a number; found 'abc'"),
        ("llama.rope.scaling.factor", float("nan"), "llama.rope.scaling.factor must be a number; found nan"),
        ("llama.rope.scaling.type", np.array([], int), "llama.rope.scaling.type must be a text"),
        ("llama.expert_count", 4000, "blk.0.ffn_gate_exps.weight must be the matrices of 4000 experts; found none"),
        ("llama.rope.dimension_count", 5, "llama.rope.dimension_count is 5; it must be even"),
        ("tokenizer.ggml.model", np.array([1, 2]), "tokenizer.ggml.model is array([1, 2]), and no str"),
        ("tokenizer.chat_template", 5, "tokenizer.chat_template is 5, and no str"),
        (
            "tokenizer.ggml.add_bos_token",
            np.array([1, 2]),
            "tokenizer.ggml.add_bos_token is array([1, 2]), and no bool",
        ),
    ],
)
def test_metadata_of_another_type_are_refused(sound, key, value, words, monkeypatch):
    path, raw, _ = sound
    path.write_bytes(raw)
    file = read_gguf(path)
    used = {"llama.expert_used_count": 2}
    changed = GGUFFile(path, dict(file.metadata) | used | {key: value}, file.tensors, file.data)
    monkeypatch.setattr("hasten.checkpoints.gguf.open.read_gguf", lambda _: changed)
    with refused(words):
        open_gguf(path)


def test_experts_without_their_tensors_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(stated("gpt_oss", monkeypatch), path)
    file, bias, sinks = read_gguf(path), "blk.1.ffn_up_exps.bias", "blk.1.attn_sinks.weight"
    rest = {name: tensor for name, tensor in file.tensors.items() if name not in (bias, sinks)}
    for tensors, words in [
        (rest, f"{bias} must be the biases of 6 experts; found none"),
        (rest | {bias: replace(file.tensors[bias], shape=(5, 96))}, "the biases of 6 experts; found [5, 96]"),
        (rest | {bias: replace(file.tensors[bias], shape=(576,))}, "the biases of 6 experts; found [576]"),
        (rest | {bias: file.tensors[bias]}, "the tensor 'model.layers.1.self_attn.sinks' is missing"),
    ]:
        changed = GGUFFile(path, file.metadata, tensors, file.data)
        monkeypatch.setattr("hasten.checkpoints.gguf.open.read_gguf", lambda _, changed=changed: changed)
        with refused(words):
            hasten.load(path)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_gemma_whose_sizes_are_texts_is_refused(sound, architecture):
    path, raw, _ = sound
    path.write_bytes(raw)
    file = read_gguf(path)
    entries = {key.replace("llama.", f"{architecture}."): value for key, value in file.metadata.items()}
    entries |= {f"{architecture}.block_count": {"gemma2": 46, "gemma3": 62}[architecture]}
    entries |= {"general.architecture": architecture, f"{architecture}.attention.sliding_window": 8}
    with refused(f"{architecture}.embedding_length must be a number; found 'abc'"):
        config_values(GGUFFile(path, entries | {f"{architecture}.embedding_length": "abc"}, file.tensors, file.data))


HOSTILE = [True, "abc", -1, 0, 10**9, HUGE, 1e300, float("nan"), np.array([1, 2]), np.array([], int), ["a", "b"]]
# Keys that the rows of `ARCHITECTURES` look up themselves.
LOOKED_UP = {"expert_gating_func", "expert_weights_norm", "nextn_predict_layers", "attention.sliding_window"}
LOOKED_UP |= {"attention.sliding_window_pattern", "attention.scale", "expert_shared_feed_forward_length", "block_count"}
LOOKED_UP |= {"ssm.inner_size", "attention.recurrent_layers", "attention.head_count_kv", "feed_forward_length"}
LOOKED_UP |= {"attention.key_length_mla", "attention.value_length", "expert_group_count", "expert_group_used_count"}
LOOKED_UP |= {"rope.dimension_count", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier", "expert_count"}


@pytest.mark.parametrize("name", [name for name in IN_GGUF if "-" not in name])
def test_hostile_metadata_of_each_architecture_load_or_are_refused(name, monkeypatch):
    config = read_config(values_of(state(name, monkeypatch)))
    shape = (config.vocab_size, config.hidden_size)
    names = [name for name in parameter_names(config) if name != "head.weight" or not config.tie_embeddings]
    places = dict.fromkeys(place_of(name, config).name for name in names)
    tensors = {place: GGUFTensor(place, TYPES["F32"], shape) for place in places}
    path = Path("x.gguf")
    entries = config_entries(config, [Item(one, lambda: np.zeros(0)) for one in tensors.values()], path)
    architecture = entries["general.architecture"]
    assert read_config(config_values(GGUFFile(path, entries, tensors, ()))).layers == config.layers
    refusals = 0
    for key in sorted(LOOKED_UP | set(ARCHITECTURES[architecture].numbers)):
        for value in HOSTILE:
            changed = GGUFFile(path, entries | {f"{architecture}.{key}": value}, tensors, ())
            start = time.process_time()
            try:
                read_config(config_values(changed))
            except CheckpointError as error:
                message = str(error)
                assert len(message) < 1000
                refusals += 1
            assert time.process_time() - start < CPU_SECONDS
    assert refusals > len(HOSTILE)


def grid(size):
    """A vocabulary of which each token is made of others in as many ways as it has characters."""
    tokens = ["<unk>", *("a" * i + "b" * j for i in range(size) for j in range(size) if i + j)]
    entries = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    return GGUFFile(Path("x.gguf"), entries, {}, None)


def test_tokens_of_one_another_are_refused_before_their_merges_fill_the_memory():
    assert read_tokenizer(grid(20)) is not None
    file = grid(150)  # 3.4 MB of text, 3.3 million merges
    with refused("x.gguf: its tokenizer", "22,500 tokens can be made of one another in too many ways"):
        read_tokenizer(file)


def test_memory_that_runs_out_is_not_taken_for_a_fault_of_the_tokenizer(monkeypatch):
    def full(*arguments):
        raise MemoryError

    monkeypatch.setattr("hasten.checkpoints.gguf.tokenizer.merges_of", full)
    with pytest.raises(MemoryError):
        read_tokenizer(grid(3))
