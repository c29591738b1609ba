"""Small corpora and a chat model's tokenizer, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hasten.data import train_bpe
from hasten.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_tokenizer(template: str) -> Tokenizer:
    """A byte-level tokenizer with ChatML's special tokens and this template."""
    backend = train_bpe(["hello there, how are you today? fine fine\n" * 20], vocab_size=300).backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer.from_tokenizers(backend, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=template)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], Tokenizer]:
    """A chat tokenizer from a template."""
    return make_chat_tokenizer


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture(scope="session")
def chat_tokenizer() -> Tokenizer:
    return make_chat_tokenizer(CHATML)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 40 little texts of all the plain kinds, some in subfolders."""
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    for number in range(40):
        place = folder / ("deeper" if number % 3 == 0 else ".")
        suffix = (".txt", ".py", ".md")[number % 3]
        text = f"# Text {number}\n\ndef f{number}(x):\n    return x + {number}\n" * (1 + number % 4) + "ende é 漢字\n"
        (place / f"{number:02d}{suffix}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def quick(cache):
    """Settings for a small corpus."""
    return {"vocab_size": 300, "validation_fraction": 0.2, "folder": cache, "progress": False}
