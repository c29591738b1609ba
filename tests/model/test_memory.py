"""Peak memory of loading: the checkpoint once, not twice (the published figure: benchmarks/results)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file, save_file

from hasten.checkpoints.export import export_model
from hasten.checkpoints.gguf.write import write_gguf
from hasten.ops.native import library
from hasten.quantization import Int4, quantize_to_folder
from references import make_reference
from tiny_model import tiny_llama

ROOT = Path(__file__).parents[2]
# What loading needs besides the weights, whatever their size: our own modules, the tokenizers library, the skeleton.
CONSTANT_BYTES = 110_000_000
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("memory", ROOT / "benchmarks" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM, which only Linux has")
def test_loading_takes_the_checkpoint_once(benchmark, tmp_path):
    size = benchmark.write_random_llama(tmp_path, bytes_wanted=300_000_000, dtype="bfloat16", shards=2, width=1024)
    assert size >= 300_000_000
    result = benchmark.in_a_process(benchmark.LOAD, tmp_path)
    assert size - 100_000 <= result["tensor_bytes"] <= size
    assert result["peak_bytes"] - result["baseline_bytes"] <= benchmark.LIMIT * size + CONSTANT_BYTES


def compressed(model, plain, out):
    quantize_to_folder(model, Int4(group_size=32, lm_head="none"), out)


def gptq(model, plain, out):
    quantize_to_folder(model, Int4(group_size=128, lm_head="none", scale_dtype="float16"), out, format="gptq")


def awq(model, plain, out):
    """Integers of any kind: only their sizes count here."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}

    def packed(name, weight):
        n, k = weight.shape
        shapes = {"qweight": (k, n // 8), "qzeros": (k // 128, n // 8)}
        found = {leaf: torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32) for leaf, shape in shapes.items()}
        found["scales"] = torch.full((k // 128, n), 0.01, dtype=torch.float16)
        return {name.replace("weight", leaf): tensor for leaf, tensor in found.items()}

    changed(plain, out, config, packed)


def fp8(model, plain, out):
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

    def packed(name, weight):
        scales = torch.full(tuple(-(-size // 128) for size in weight.shape), 0.01)
        return {name: weight.to(torch.float8_e4m3fn), name.replace("weight", "weight_scale_inv"): scales}

    changed(plain, out, config, packed)


def changed(plain, out, config, packed):
    """The folder with its layers packed otherwise."""
    out.mkdir()
    values = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(values))
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors |= packed(name, tensor) if "_proj." in name else {name: tensor}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def q8_0(model, plain, out):
    out.mkdir()
    write_gguf(model, out / "model.gguf", "Q8_0")


def q4_0(model, plain, out):
    out.mkdir()
    write_gguf(model, out / "model.gguf", "Q4_0")


@pytest.mark.slow  # some hundred megabytes are written, quantized and read
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM, which only Linux has")
@pytest.mark.skipif(library() is None, reason="the native kernels, which hold what is packed, cannot be built here")
@pytest.mark.parametrize("write", [compressed, gptq, awq, fp8, q8_0, q4_0], ids=lambda write: write.__name__)
def test_packed_layers_are_held_once_and_never_as_floats(benchmark, tmp_path, write):
    """What 26 layers take more than two, against what they take in their files.

    The peaks of two processes that load the same file are up to 12 MB apart beside other work, so the files are a
    hundred megabytes apart.
    """
    found = []
    for layers in (2, 26):
        model = tiny_llama(**WIDE, num_hidden_layers=layers).bfloat16()
        plain, out = tmp_path / f"plain-{layers}", tmp_path / f"{layers}"
        export_model(model, plain)
        write(model, plain, out)
        rmtree(plain)
        size = sum(file.stat().st_size for file in out.glob("*.*") if file.suffix in (".safetensors", ".gguf"))
        found.append((benchmark.in_a_process(benchmark.LOAD, out)["peak_bytes"], size))
    (few_peak, few_size), (many_peak, many_size) = found
    assert many_size - few_size > 120e6
    assert (many_peak - few_peak) / (many_size - few_size) < 1.2, found


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
