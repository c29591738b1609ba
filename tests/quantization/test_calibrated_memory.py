"""What quantizing with calibration text takes: the peak of the whole command is the predicted one, within 15%."""

import json
import subprocess
import sys

import pytest

from hasten.checkpoints.export import export_model
from tiny_model import tiny_llama

# With matrices of 11 MB copies come from the C library's heap, with those of 46 MB from the system.
SHAPES = {
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16},
    "wider": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 1},
}
METHODS = {"gptq": ["gptq"], "gptaq": ["gptq", "--gptaq"], "awq": ["awq"], "sign": ["sign", "--steps", "4"]}
CASES = [("gptq", "wide", 128, 256), ("gptaq", "wide", 128, 256), ("awq", "wide", 128, 256)]
CASES += [("sign", "wide", 16, 64), ("sign", "wider", 16, 64)]  # which takes minutes with as much text as the others


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        export_model(tiny_llama(**shape, num_key_value_heads=4, initializer_range=0.02), place / name)
    return place


@pytest.mark.slow  # a model whose matrices are larger than what libraries take
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is exact there")
@pytest.mark.parametrize(("name", "shape", "samples", "length"), CASES)
def test_the_peak_is_the_predicted_one(folders, tmp_path, name, shape, samples, length):
    text = ["--calibration", "stdlib", "--samples", str(samples), "--length", str(length)]
    options = ["--scheme", "int4", "--group-size", "32", "--lm-head", "none", *text]
    command = [sys.executable, "-m", "hasten", "quantize", str(folders / shape), *options, "--method", *METHODS[name]]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out"), "--json", "-"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert 0.85 < found["predicted_memory_bytes"] / found["peak_memory_bytes"] < 1.15, found
