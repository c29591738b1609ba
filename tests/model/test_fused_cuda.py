"""A GPU's fused block: interpreted on a CPU, and run where a GPU is."""

import pytest
import torch

import hasten
from fused_cases import FAMILIES, decoded, errors
from hasten.engine import captures
from hasten.engine.given_texts import GivenTexts
from hasten.engine.kept import release
from hasten.model.fused import CudaBlock, fuse, refusal
from hasten.quantization import Int4, Int8, quantize
from references import tiny_llama
from triton_cases import needs_gpu, run_interpreted

DEVICE = "cuda"


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(900)  # whole models of many families, every kernel of them interpreted
def test_in_the_interpreter():
    run_interpreted("model/interpreted_fused_cuda.py")


def test_on_a_cpu_the_native_steps_are_the_ones():
    model = tiny_llama()
    assert "the model is float32" in refusal(model)
    assert not any(isinstance(block, CudaBlock) for block in model.blocks)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_errs_at_most_twice_what_the_readable_block_errs(family):
    for name, (fused, plain) in errors(family, device=DEVICE).items():
        assert fused <= 2 * plain, name


def on_gpu(scheme=None):
    model = tiny_llama(hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=512)
    model = model.to(DEVICE, torch.bfloat16)
    model.bind()
    return fuse(model if scheme is None else quantize(model, scheme))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scheme", [None, Int8(activations="float"), Int4(group_size=32, activations="float")])
def test_captured_steps_are_the_plain_ones(scheme, monkeypatch):
    """The same steps, replayed, and launched again operation by operation."""

    def again(step, reset, **_):
        reset()
        step()
        return step

    model, capture = on_gpu(scheme), captures.cuda_graph
    plain, captured = (GivenTexts(model, batch=2, capacity=256) for _ in range(2))
    for texts in (plain, captured):
        texts.prefill([[5, 9, 40, 3], [8, 90]])
    for i in range(12):
        tokens, found = torch.tensor([i, i + 20], device=DEVICE), []
        for texts, how in ((plain, again), (captured, capture)):
            monkeypatch.setattr(captures, "cuda_graph", how)
            found.append(texts.decode(tokens).clone())
        assert torch.equal(*found)
    assert captured.runner.decoder.captures.pieces


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.8, "top_k": 20, "seed": 1}, {"top_p": 0.9, "seed": 2}]
)
def test_running_ahead_changes_no_text(settings, monkeypatch):
    from hasten.engine import following

    model = on_gpu()
    prompts = [[5, 9, 40, 3], [8, 90]]
    ahead = hasten.generate(model, prompts, max_new_tokens=40, **settings)
    assert hasten.generate(model, prompts, max_new_tokens=40, **settings) == ahead, "with the captured steps of before"
    release(model)
    monkeypatch.setattr(following, "capture_refusal", lambda model: "not in this test")
    assert hasten.generate(model, prompts, max_new_tokens=40, **settings) == ahead


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cache", ["int8", "int8-plain"])
def test_rounded_caches(cache):
    model = tiny_llama(hidden_size=256, num_attention_heads=4, head_dim=64).to(DEVICE, torch.bfloat16)
    model.bind()
    exact = decoded(model)
    plain = decoded(model, kv_cache_dtype=cache) - exact
    found = decoded(fuse(model), kv_cache_dtype=cache) - exact
    assert found.square().mean() <= 4 * plain.square().mean()
