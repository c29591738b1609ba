"""The draw's Triton kernels: in the interpreter, through the compiler, and on a GPU."""

import pytest
import torch

from hasten.generation.params import SamplingParams
from hasten.generation.sampling import RowParams, next_tokens
from triton_cases import needs_gpu, run_interpreted


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_draw.py")


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
