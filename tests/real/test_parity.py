"""Published models beside transformers, in float32: tokens of many scripts, logits, greedy text."""

import random
import unicodedata

import pytest
import torch

import hasten
from hasten.checkpoints.gguf.open import open_gguf
from hasten.model.context import TrainingContext
from real_models import TEXT

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LINES = 2000
SCRIPTS = (
    "LATIN GREEK CYRILLIC ARMENIAN HEBREW ARABIC SYRIAC DEVANAGARI BENGALI GURMUKHI GUJARATI TAMIL TELUGU KANNADA",
    "MALAYALAM SINHALA THAI LAO TIBETAN MYANMAR GEORGIAN HANGUL ETHIOPIC CHEROKEE KHMER MONGOLIAN HIRAGANA KATAKANA",
    "CJK DIGIT MATHEMATICAL CURRENCY ARROW EMOJI",
)
# What tokenizers split on, normalize or treat as one: spaces, joined emoji, combining marks, contractions, numbers.
ODD = (
    "  two  spaces", "tab\there", "\u00a0no-break\u3000wide", "e\u0301 ﬁ ½ Ⅷ ａｂｃ", "👍🏽 ❤\ufe0f 🇫🇷",
    "👩\u200d👩\u200d👧", "I'll don't WE'VE it's", "12345 3.14 1,000,000 0x1F ٣٤٥", "snake_case CamelCase x+=1;",
    "<|im_start|>user", "<bos>", "\u202eright to left\u202c", "a\u200bb\ufeffc", "\x00\x1f\x7f", "ﷺ 한글 \U0001f9ff",
    "...!!?? --- ___ ===", "\r\n \n\n\t\n",
)  # fmt: skip


def alphabets():
    """The letters of each script that Unicode names, without those of no assigned use."""
    found = {name: [] for line in SCRIPTS for name in line.split()}
    for code in (*range(0x21, 0x3100), *range(0x4E00, 0x5200), *range(0xAC00, 0xB000), *range(0x1D400, 0x1F700)):
        words = set(unicodedata.name(chr(code), "").split(" "))
        for name in found:
            if name in words or (name == "EMOJI" and 0x1F300 <= code < 0x1F650):
                found[name].append(chr(code))
    return {name: letters for name, letters in found.items() if letters}


def lines():
    """Lines of one to three scripts each, the same in every run: words of random letters, odd pieces, book text."""
    draw, letters, book = random.Random(0), alphabets(), TEXT.split("\n\n")
    assert len(letters) > 30
    for number in range(LINES):
        pieces = []
        for script in draw.sample(sorted(letters), draw.randint(1, 3)):
            for _ in range(draw.randint(1, 5)):
                pieces.append("".join(draw.choices(letters[script], k=draw.randint(1, 9))))
        if number % 3 == 0:
            pieces.insert(draw.randrange(len(pieces)), draw.choice(ODD))
        if number % 5 == 0:
            start = draw.randrange(200)
            pieces.append(draw.choice(book)[start : start + 80])
        yield draw.choice(" .,\n").join(pieces) if number % 7 == 0 else " ".join(pieces)


@pytest.fixture(scope="module")
def reference(real):
    """transformers' model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(real):
    """Ours, from the same folder."""
    return hasten.load(real.folder, dtype="float32")


def logits(model, tokens):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.inference_mode():
        return model(tokens, torch.arange(tokens.shape[1])[None], context)[0]


@pytest.mark.parametrize("source", ["folder", "file"])
def test_tokens_of_many_scripts_are_those_of_transformers(real, ours, source):
    theirs = transformers.AutoTokenizer.from_pretrained(real.folder)
    tokenizer = ours.tokenizer if source == "folder" else open_gguf(real.file).tokenizer
    texts = list(lines())
    expected = theirs(texts)["input_ids"]
    wrong = [text for text, ids in zip(texts, expected, strict=True) if tokenizer.encode(text) != ids]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ: {wrong[:3]!r}"
    assert tokenizer.decode(expected[0]) == theirs.decode(expected[0], skip_special_tokens=True)


def test_logits_err_no_more_than_those_of_transformers(real, reference, ours):
    tokens = torch.tensor([ours.tokenizer.encode(TEXT)[:192]])
    with torch.inference_mode():
        theirs = reference(tokens).logits[0]
        exact = transformers.AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.float64)(tokens).logits[0]
    found = logits(ours, tokens)
    assert torch.equal(found.argmax(-1), theirs.argmax(-1))
    error, theirs_error = (float((one - exact).abs().max()) for one in (found, theirs))
    assert error <= 2 * theirs_error, f"largest error {error:.2g}; transformers' {theirs_error:.2g}"


def test_greedy_text_is_that_of_transformers(reference, ours):
    prompt = ours.tokenizer.encode(TEXT)[:40]
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)[0, len(prompt) :]
    params = hasten.SamplingParams(temperature=0, max_new_tokens=64, min_new_tokens=64)
    assert list(hasten.generate(ours, [prompt], params)[0].tokens) == expected.tolist()
