"""Peak memory of loading: the checkpoint once, not twice (the published figure: benchmarks/results)."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What loading needs besides the weights, whatever their size: our own modules, the tokenizers library, the skeleton.
CONSTANT_BYTES = 110_000_000


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("load_memory", ROOT / "benchmarks" / "load_memory.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM, which only Linux has")
def test_loading_takes_the_checkpoint_once(benchmark, tmp_path):
    size = benchmark.write_random_llama(tmp_path, bytes_wanted=300_000_000, dtype="bfloat16", shards=2, width=1024)
    assert size >= 300_000_000
    result = benchmark.measure(tmp_path)
    assert size - 100_000 <= result["tensor_bytes"] <= size
    assert result["peak_bytes"] - result["baseline_bytes"] <= benchmark.LIMIT * size + CONSTANT_BYTES


def test_the_published_measurement_is_of_the_stated_size_and_within_the_limit(benchmark):
    [row] = json.loads((ROOT / "benchmarks" / "results" / "load-memory.json").read_text())["rows"]
    assert row["checkpoint_bytes"] >= 1e9
    assert (row["peak_bytes"] - row["baseline_bytes"]) / row["checkpoint_bytes"] <= benchmark.LIMIT
