"""The draw's Triton kernels: in the interpreter, through the compiler, and on a GPU."""

import importlib

import pytest
import torch

from hasten.engine.params import SamplingParams
from hasten.engine.sampling import RowParams, next_tokens
from hasten.ops.draw.splitmix import FIRST, GOLDEN, SECOND
from triton_cases import compile_for_hopper, needs_gpu, run_interpreted


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_draw.py")


NUMBERS = {"lengths", "counts", "table", "positions", "slots", "seq_lens", "drawn", "tokens", "steps", "seeds", "top_k"}
FLOATS = {"temperature", "top_p", "log_min_p", "shifts", "least", "candidates"}
SIZES = {"vocab", "stride", "tiles", "columns", "block_size", "size"}
NOISE = {"GOLDEN": GOLDEN, "FIRST": FIRST, "SECOND": SECOND, "ON_GPU": True}
KERNELS = [
    ("triton_kernels", "cut", {"BLOCK": 8192, "ROOM": 8192, "ON_GPU": True}, 32, set()),
    (
        "triton_kernels",
        "cut",
        {"BLOCK": 8192, "ROOM": 8192, "ON_GPU": True},
        32,
        {"temperature", "top_k", "top_p", "candidates"},
    ),
    ("triton_kernels", "draw", NOISE | {"DRAWN": True, "BLOCK": 1024}, 4, set()),
    ("triton_kernels", "draw", NOISE | {"DRAWN": False, "BLOCK": 1024}, 4, {"greedy", "temperature", "least"}),
    ("step_kernels", "place", {"W": 8}, 1, set()),
    ("step_kernels", "move_on", {"BLOCK": 256}, 1, set()),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize(("file", "name", "constants", "warps", "without"), KERNELS)
def test_compiles_for_a_hopper_gpu(file, name, constants, warps, without, dtype, tmp_path):
    pytest.importorskip("triton")
    kernel = getattr(importlib.import_module(f"hasten.ops.draw.{file}"), name)
    types = dict.fromkeys(NUMBERS | {"best"}, "*i64") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(SIZES, "i32")
    types |= {"logits": dtype, "greedy": "*i1", "arrived": "*i32"}
    own = {one: types[one] for one in kernel.arg_names if one in types and one not in without}
    made = compile_for_hopper(kernel, own, constants, tmp_path, num_warps=warps)
    assert ".local" not in made.asm["ptx"]
    assert "bar.sync" in made.asm["ptx"] or warps == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocab", [32_000, 50_257, 152_064])
def test_tokens_on_a_gpu_are_those_of_a_cpu(vocab):
    settings = [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 300, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 0.3},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 200},
        {"temperature": 0.6, "top_p": 0.95},
    ]
    for dtype, scale, count in ((torch.bfloat16, 2, 1), (torch.float32, 4, 3)):
        params = [SamplingParams(seed=i, **one) for i, one in enumerate(settings)] * count
        logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(0)).mul(scale).to(dtype)
        steps = torch.arange(len(params))
        expected = next_tokens(logits, RowParams.stack(params, vocab_size=vocab), steps=steps)
        rows = RowParams.stack(params, vocab_size=vocab, device="cuda")
        found = next_tokens(logits.cuda(), rows, steps=steps.cuda()).cpu()
        assert (found != expected).sum() <= 1  # two that are too near to tell
