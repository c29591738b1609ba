"""Tokenizers and their folders, for the tests of tokenizers and of chat templates."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hasten.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

LINES = ["the cat sat on the mat, didn't it?", "naïve café — 東京 🙂", "  def f(x):\n\treturn x + 12345\n\n"]
TEXTS = [*LINES, "", " ", "a<|end|>b", "<s>hi</s>there</s> x", "the\x00cat\r\n", "e\u0301 ﬁ \u00a0 x"]
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}


def byte_level(*, special: list[str] | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = special or ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, initial_alphabet=alphabet)
    backend.train_from_iterator(LINES * 4, trainer)
    return backend


def llama_like() -> tokenizers.Tokenizer:
    """As Llama 2's own tokenizer.json: prepending normalizer, byte fallback, BOS by the post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *"acdehinostfx", "▁t", "▁c", "he", "▁the", "at", "▁cat", "é"]
    merges = [("▁", "t"), ("▁", "c"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁c", "at")]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *words])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer | None, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def assert_as_transformers(folder: Path) -> Tokenizer:
    ours, theirs = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.bos_id == theirs.bos_token_id
    assert (ours.eos_ids[:1] or (None,))[0] == theirs.eos_token_id
    assert ours.pad_id == theirs.pad_token_id
    return ours


TRAINED = Tokenizer.from_tokenizers(byte_level(), bos_token="<|begin|>", eos_token="<|end|>")
