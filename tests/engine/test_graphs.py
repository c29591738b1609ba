"""The captured decode step: it must work when only its tensor operations run again, on the same addresses."""

import pytest
import torch

import hasten
from captured_steps import Capturer, Recording
from hasten.engine import graphs
from hasten.engine.compiled import compile_blocks
from hasten.engine.decoder import Decoder
from hasten.engine.graphs import GraphDecoder, fastest_decoder, refusal
from hasten.errors import ConfigError
from references import tiny_llama
from triton_cases import run_interpreted

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
PROMPTS = [[5, 9, 40, 3, 77], [8, 90]]


def pair(model, *, capacity=128, **settings):
    """A plain decoder and a captured one, with the same prompts in."""
    capturer = Capturer()
    plain = Decoder(model, batch=2, capacity=capacity, static=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "refusal", lambda model: None)
        captured = GraphDecoder(model, batch=2, capacity=capacity)
    captured.capture = capturer
    logits = [decoder.prefill(PROMPTS) for decoder in (plain, captured)]
    assert torch.equal(*logits)
    return plain, captured, capturer


def step_both(plain, captured, steps, token=7):
    for i in range(steps):
        tokens = torch.tensor([token + i, 2 * token + i])
        assert torch.equal(plain.decode(tokens), captured.decode(tokens))


def test_replayed_steps_are_the_plain_ones():
    model = tiny_llama()
    plain, captured, capturer = pair(model)
    step_both(plain, captured, 20)
    assert captured.lengths == plain.lengths == [25, 22]
    assert len(capturer.recordings) == 1
    assert len(capturer.recordings[0].calls) > 50  # the whole step was noted


def test_replayed_checks_of_drafts_are_the_plain_ones():
    model = tiny_llama()
    plain, captured, capturer = pair(model)
    for rows in ([[4, 5, 6], [7]], [[8], [9, 10, 11, 12]], [[1, 2, 3, 4, 5], [6, 7]], [[3], [4]], [[2, 9, 1], []]):
        torch.testing.assert_close(plain.verify(rows), captured.verify(rows), rtol=0, atol=1e-5)
        assert plain.lengths == captured.lengths
        for decoder in (plain, captured):  # some were wrong
            wrong = [len(row) > 1 for row in rows]
            decoder.truncate([length - one for length, one in zip(decoder.lengths, wrong, strict=True)])
        after = [decoder.decode(torch.tensor([7, 14])) for decoder in (plain, captured)]
        torch.testing.assert_close(*after, rtol=0, atol=1e-5)
    assert len(capturer.recordings) == 3  # of 1, 4 and 8 tokens: not one a call


def test_what_the_host_counts_would_be_caught():
    """The stand-in for a graph is strict enough: a plain decoder's step, recorded, repeats its first position."""
    plain, other, _ = pair(tiny_llama())
    recording, tokens = Recording(), torch.tensor([7, 14])
    with torch.inference_mode(), recording:
        repeated = plain.decode(tokens)
    assert torch.equal(repeated, other.decode(tokens))
    with torch.inference_mode():
        recording.replay()
    assert not torch.allclose(repeated, other.decode(tokens))


def test_a_window_a_soft_cap_and_two_ropes(tmp_path):
    from references import make_reference

    make_reference("gemma3_text").save_pretrained(tmp_path)
    plain, captured, _ = pair(hasten.load(tmp_path, dtype="float32"))
    step_both(plain, captured, 12)


def test_after_another_prefill_and_a_truncation():
    plain, captured, capturer = pair(tiny_llama())
    step_both(plain, captured, 3)
    for decoder in (plain, captured):
        decoder.truncate(4)
    step_both(plain, captured, 2)
    assert torch.equal(*(decoder.prefill([[1, 2], [3]]) for decoder in (plain, captured)))
    step_both(plain, captured, 3)
    assert len(capturer.recordings) == 1


def test_rows_that_have_ended_stay_as_they_are():
    plain, captured, capturer = pair(tiny_llama())
    for active in ([True, True], [False, True], [False, True], [True, True], [True, False]):
        tokens = torch.tensor([3, 4])
        expected, found = (decoder.decode(tokens, active=active) for decoder in (plain, captured))
        assert torch.equal(expected[active], found[active])
        assert captured.lengths == plain.lengths
    assert captured.lengths == [8, 6]
    assert len(capturer.recordings) == 1


def test_captured_again_only_when_the_cache_grows():
    plain, captured, capturer = pair(tiny_llama())
    step_both(plain, captured, 2)
    for decoder in (plain, captured):
        decoder.cache.grow(256)
    step_both(plain, captured, 3)
    assert len(capturer.recordings) == 2


def test_warming_up_at_the_end_of_the_cache_writes_nothing_beyond_it():
    model = tiny_llama()
    plain, captured, _ = pair(model, capacity=128)
    for decoder in (plain, captured):
        decoder.prefill([[1] * 122, [2] * 122])  # 127 of 128 places taken in the first row
    step_both(plain, captured, 1)
    for a, b in zip((*plain.cache.k, *plain.cache.v), (*captured.cache.k, *captured.cache.v), strict=True):
        assert torch.equal(a[:-1], b[:-1])
    with pytest.raises(ConfigError, match="holds 128 tokens"):
        captured.decode(torch.tensor([1, 1]))


def test_models_that_cannot_be_captured(tmp_path):
    from references import make_reference

    assert "CUDA device; the model is on cpu" in refusal(tiny_llama())
    with pytest.raises(ConfigError, match="CUDA device"):
        GraphDecoder(tiny_llama(), batch=1, capacity=16)
    for name, reason in (("mixtral", "experts"), ("phi3-longrope", "longrope")):
        make_reference(name).save_pretrained(tmp_path / name)
        with pytest.raises(ConfigError, match=reason):
            GraphDecoder(hasten.load(tmp_path / name, dtype="stored"), batch=1, capacity=16)


def test_on_a_cpu_the_fastest_is_the_plain_one():
    decoder = fastest_decoder(tiny_llama(), batch=1, capacity=100, compiled=True)
    assert type(decoder) is Decoder
    assert decoder.cache.capacity == 128


@pytest.mark.slow
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
    plain = Decoder(model, batch=2, capacity=256, static=True)
    captured = GraphDecoder(model, batch=2, capacity=256)
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
