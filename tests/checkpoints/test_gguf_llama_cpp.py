"""llama.cpp loads what we write and answers as we do; we read what its quantizer writes.

LLAMA_CPP_PYTHON=/path/to/python pytest tests/checkpoints/test_gguf_llama_cpp.py, where that Python has
llama-cpp-python.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten.checkpoints.gguf.tokenizer import SPLITS
from hasten.checkpoints.gguf.write import write_gguf
from hasten.model.context import TrainingContext
from hasten.text.tokenizer import Tokenizer
from references import CASES, make_reference
from tiny_model import tiny_llama
from tokenizer_folders import TEXTS, byte_level, llama_like

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LLAMA_CPP_PYTHON names no Python that has llama-cpp-python")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "llama_cpp_answers.py"
# llama.cpp rounds activations to 8 bits for quantized weights, to bfloat16 for BF16; we do not, or otherwise: half a
# step of 1 / 127 at most, in each of a few layers.
ROUNDING = 1e-3
PROMPT = [5, 17, 42, 8, 99, 3, 71, 23, 64, 12, 55, 31, 77, 9, 33]
MORE = ["I'VE 12345 don't 3.14 we'll", "x  \n\n y\t\tz ", "Ünïcode ﬀ ½ ² 한국어 👩‍👩‍👧 \u200d", "\r\n a\x7f", "   "]


def answers(path, texts=()):
    command = [PYTHON, str(SCRIPT), str(path)]
    question = json.dumps({"texts": list(texts), "prompt": PROMPT})
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def our_logits(model):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], context)[0].float()


def error(found, expected):
    """Mean squared error over the variance."""
    return float((found - expected).pow(2).mean() / expected.var())


def greedy(model):
    params = hasten.SamplingParams(temperature=0.0, max_new_tokens=16, min_new_tokens=16)
    return hasten.generate(model, [PROMPT], params)[0].tokens


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-mqa", "llama-biases", "llama-linear", "llama-yarn", "qwen2", "qwen3", "gemma2", "gemma3_text"],
)
def test_llama_cpp_computes_the_same_logits(name, tmp_path, monkeypatch):
    if name == "gemma2":
        monkeypatch.setitem(CASES, name, (*CASES[name][:2], CASES[name][2] | {"query_pre_attn_scalar": 32}))
    model = hasten.load(make_reference(name)).half().float()
    write_gguf(model, tmp_path / "model.gguf", "F16")
    found, expected = answers(tmp_path / "model.gguf"), our_logits(model)
    torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=0, atol=0.02 * float(expected.std()))


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_llama_cpp_answers_in_every_kind(kind, tmp_path):
    write_gguf(tiny_llama(), tmp_path / "model.gguf", kind)
    found, model = answers(tmp_path / "model.gguf", TEXTS), hasten.load(tmp_path / "model.gguf", dtype="float32")
    assert error(torch.tensor(found["logits"]), our_logits(model)) < ROUNDING
    assert found["greedy"][: 16 if kind == "BF16" else 1] == greedy(model)[: 16 if kind == "BF16" else 1]
    assert found["tokens"] == [model.tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "dbrx", "llama"])
def test_llama_cpp_splits_text_as_we_do(pre, tmp_path):
    if pre == "llama":
        tokenizer = Tokenizer.from_tokenizers(llama_like(), bos_token="<s>", eos_token="</s>")
    else:
        backend = byte_level()
        SPLITS[pre].apply(backend)
        bpe = backend.model
        bpe.ignore_merges = SPLITS[pre].ignore_merges
        backend.model = bpe
        tokenizer = Tokenizer.from_tokenizers(backend, bos_token="<|begin|>", eos_token="<|im_end|>")
    model = tiny_llama(vocab_size=400)
    model.tokenizer = tokenizer
    write_gguf(model, tmp_path / "model.gguf")
    texts = [text for text in [*TEXTS, *MORE] if "\x00" not in text and not (pre == "qwen2" and "e\u0301" in text)]
    found = answers(tmp_path / "model.gguf", texts)["tokens"]
    read = hasten.load(tmp_path / "model.gguf", dtype="stored").tokenizer
    for text, tokens in zip(texts, found, strict=True):
        assert read.encode(text) == tokens, text


QUANTIZE = """
import llama_cpp, sys, ctypes
silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p())
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(sys.argv[3]), 1
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""
# llama.cpp's numbers of its mixtures of types, the closest to the model first.
FILE_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_0": 8, "Q4_K_M": 15, "IQ4_XS": 30, "Q3_K_M": 12, "Q2_K": 10}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model whose rows are whole blocks of 256, in float32 and as BF16 file."""
    model = tiny_llama(hidden_size=256, intermediate_size=512, num_attention_heads=4, initializer_range=0.06)
    path = tmp_path_factory.mktemp("llama") / "bf16.gguf"
    write_gguf(model, path)
    return model, path


@pytest.mark.filterwarnings("ignore:no kernel takes")
def test_we_read_what_llama_cpp_quantizes(large, tmp_path):
    model, path = large
    expected, losses = our_logits(model), {}
    for name, number in FILE_TYPES.items():
        target = tmp_path / f"{name}.gguf"
        subprocess.run([PYTHON, "-c", QUANTIZE, str(path), str(target), str(number)], check=True, capture_output=True)
        found = our_logits(hasten.load(target, dtype="float32"))
        losses[name] = error(found, expected)
        assert error(torch.tensor(answers(target)["logits"]), found) < ROUNDING, name
    print(losses, file=sys.stderr)
    assert list(losses.values()) == sorted(losses.values())
    assert losses["Q8_0"] < 0.01 < losses["Q2_K"] < 1
