"""What quantizing with calibration text takes: the peak of the whole command is the predicted one, within 15%."""

import json
import subprocess
import sys

import pytest

from hasten.checkpoints.export import export_model
from tiny_model import tiny_llama

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "wide"
    export_model(tiny_llama(**SHAPE, initializer_range=0.02), place)
    return place


@pytest.mark.slow(minutes=4)  # a model whose matrices are larger than what libraries take
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is exact there")
@pytest.mark.parametrize(
    "extra", [pytest.param([], id="gptq"), pytest.param(["--gptaq"], id="gptaq", marks=pytest.mark.night)]
)
def test_the_peak_is_the_predicted_one(folder, tmp_path, extra):
    text = ["--calibration", "stdlib", "--samples", "128", "--length", "256"]
    options = ["--scheme", "int4", "--group-size", "32", "--lm-head", "none", *text]
    command = [sys.executable, "-m", "hasten", "quantize", str(folder), *options, "--method", "gptq", *extra]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out"), "--json", "-"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert 0.85 < found["predicted_memory_bytes"] / found["peak_memory_bytes"] < 1.15, found
