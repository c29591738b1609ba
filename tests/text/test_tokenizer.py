"""Tokenizer folders and chat templates give what transformers' AutoTokenizer gives; bad ones one clear error."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import CheckpointError, ConfigError, DataError
from hasten.text.tokenizer import Tokenizer
from tokenizer_folders import (
    FAST,
    LINES,
    LLAMA,
    TRAINED,
    assert_as_transformers,
    byte_level,
    llama_like,
    load,
    transformers,
    write,
)


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (byte_level, FAST),
        (byte_level, FAST | {"eos_token": "<|end|>", "bos_token": "<|begin|>", "add_bos_token": True}),
        (byte_level, FAST | {"eos_token": "<|end|>", "pad_token": "<|new_pad|>"}),  # a token the vocabulary lacks
        (byte_level, FAST | {"additional_special_tokens": ["the", "<|x|>"], "split_special_tokens": False}),
        (byte_level, FAST | {"added_tokens_decoder": {"340": {"content": "cat sat", "lstrip": True}}}),
        (llama_like, FAST | LLAMA),
        (llama_like, LLAMA | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}),
        (llama_like, LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "add_eos_token": True}),
        (llama_like, LLAMA | {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    ],
)
def test_a_folder_encodes_as_transformers_does(tmp_path: Path, make: object, config: dict) -> None:
    assert_as_transformers(write(tmp_path, make(), tokenizer_config=config))  # type: ignore[operator]


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_model_type_decides_about_llamas_spaces_as_in_transformers(tmp_path: Path, model_type: str) -> None:
    config = LLAMA | {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    write(tmp_path, llama_like(), tokenizer_config=config, config={"model_type": model_type})
    ours = assert_as_transformers(tmp_path)
    after_special = ours.encode("</s>the", add_special_tokens=False)
    assert (ours.backend.token_to_id("▁the") in after_special) == (model_type == "mistral")


def test_tokens_from_special_tokens_map_and_added_tokens(tmp_path: Path) -> None:
    write(
        tmp_path,
        byte_level(),
        tokenizer_config=FAST,
        special_tokens_map={"eos_token": {"content": "<|end|>", "lstrip": False}, "pad_token": "<|end|>"},
    )
    ours = assert_as_transformers(tmp_path)
    assert ours.pad_id == ours.eos_ids[0]


def test_truncation_and_padding_saved_in_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert_as_transformers(write(tmp_path, backend, tokenizer_config=FAST | {"pad_token": "<|end|>"}))


def gpt2_folder(folder: Path, **config: object) -> Path:
    backend = byte_level(special=["<|endoftext|>"])
    content = json.loads(backend.to_str())
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return write(folder, None, vocab=content["model"]["vocab"], config={"model_type": "gpt2"}, tokenizer_config=config)


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_prefix_space": True}])
def test_gpt2_layout(tmp_path: Path, config: dict) -> None:
    ours = assert_as_transformers(gpt2_folder(tmp_path, **config))
    ours.save(tmp_path / "copy")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == [
        "merges.txt",
        "tokenizer_config.json",
        "vocab.json",
    ]


def test_end_ids_of_every_file_are_put_together(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"eos_token": "<|end|>"})
    assert load(tmp_path).eos_ids == (1,)
    write(tmp_path, None, generation_config={"eos_token_id": [3, 1]}, config={"eos_token_id": 2, "bos_token_id": 0})
    assert load(tmp_path).eos_ids == (1, 3)
    assert load(tmp_path).bos_id == 0
    write(tmp_path, None, generation_config={}, tokenizer_config=FAST)
    assert load(tmp_path).eos_ids == (2,)
    write(tmp_path, None, config={"text_config": {"eos_token_id": [2, 3]}})
    assert load(tmp_path).eos_ids == (2, 3)
    write(tmp_path, None, config={})
    assert load(tmp_path).eos_ids == ()


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_byte_level_text_survives(text: str) -> None:
    assert TRAINED.decode(TRAINED.encode(text)) == text


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen3", "gemma2", "phi3"])
def test_a_trained_tokenizer_saved_is_the_same_in_transformers(tmp_path: Path, model_type: str) -> None:
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    trained = Tokenizer.from_tokenizers(
        byte_level(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=template
    )
    trained.save(tmp_path / "deep" / "folder")
    folder = write(tmp_path / "deep" / "folder", None, config={"model_type": model_type})
    again = assert_as_transformers(folder)
    assert again.digest == trained.digest
    assert again.chat_template == template
    assert len(list(folder.iterdir())) == 3  # no temporary file is left


def test_a_folders_files_are_copied_unchanged(tmp_path: Path) -> None:
    source = write(tmp_path / "a", byte_level(), tokenizer_config=FAST | {"odd": [1]}, config={}, special_tokens_map={})
    (source / "chat_template.jinja").write_bytes(b"{{ messages[0].content }}\r\n")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }}")
    tokenizer = load(source)
    tokenizer.save(tmp_path / "b")
    copied = [p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file()]
    assert len(copied) == 5
    assert all((source / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in copied)
    tokenizer.save(source)  # onto itself
    tokenizer.with_chat_template("new").save(tmp_path / "b")
    assert load(tmp_path / "b").chat_template == "new"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b").chat_template["default"] == "new"
    (source / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be copied"):
        tokenizer.save(tmp_path / "c")


def test_digest_follows_what_decides_the_ids() -> None:
    assert TRAINED.digest == Tokenizer.from_tokenizers(byte_level(), bos_token="<|begin|>", eos_token="<|end|>").digest
    assert TRAINED.digest == TRAINED.with_chat_template("x").digest
    assert TRAINED.digest != Tokenizer.from_tokenizers(byte_level(), eos_token="<|end|>").digest
    other = byte_level()
    other.add_tokens(["cat sat"])
    assert TRAINED.digest != Tokenizer.from_tokenizers(other, bos_token="<|begin|>", eos_token="<|end|>").digest


def test_it_can_be_sent_to_a_worker_process() -> None:
    tokenizer = TRAINED.with_chat_template("{{ messages[0].content }}")
    tokenizer.render_chat([{"role": "user", "content": "x"}])
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(LINES[0]) == tokenizer.encode(LINES[0])
    assert copy.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_what_cannot_be_tokenized() -> None:
    with pytest.raises(DataError, match="character 1"):
        TRAINED.encode("a\ud800")
    with pytest.raises(DataError, match="found bytes"):
        TRAINED.encode_batch(["a", b"b"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="eos_token '<nope>'"):
        Tokenizer.from_tokenizers(byte_level(), eos_token="<nope>")
    assert TRAINED.decode([10**6, 4]) == TRAINED.decode([4])  # an id of the embedding's padding


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write(tmp_path, None, config={"eos_token_id": 1}, tokenizer_config=FAST)) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_foreign_format_says_how_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a\x0e")
    with pytest.raises(CheckpointError, match=r"AutoTokenizer\.from_pretrained\(.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_vocab_and_merges_of_another_class_are_not_guessed(tmp_path: Path) -> None:
    gpt2_folder(tmp_path, tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(CheckpointError, match="how Qwen2Tokenizer splits words"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="how qwen2 splits words"):
        Tokenizer.from_folder(write(tmp_path, None, config={"model_type": "qwen2"}, tokenizer_config={}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"version": "1.0", "model": {"type": "Magic"}}',
        b'{"model": ' + b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"version":"1.0","added_tokens":[],"model":{"type":"Unigram","unk_id":7,"vocab":[["a",0.0]]}}',
    ],
)
def test_a_malformed_tokenizer_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", []),
        ("tokenizer_config", {"eos_token": 5}),
        ("tokenizer_config", {"chat_template": 5}),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"1": {}}}),
        ("tokenizer_config", {"added_tokens_decoder": [1]}),
        ("generation_config", {"eos_token_id": "2"}),
        ("generation_config", {"eos_token_id": [True]}),
        ("config", {"bos_token_id": -1}),
        ("added_tokens", {"a": "b"}),
    ],
)
def test_a_malformed_side_file_is_named(tmp_path: Path, name: str, content: object) -> None:
    write(tmp_path, byte_level(), **{name: content})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointError, match="too large"):
        Tokenizer.from_folder(tmp_path)
