"""The draw's Triton kernels: in the interpreter, through the compiler, and on a GPU."""

import pytest
import torch

from hasten.generation.params import SamplingParams
from hasten.generation.sampling import RowParams, next_tokens
from hasten.ops.draw.splitmix import FIRST, GOLDEN, SECOND
from triton_cases import needs_gpu, run_interpreted


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_draw.py")


POINTERS = {
    "lengths",
    "counts",
    "table",
    "positions",
    "slots",
    "seq_lens",
    "drawn",
    "tokens",
    "steps",
    "seeds",
    "top_k",
}
KERNELS = {
    "draw": {"GOLDEN": GOLDEN, "FIRST": FIRST, "SECOND": SECOND, "ACCURATE": True, "BLOCK": 1024},
    "least_kept": {"BLOCK": 4096},
    "place": {"W": 8},
    "move_on": {"BLOCK": 256},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_a_hopper_gpu(name):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hasten.ops.draw import triton_kernels

    kernel, constants = getattr(triton_kernels, name), KERNELS[name]
    kinds = dict.fromkeys(POINTERS, "*i64") | dict.fromkeys(("scores", "top_p", "least"), "*fp32")
    names = [one for one in kernel.arg_names if one not in constants]
    signature = {one: kinds.get(one, "i32") for one in names} | dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(one),): value for one, value in constants.items()}
    made = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
    assert ".local" not in made.asm["ptx"]


@pytest.mark.gpu
@needs_gpu
def test_tokens_on_a_gpu_are_those_of_a_cpu():
    settings = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.7, "min_p": 0.01}, {"temperature": 0.3}]
    params = [SamplingParams(seed=i, **one) for i, one in enumerate(settings)] * 20
    logits = torch.randn(len(params), 32_000, generator=torch.Generator().manual_seed(0)) * 2
    steps = torch.arange(len(params))
    expected = next_tokens(logits, RowParams.stack(params, vocab_size=32_000), steps=steps)
    rows = RowParams.stack(params, vocab_size=32_000, device="cuda")
    found = next_tokens(logits.cuda(), rows, steps=steps.cuda()).cpu()
    assert (found != expected).sum() <= 1  # two that are too near to tell
