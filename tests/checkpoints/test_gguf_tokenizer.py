"""The tokenizer of a GGUF file splits text as the one it was made of."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, normalizers

from hasten.checkpoints.gguf.header import GGUFFile
from hasten.checkpoints.gguf.tokenizer import SPLITS, read_tokenizer, tokenizer_entries
from hasten.errors import CheckpointError, ConfigError
from hasten.text.tokenizer import Tokenizer
from tiny_model import TEMPLATE
from tokenizer_folders import LINES, TEXTS, byte_level, llama_like

MORE = [
    "I'VE 12345 don't 3.14",
    "x  \n\n y\t\tz ",
    "Ünïcode ﬀ ½ ² 한국어 👩‍👩‍👧 \u200d",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def there_and_back(tokenizer, tmp_path, rows=400):
    """Read what was written; lists of numbers as the header's reader gives them."""
    entries = {
        key: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in tokenizer_entries(tokenizer, rows).items()
    }
    return read_tokenizer(GGUFFile(tmp_path / "x.gguf", entries, {}, None))


def assert_same(found, expected):
    for text in [*TEXTS, *MORE]:
        for special in (True, False):
            ids = expected.encode(text, add_special_tokens=special)
            assert found.encode(text, add_special_tokens=special) == ids
            assert found.decode(ids) == expected.decode(ids)
    assert (found.bos_id, found.eos_ids[:1], found.pad_id) == (expected.bos_id, expected.eos_ids, expected.pad_id)
    assert found.chat_template == expected.chat_template


BYTE_LEVEL = [
    "gpt-2",
    "smollm",
    "llama-bpe",
    "qwen2",
    "tekken",
    "dbrx",
    "glm4",
    "qwen35",
    "seed-coder",
    "gpt-4o",
    "deepseek-v3",
    "deepseek-llm",
    "kimi-k2",
    "youtu",
]


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_tokenizers_come_back(pre, tmp_path):
    backend = byte_level()
    SPLITS[pre].apply(backend)
    model = backend.model
    model.ignore_merges = SPLITS[pre].ignore_merges
    backend.model = model
    template = {"chat_template": TEMPLATE, "pad_token": "<|end|>"}
    expected = Tokenizer.from_tokenizers(backend, bos_token="<|begin|>", eos_token="<|im_end|>", **template)
    found = there_and_back(expected, tmp_path)
    # GLM 4 differs from Llama 3 in the BOS alone, which a file states by itself.
    assert tokenizer_entries(expected, 400)["tokenizer.ggml.pre"] == {"glm4": "llama-bpe"}.get(pre, pre)
    assert_same(found, expected)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_back_with_its_merges(prefix, tmp_path):
    backend = llama_like()
    if not prefix:  # as Gemma: no space before a text
        backend.normalizer = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
    expected = Tokenizer.from_tokenizers(backend, bos_token="<s>", eos_token="</s>")
    assert tokenizer_entries(expected, 400)["tokenizer.ggml.add_space_prefix"] is prefix
    found = there_and_back(expected, tmp_path)
    for text in [*LINES, "the cat", " the  cat ", "é\n", ""]:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text


def test_gemma_4_states_its_merges(tmp_path):
    backend = llama_like()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    expected = Tokenizer.from_tokenizers(backend, bos_token="<s>", eos_token="</s>")
    entries = tokenizer_entries(expected, 400)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    entries |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    entries |= {"tokenizer.ggml.token_type": np.array(entries["tokenizer.ggml.token_type"])}
    del entries["tokenizer.ggml.scores"]
    found = read_tokenizer(GGUFFile(tmp_path / "x.gguf", entries, {}, None))
    for text in [*LINES, "the cat", " the  cat ", "é\n", ""]:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text


def test_merges_of_tokens_with_equal_scores_come_back(tmp_path):
    tokens = ["<unk>", *"abcd▁", "ab", "bc", "cd", "abc", "bcd", "abcd"]
    entries = {"model": "llama", "tokens": tokens, "scores": np.array([0.0] * 6 + [-5.0] * 3 + [-5.0, -6.0, -6.0])}
    entries |= {"bos_token_id": 0, "eos_token_id": 0, "unknown_token_id": 0}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    expected = read_tokenizer(GGUFFile(tmp_path / "x.gguf", metadata, {}, None))
    found = there_and_back(expected, tmp_path, rows=len(tokens))
    assert json.loads(found.backend.to_str())["model"] == json.loads(expected.backend.to_str())["model"]


def test_others_are_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ConfigError, match=r"llama.cpp has no tokenizer that splits text as this one does"):
        tokenizer_entries(Tokenizer.from_tokenizers(words), 4)
    with pytest.raises(ConfigError, match="the tokenizer has 318 tokens and the embedding 30 rows"):
        tokenizer_entries(Tokenizer.from_tokenizers(byte_level()), 30)

    def read(**changes):
        entries = tokenizer_entries(Tokenizer.from_tokenizers(byte_level()), 318)
        entries |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        del entries["tokenizer.ggml.token_type"]
        return read_tokenizer(GGUFFile(tmp_path / "x.gguf", entries, {}, None))

    assert read().vocab_size == 318
    assert read(model="no_vocab") is None
    for changes, words in [
        ({"model": "bert"}, "model is 'bert'; gpt2, llama and gemma4 are read"),
        ({"pre": "frobnicate"}, "pre is 'frobnicate'; known are gpt-2"),
        ({"tokens": ["a", "a"]}, "none of them twice"),
        ({"merges": ["a"]}, "must be a list of two tokens each"),
        ({"merges": ["zz yy"]}, "its tokenizer does not fit together"),
        ({"eos_token_id": 318}, "eos_token_id is 318; there are 318 tokens"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            read(**changes)


@pytest.mark.parametrize("call", [True, False])
def test_the_end_of_a_message_ends_no_answer_in_harmony(call, tmp_path):
    tokens = ["a", "b", "<|end|>", "<|return|>", "<|call|>" if call else "<|other|>", "<|endoftext|>", "ab"]
    entries = {"model": "gpt2", "pre": "gpt-4o", "tokens": tokens, "token_type": np.array([1, 1, 3, 3, 3, 3, 1])}
    entries |= {"merges": ["a b"], "bos_token_id": 5, "eos_token_id": 3, "eot_token_id": 2}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    found = read_tokenizer(GGUFFile(tmp_path / "x.gguf", metadata, {}, None))
    assert set(found.eos_ids) == ({3, 4, 5} if call else {2, 3, 5})
