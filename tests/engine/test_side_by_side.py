"""Texts side by side in one block each: however a prompt is read, whoever has ended, and captured as on a GPU."""

import pytest
import torch

import hasten
from captured_steps import Capturer
from hasten.engine import captures, side_by_side
from hasten.engine.compiled import compile_blocks
from hasten.engine.given_texts import GivenTexts
from hasten.engine.runner import capture_refusal
from hasten.engine.side_by_side import CapturedDecode, SideBySideRunner
from hasten.errors import ConfigError
from references import make_reference, tiny_llama
from triton_cases import run_interpreted

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
PROMPTS = [[5, 9, 40, 3, 77], [8, 90]]
MODEL = tiny_llama()


def pair(model, *, capacity=128, monkeypatch):
    """Texts whose steps run plainly, and texts whose decode steps are captured, with the same prompts."""
    capturer = Capturer()
    monkeypatch.setattr(captures, "cuda_graph", capturer)
    plain, captured = (GivenTexts(model, batch=2, capacity=capacity, compiled=True) for _ in range(2))
    captured.runner._captured = CapturedDecode(captured.runner)
    assert torch.equal(*(texts.prefill(PROMPTS) for texts in (plain, captured)))
    return plain, captured, capturer


def step_both(plain, captured, steps, token=7):
    for i in range(steps):
        tokens = torch.tensor([token + i, 2 * token + i])
        assert torch.equal(plain.decode(tokens), captured.decode(tokens))


def test_unfused_models_are_run_so_on_a_cpu():
    assert isinstance(GivenTexts(MODEL, batch=2, capacity=100).runner, SideBySideRunner)
    texts = GivenTexts(MODEL, batch=2, capacity=100, compiled=True)
    assert isinstance(texts.runner, SideBySideRunner)
    assert texts.cache.block_size == 128, "one of few sizes, because each is compiled for"


def test_prefill_in_pieces_equals_prefill_at_once(monkeypatch):
    prompts = [list(range(1, 40)), [7], list(range(50, 61))]
    whole = GivenTexts(MODEL, batch=3, capacity=64).prefill(prompts)
    monkeypatch.setattr(side_by_side, "_PREFILL_TOKENS", 3 * 4)
    pieces = GivenTexts(MODEL, batch=3, capacity=64).prefill(prompts)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


def test_steps_of_fixed_shapes_equal_the_others():
    prompt = list(range(1, 30))
    growing, fixed = (GivenTexts(MODEL, batch=1, capacity=200, compiled=compiled) for compiled in (False, True))
    first, second = growing.prefill([prompt]), fixed.prefill([prompt])
    for _ in range(5):
        assert first.argmax() == second.argmax()
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
        token = first.argmax(dim=-1)
        first, second = growing.decode(token), fixed.decode(token)


def test_replayed_steps_are_the_plain_ones(monkeypatch):
    plain, captured, capturer = pair(MODEL, monkeypatch=monkeypatch)
    step_both(plain, captured, 20)
    assert captured.lengths == plain.lengths == [25, 22]
    assert len(capturer.recordings) == 1
    assert len(capturer.recordings[0].calls) > 50  # the whole step was noted


def test_a_window_a_soft_cap_and_two_ropes(monkeypatch):
    plain, captured, _ = pair(hasten.load(make_reference("gemma3_text"), dtype="float32"), monkeypatch=monkeypatch)
    step_both(plain, captured, 12)


def test_after_another_prefill_and_a_truncation(monkeypatch):
    plain, captured, capturer = pair(MODEL, monkeypatch=monkeypatch)
    step_both(plain, captured, 3)
    for texts in (plain, captured):
        texts.truncate(4)
    step_both(plain, captured, 2)
    assert torch.equal(*(texts.prefill([[1, 2], [3]]) for texts in (plain, captured)))
    step_both(plain, captured, 3)
    assert len(capturer.recordings) == 1


def test_texts_that_have_ended_stay_as_they_are(monkeypatch):
    plain, captured, capturer = pair(MODEL, monkeypatch=monkeypatch)
    for active in ([True, True], [False, True], [False, True], [True, True], [True, False]):
        tokens = torch.tensor([3, 4])
        expected, found = (texts.decode(tokens, active=active) for texts in (plain, captured))
        assert torch.equal(expected[active], found[active])
        assert captured.lengths == plain.lengths
    assert captured.lengths == [8, 6]
    assert len(capturer.recordings) == 1


def test_warming_up_at_the_end_of_the_cache_writes_nothing_beyond_it(monkeypatch):
    plain, captured, _ = pair(MODEL, capacity=128, monkeypatch=monkeypatch)
    for texts in (plain, captured):
        texts.prefill([[1] * 122, [2] * 122])  # 127 of 128 places taken in the first text
    step_both(plain, captured, 1)
    for a, b in zip((*plain.cache.k, *plain.cache.v), (*captured.cache.k, *captured.cache.v), strict=True):
        assert torch.equal(a[:-1], b[:-1])
    with pytest.raises(ConfigError, match="holds 128 tokens"):
        captured.decode(torch.tensor([1, 1]))


def test_models_that_cannot_be_captured():
    assert "CUDA device; the model is on cpu" in capture_refusal(MODEL)
    for name, reason in (("mixtral", "experts"), ("gpt_oss", "experts"), ("phi3-longrope", "longrope")):
        assert reason in capture_refusal(hasten.load(make_reference(name), dtype="float32"))


@pytest.mark.slow(minutes=1)
def test_a_quantized_model_in_tritons_interpreter():
    run_interpreted("engine/interpreted_decode.py")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_on_a_gpu(compiled, quantized):
    model = tiny_llama(hidden_size=256, num_attention_heads=4, head_dim=64).to("cuda", torch.bfloat16)
    model.bind()
    if quantized:
        hasten.quantize(model, hasten.Int8() if quantized == "int8" else hasten.Int4(group_size=32))
    plain, captured = (GivenTexts(model, batch=2, capacity=256, compiled=True) for _ in range(2))
    plain.runner._captured = None
    expected = [plain.prefill(PROMPTS)]
    tokens = torch.randint(0, 250, (12, 2), generator=torch.Generator().manual_seed(0)).cuda()
    expected += [plain.decode(step) for step in tokens]
    if compiled:
        compile_blocks(model)
    found = [captured.prefill(PROMPTS)]
    found += [captured.decode(step).clone() for step in tokens]
    for a, b in zip(expected, found, strict=True):
        if compiled:
            assert (a - b).square().mean().sqrt() < 0.05 * a.square().mean().sqrt()
        else:
            assert torch.equal(a, b)
