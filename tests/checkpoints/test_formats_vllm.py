"""vLLM reads the folders that we write, and answers as we do.

VLLM_PYTHON=/path/to/python pytest tests/checkpoints/test_formats_vllm.py, where that Python has vLLM (its CPU build
will do).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import hasten
from hasten.model.context import TrainingContext
from hasten.quantization import Int4, Int8, quantize_to_folder
from tiny_model import tiny_llama

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python that has vLLM"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "vllm_answers.py"
PROMPT = [5, 17, 42, 8, 99, 3, 71, 23, 64, 12, 55, 31, 77, 9, 33]
PLAIN = {"lm_head": "none"}  # vLLM's CPU build has no product of 8-bit weights (an int8 head's) with 16-bit activations
SCHEMES = {
    "int4 g128": (Int4(group_size=128, **PLAIN), "compressed-tensors"),
    "int4 g32": (Int4(group_size=32, **PLAIN), "compressed-tensors"),
    "int4 g128 with zero points": (Int4(group_size=128, symmetric=False, **PLAIN), "compressed-tensors"),
    "int8": (Int8(activations="int8", **PLAIN), "compressed-tensors"),
    "int4 g128 as gptq": (Int4(group_size=128, scale_dtype="float16", **PLAIN), "gptq"),
    "int4 g32 as gptq": (Int4(group_size=32, scale_dtype="float16", **PLAIN), "gptq"),
}


@pytest.fixture(scope="module")
def model():
    made = tiny_llama(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, initializer_range=0.06, vocab_size=384
    )
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("case", SCHEMES)
def test_vllm_answers_as_we_do(case, model, tmp_path):
    scheme, layout = SCHEMES[case]
    quantize_to_folder(model, scheme, tmp_path / "out", format=layout)
    command = [PYTHON, str(SCRIPT), str(tmp_path / "out")]
    done = subprocess.run(command, input=json.dumps({"prompt": PROMPT}), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT", 1)[1].splitlines()[0])
    ours = hasten.load(tmp_path / "out", dtype="float32")
    context = TrainingContext([layer.window for layer in ours.config.layers])
    with torch.no_grad():
        logits = ours(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], context)[0].float()
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    # Its products are in bfloat16 or of rounded activations: the noise of some rounded sums, where another number of a
    # weight would show as an error of the size of the logits themselves.
    error = float((torch.tensor(found["logprobs"]) - expected).pow(2).mean() / logits.var())
    assert error < 2e-3
