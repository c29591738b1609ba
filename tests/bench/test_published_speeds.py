"""The speeds of published files that docs/results/kernels.md shows meet their aims: the committed measurements."""

import json
from pathlib import Path
from statistics import median

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-Q4_K_M.gguf")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize(("name", "decode"), [("real-files", 1.1), ("real-files-ik", 1.0)])
def test_both_files_are_as_fast_as_in_the_peer_or_faster(name, decode):
    found = read(name)
    assert found["hasten"]["isa"] == "avx2"
    assert tuple(pair["model"] for pair in found["pairs"]) == FILES
    for pair in found["pairs"]:
        assert pair["ratio"]["decode"] >= decode
        assert pair["ratio"]["prefill"] >= 1.0
        assert len(pair["rounds"]) >= 5 * found["protocol"].get("turns", 1)


def test_a_mixed_file_takes_at_most_a_tenth_more_than_its_bytes_predict():
    assert [found["ratio"] <= 1.1 for found in read("real-files-uniform")["by_bytes"]] == [True, True]


def test_a_token_comes_soon_after_the_command_starts():
    rounds = read("start")["rounds"]
    seconds = {name: median(one[name]["seconds"] for one in rounds) for name in rounds[0]}
    assert seconds["smollm2-135m"] <= 1.5 * seconds["import torch"]
    assert seconds["gemma3-270m"] <= 3
