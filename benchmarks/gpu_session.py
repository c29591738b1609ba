"""Everything that waits for a GPU, in one run of less than ten minutes (docs/gpu-status.md says what and why).

    PYTHONPATH=src python benchmarks/gpu_session.py                    # all steps, on cuda
    PYTHONPATH=src python benchmarks/gpu_session.py kernels --tune     # one step; sweep the kernels' configurations
    TRITON_INTERPRET=1 python benchmarks/gpu_session.py rungs --device cpu --shape tiny --output /tmp/x.json  # dry run

Steps: tests (those marked gpu), kernels (products alone), flash (attention beside PyTorch's), rungs (llama-7b, one
stream), large (llama-70b in int8), training (GPT-2 124M beside nanoGPT, where --nanogpt names its checkouts: the head
first, then any others, such as b3c17c6 and 77e7e04).
The JSON is written again after every step, so that a session that ends early keeps what it measured.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
# The gpt-fast article (PyTorch blog, November 2023): Llama 7B on one A100 80 GB at 330 W, batch 1.
GPT_FAST_7B = {
    "bf16, eager": {"tokens_per_second": 25.5},
    "bf16": {"tokens_per_second": 107.0},
    "int8": {"tokens_per_second": 157.4},
    "int4, groups of 32": {"tokens_per_second": 202.1},
}
GPT_FAST_70B = {"int8 on 8 GPUs": {"tokens_per_second": 55.0}}
# name -> (format, group size, CUDA graph, torch.compile)
RUNGS = {
    "bf16-eager": ("bfloat16", 0, False, False),
    "bf16-graph": ("bfloat16", 0, True, False),
    "int8-graph": ("int8", 0, True, False),
    "int4-g128-graph": ("int4", 128, True, False),
    "int4-g32-graph": ("int4", 32, True, False),
    "bf16-compiled-graph": ("bfloat16", 0, True, True),
    "int8-compiled-graph": ("int8", 0, True, True),
    "int4-g128-compiled-graph": ("int4", 128, True, True),
    "int4-g32-compiled-graph": ("int4", 32, True, True),
}
PROMPT, NEW, ROUNDS = 512, 64, 3
COLD_BYTES = 200 << 20  # more than any cache holds
TESTS = (
    "ops/test_triton_linear.py",
    "ops/test_triton_decode.py",
    "ops/test_flash_triton.py",
    "generation/test_graphs.py",
)


def random_model(shape: str, *, format: str, group_size: int, device: str) -> Any:
    """A model with random weights, made on the device in its format: one of 70 B never exists in 16 bits."""
    from hasten.model.families import read_config
    from hasten.model.transformer import Transformer
    from hasten.ops.linear import INT8, PackedLinear, int4_format
    from hasten.planning.shapes import SHAPES

    with torch.device("meta"):
        model = Transformer(read_config(SHAPES[shape])).to(torch.bfloat16)
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if format == "bfloat16" or not isinstance(child, nn.Linear):
                continue
            # The interpreter of a dry run has to be asked for by name: on a CPU the native kernel comes first.
            kernel = "triton" if device == "cpu" else None
            stored = INT8 if format == "int8" else int4_format(group_size, scale_dtype=torch.float16)
            layer = PackedLinear(child.in_features, child.out_features, stored, device=device, kernel=kernel)
            layer.data.random_(-128, 128) if format == "int8" else layer.data.random_(0, 256)
            layer.scales.fill_(0.2 / (16 if format == "int4" else 256) / child.in_features**0.5)
            setattr(owner, name, layer)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fresh = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            fresh.normal_(0, parameter.shape[-1] ** -0.5) if fresh.dim() > 1 else fresh.fill_(1)
            setattr(module, name, nn.Parameter(fresh, requires_grad=False))
    model.ropes.to(device)
    model.bind()
    return model.eval()


def measure(
    shape: str, *, format: str, group_size: int, graph: bool, compiled: bool, device: str, bandwidth: float
) -> dict[str, Any]:
    """One stream of one model: decode and prefill speed, and the bytes that a token had to read."""
    from hasten.generation.compiled import compile_blocks
    from hasten.generation.decoder import Decoder
    from hasten.generation.graphs import GraphDecoder, refusal
    from hasten.machine import vendor_limits
    from hasten.planning.cost import kv_bytes_per_token

    start = time.perf_counter()
    model = random_model(shape, format=format, group_size=group_size, device=device)
    if compiled:
        compile_blocks(model)
    captured = graph and refusal(model) is None
    kind = GraphDecoder if captured else Decoder
    extra = {} if captured else {"static": True}
    prompt_tokens = min(PROMPT, model.config.max_positions // 2)
    new = min(NEW, prompt_tokens // 4)
    decoder = kind(model, batch=1, capacity=prompt_tokens + new, **extra)
    prompt = torch.randint(model.config.vocab_size, (prompt_tokens,)).tolist()
    made = time.perf_counter()
    decoder.decode(decoder.prefill([prompt]).argmax(-1))
    sync(device)
    warm = time.perf_counter()
    decode, queued, prefill = [], [], []
    for _ in range(ROUNDS):
        decoder.truncate(0)
        sync(device)
        begin = time.perf_counter()
        token = int(decoder.prefill([prompt]).argmax())
        middle = time.perf_counter()
        for _ in range(new):  # each token waited for, as a stream shows them
            token = int(decoder.decode(torch.tensor([token], device=device)).argmax())
        end = time.perf_counter()
        prefill.append(len(prompt) / (middle - begin))
        decode.append(new / (end - middle))
        decoder.truncate(prompt_tokens)
        tokens = torch.tensor([token], device=device)
        sync(device)
        begin = time.perf_counter()
        for _ in range(new):  # queued: what the GPU alone could do
            tokens = decoder.decode(tokens).argmax(-1)
        sync(device)
        queued.append(new / (time.perf_counter() - begin))
    tensors = [*model.parameters(), *model.buffers()]
    weights = sum(t.nbytes for t in tensors) - model.embedding.weight.nbytes
    read = weights + kv_bytes_per_token(model.config, 2) * (prompt_tokens + new // 2)
    speed = statistics.median(decode)
    vendor = vendor_limits(torch.cuda.get_device_name()) if device != "cpu" else None
    return {
        "decode_tokens_per_second": speed,
        "decode_queued_tokens_per_second": statistics.median(queued),
        "prefill_tokens_per_second": statistics.median(prefill),
        "bytes_per_token": read,
        "mbu": speed * read / bandwidth,
        "vendor_mbu": None if vendor is None else speed * read / vendor.bandwidth,
        "captured": captured,
        "build_seconds": made - start,
        "first_step_seconds": warm - made,
        "peak_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None,
    }


def products(*, device: str, tune: bool, bandwidth: float) -> list[dict[str, Any]]:
    """The Triton products of llama-7b's matrices alone, as in a CUDA graph, one weight after the other so that none is
    in a cache; with `tune`, each candidate configuration for one row.
    """
    from triton.testing import do_bench_cudagraph

    from hasten.ops.linear import INT8, PackedLinear, int4_format
    from hasten.ops.linear.layouts import Operands
    from hasten.ops.linear.triton_linear import Config, choose, few_rows

    found = []
    for n, k in ((4096, 4096), (11_008, 4096), (4096, 11_008), (32_000, 4096))[: 2 if tune else 4]:
        for format, group_size in (("int8", 0), ("int4", 128), ("int4", 32)):
            stored = INT8 if format == "int8" else int4_format(group_size, scale_dtype=torch.float16)
            each = n * k * stored.bits // 8
            layers = [PackedLinear(k, n, stored, device=device, kernel="triton") for _ in range(COLD_BYTES // each + 1)]
            weights = [
                Operands(layer.data.random_(), layer.scales.uniform_(0, 1e-3), None, None, None, n, stored)
                for layer in layers
            ]
            size = weights[0].data.nbytes + weights[0].scales.nbytes
            for rows in (1,) if tune else (1, 4, 16):
                x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
                group_bytes = group_size * stored.bits // 8
                usual = choose(rows, n, group_bytes, stored.bits)
                configs = [usual]
                if tune:
                    steps = (group_bytes,) if group_size else (64, 128, 256)
                    tried = itertools.product((8, 16, 32, 64, 128), steps, (1, 2, 4, 8), (1, 2, 4), (4,))
                    configs += [
                        Config(block_n=wide, block_j=step, splits=splits, warps=warps, stages=stages)
                        for wide, step, splits, warps, stages in tried
                        if wide * step // 16 // 32 in (warps // 2, warps, 2 * warps)  # about 16 bytes a thread
                    ]
                for config in configs:

                    def run(config: Config = config, x: torch.Tensor = x, weights: list[Operands] = weights) -> None:
                        for weight in weights:
                            few_rows(x, weight, config=config)

                    ms = do_bench_cudagraph(run, rep=20) / len(weights)
                    gb = size / (ms / 1e3)
                    entry = {"n": n, "k": k, "format": format, "group_size": group_size, "rows": rows}
                    entry |= {"config": repr(config), "ms": ms, "bandwidth": gb, "mbu": gb / bandwidth}
                    found.append(entry | {"chosen": config == usual})
    return found


def sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def run_tests() -> dict[str, Any]:
    """The tests that need a GPU, in a process of their own."""
    files = [str(HERE.parent / "tests" / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:xdist", "-rs", *files], capture_output=True, text=True
    )
    return {"status": done.returncode, "output": done.stdout[-6000:] + done.stderr[-1000:]}


def training(checkouts: list[Path], device: str) -> dict[str, Any]:
    """GPT-2 124M beside nanoGPT's checkouts: what compare_training.py reports, in a process of its own."""
    shape = "gpt2-124m" if device != "cpu" else "tiny"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "training.json"
        head, *others = map(str, checkouts)
        command = [sys.executable, str(HERE / "compare_training.py"), "--nanogpt", head, "--shape", shape]
        command += ["--device", device, "--rounds", "4", "--steps", "20", "--output", str(output)]
        done = subprocess.run(
            [*command, *(["--others", *others] if others else [])], capture_output=True, text=True, timeout=500
        )
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help="some of these; all by default")
    parser.add_argument("--nanogpt", type=Path, nargs="*", default=[], help="training: checkouts, the head first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-7b", help="of the rungs")
    parser.add_argument("--tune", action="store_true", help="kernels, flash: measure every candidate configuration")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu-session.json")
    options = parser.parse_args()
    steps = options.steps or ["tests", "kernels", "flash", "training", "rungs", "large"]
    from hasten.machine import describe
    from hasten.machine.measure import read_bandwidth

    bandwidth = read_bandwidth(device=options.device)
    report: dict[str, Any] = {
        "machine": describe().to_json(),
        "torch": torch.__version__,
        "bandwidth": bandwidth,
        "settings": {"prompt_tokens": PROMPT, "new_tokens": NEW, "rounds": ROUNDS, "batch": 1, "weights": "random"},
        "published": {"gpt-fast, llama-7b, A100": GPT_FAST_7B, "gpt-fast, llama-70b, A100": GPT_FAST_70B},
    }

    def step(name: str, work: Callable[[], Any]) -> None:
        """Do one thing, keep what came of it, or why nothing did."""
        start = time.perf_counter()
        try:
            found = work()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        report[name] = found
        print(f"{name}: {time.perf_counter() - start:.0f} s  {str(found)[:300]}", flush=True)
        options.output.write_text(json.dumps(report, indent=1, default=str))
        if options.device != "cpu":
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    common = {"device": options.device, "bandwidth": bandwidth}
    if "tests" in steps:
        step("tests", run_tests)
    if "kernels" in steps:
        step("kernels", lambda: products(tune=options.tune, **common))
    if "flash" in steps:
        from gpu_flash import flash  # beside this script

        step("flash", lambda: flash(device=options.device, tune=options.tune))
    if "training" in steps and options.nanogpt:
        step("training", lambda: training(options.nanogpt, options.device))
    if "rungs" in steps:
        for name, (format, group_size, graph, compiled) in RUNGS.items():
            sizes = {"format": format, "group_size": group_size, "graph": graph, "compiled": compiled}
            step(f"{options.shape} {name}", lambda sizes=sizes: measure(options.shape, **sizes, **common))
    if "large" in steps:
        sizes = {"format": "int8", "group_size": 0, "graph": True, "compiled": True}
        step("llama-70b int8-compiled-graph", lambda: measure("llama-70b", **sizes, **common))


if __name__ == "__main__":
    main()
