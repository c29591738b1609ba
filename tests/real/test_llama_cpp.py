"""llama.cpp predicts what we do from the GGUF files that we write, of each of its architectures, and splits text so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import hasten
from hasten.checkpoints.gguf.architectures import OF_FAMILY
from hasten.checkpoints.gguf.tokenizer import SPLITS, tokenizer_entries
from hasten.checkpoints.gguf.write import write_gguf
from hasten.model.context import TrainingContext
from hasten.text.tokenizer import Tokenizer
from references import IN_GGUF, stated
from tiny_model import tiny_llama
from tokenizer_folders import TEXTS, byte_level

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "xllamacpp_answers.py"
PROMPT = [5, 17, 42, 8, 99, 3, 71, 23, 64, 12, 55, 31, 77, 9, 33]
VOCABULARY = 400
COMPARED = [name for name in IN_GGUF if name != "phi3-window"]  # llama.cpp has no window in a Phi-3, whatever is stated
MORE = ["I'VE 12345 don't 3.14 we'll", "x  \n\n y\t\tz ", "Ünïcode ﬀ ½ ² 한국어 👩‍👩‍👧 \u200d", "\r\n a\x7f", "   "]
# Activations are rounded to float16 in llama.cpp, by 1 / 2048 at most, in each of a few layers.
ROUNDING = 0.01


def ask(wheel, files, *, prompt=(), texts=()):
    """What llama.cpp makes of each file, in one process."""
    questions = json.dumps({"files": [str(file) for file in files], "prompt": list(prompt), "texts": list(texts)})
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env=environment, input=questions, capture_output=True, text=True)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(found) == len(files), f"llama.cpp ended at {files[len(found)]}: {done.stderr[-2000:]}"
    return found


def words():
    """A tokenizer whose tokens are ASCII: of others the server tells no probabilities until a character is whole."""
    vocabulary = {"a": 0, "b": 1, "ab": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.from_tokenizers(backend, bos_token="a", eos_token="b")


def test_every_architecture_is_compared():
    named = {name.removesuffix("-64").partition("-")[0] for name in IN_GGUF}
    assert named == set(OF_FAMILY)


@pytest.fixture(scope="module")
def predicted(llama_cpp_wheel, tmp_path_factory):
    """Our model and llama.cpp's answer, of each case."""
    folder, ours = tmp_path_factory.mktemp("gguf"), {}
    for name in COMPARED:
        with pytest.MonkeyPatch.context() as monkeypatch:
            model = stated(name, monkeypatch, vocab_size=VOCABULARY).half().float()  # whose numbers F16 holds
        model.tokenizer = words()
        write_gguf(model, folder / f"{name}.gguf", "F16")
        ours[name] = model
    found = ask(llama_cpp_wheel, [folder / f"{name}.gguf" for name in COMPARED], prompt=PROMPT)
    return dict(zip(COMPARED, zip(ours.values(), found, strict=True), strict=True))


@pytest.mark.parametrize("name", COMPARED)
def test_llama_cpp_predicts_the_same(name, predicted):
    model, found = predicted[name]
    assert "error" not in found, found["error"]
    text = torch.tensor([PROMPT + found["greedy"][:-1]])
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        logits = model(text, torch.arange(text.shape[1])[None], context)[0, len(PROMPT) - 1 :]
    off = torch.tensor(found["logprobs"]) - logits.log_softmax(-1)  # (steps, vocabulary)
    assert off.pow(2).mean(-1).sqrt().max() < ROUNDING * logits.std()


def test_llama_cpp_splits_text_as_we_do(llama_cpp_wheel, tmp_path, monkeypatch):
    model, files = tiny_llama(vocab_size=VOCABULARY), [tmp_path / f"{pre}.gguf" for pre in SPLITS]
    model.tokenizer = Tokenizer.from_tokenizers(byte_level(), bos_token="<|begin|>", eos_token="<|im_end|>")
    for pre, file in zip(SPLITS, files, strict=True):
        entries = tokenizer_entries(model.tokenizer, VOCABULARY) | {"tokenizer.ggml.pre": pre}
        monkeypatch.setattr("hasten.checkpoints.gguf.write.tokenizer_entries", lambda *_, entries=entries: entries)
        write_gguf(model, file)
    texts = [text for text in [*TEXTS, *MORE] if "\x00" not in text]  # which ends a text there
    for pre, file, found in zip(SPLITS, files, ask(llama_cpp_wheel, files, texts=texts), strict=True):
        ours = hasten.load(file, dtype="stored").tokenizer
        for text, tokens in zip(texts, found["tokens"], strict=True):
            if not (SPLITS[pre].nfc and "e\u0301" in text):  # llama.cpp does not normalise
                assert ours.encode(text) == tokens, (pre, text)
