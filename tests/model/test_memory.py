"""Peak memory of loading: the checkpoint once, not twice (the published figure: benchmarks/results)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from references import make_reference

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


def test_loading_does_not_import_the_compiler(tmp_path):
    """It takes seconds and 100 MB, and importing it is one careless decorator away."""
    make_reference("llama").save_pretrained(tmp_path)
    code = (
        "import sys, hasten; model = hasten.load(sys.argv[1], dtype='bfloat16'); hasten.fuse(model);"
        "heavy = [m for m in ('torch._dynamo', 'sympy', 'triton', 'transformers') if m in sys.modules];"
        "sys.exit(f'imported: {heavy}' if heavy else None)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_published_measurement_is_of_the_stated_size_and_within_the_limit(benchmark):
    [row] = json.loads((ROOT / "benchmarks" / "results" / "load-memory.json").read_text())["rows"]
    assert row["checkpoint_bytes"] >= 1e9
    assert (row["peak_bytes"] - row["baseline_bytes"]) / row["checkpoint_bytes"] <= benchmark.LIMIT
