"""The Triton kernels of the draw in their interpreter; run by test_draw_triton.py in a process of its own."""

import math

import pytest
import torch

from hasten.engine.forward import places_of
from hasten.engine.params import SamplingParams
from hasten.engine.sampling import RowParams, keep_most_likely, next_tokens, process, sample
from hasten.ops.draw import draw, reference_draw, triton_draw


@pytest.fixture(params=[1 << 13, 512], ids=["wide", "narrow"])
def lanes(request, monkeypatch):
    """Rows of which the candidates are always all that is searched, and others."""
    monkeypatch.setattr(triton_draw, "LANES", request.param)
    monkeypatch.setattr(triton_draw, "ROOM", 2 * request.param)


@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_the_reference_draws_the_same(vocab):
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(7, vocab, generator=generator) * 3
    scores[2, 1:] = -math.inf
    scores[3] = -math.inf
    seeds, steps = torch.randint(0, 1 << 62, (7,), generator=generator), torch.arange(7) * 3
    found = draw(scores, seeds, steps)
    expected = reference_draw(scores, seeds, steps)
    assert torch.equal(found, expected)
    assert found[3] == 0
    wide = torch.full((7, vocab + 3), 1e9)
    wide[:, :vocab] = scores
    assert torch.equal(draw(wide[:, :vocab], seeds, steps), expected)


@pytest.mark.parametrize("scale", [1, 8])
def test_what_is_kept(scale, lanes):
    settings = [(0, 1.0), (1, 1.0), (20, 1.0), (0, 0.5), (0, 0.95), (50, 0.9), (0, 1e-6), (900, 0.9), (600, 1.0)]
    params = [SamplingParams(top_k=k, top_p=p) for k, p in settings]
    rows = RowParams.stack(params, vocab_size=5000)
    x = torch.randn(len(params), 5000, generator=torch.Generator().manual_seed(scale)) * scale
    x[2, :40] = 9.0 * scale  # equal ones share one fate
    x[4, 3000:] = -math.inf
    expected = keep_most_likely(x, rows)
    least = triton_draw.least_kept(x, rows.top_k, rows.top_p)
    assert torch.equal(x.masked_fill(x < least, -math.inf), expected)
    alone = triton_draw.least_kept(x, None, rows.top_p)
    by_p = RowParams.stack([SamplingParams(top_p=p.top_p) for p in params], vocab_size=5000)
    assert torch.equal(x.masked_fill(x < alone, -math.inf), keep_most_likely(x, by_p))


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1e-9, "top_k": 900},
    {"temperature": 1.7, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.6, "top_k": 200, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.1},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_from_logits_to_the_token(dtype, lanes):
    vocab, generator = 3000, torch.Generator().manual_seed(1)
    params = [SamplingParams(seed=i, **one) for i, one in enumerate(SETTINGS)]
    logits = (torch.randn(len(params), vocab + 8, generator=generator) * 4).to(dtype)
    logits[:, vocab:] = 1e4
    logits[3, 5:] = -math.inf
    logits[4, 7] = logits[4].max() * 0 + 1e3
    steps = torch.arange(len(params)) * 5
    for chosen in ([*range(len(params))], [2, 3], [5], [1], [1, 0], [6, 7]):
        rows = RowParams.stack([params[i] for i in chosen], vocab_size=vocab)
        expected = sample(process(logits[chosen], rows), rows, steps=steps[chosen])
        assert torch.equal(next_tokens(logits[chosen], rows, steps=steps[chosen]), expected)


def test_rows_without_any_token(lanes):
    params = [SamplingParams(seed=i, **one) for i, one in enumerate(SETTINGS)]
    rows = RowParams.stack(params, vocab_size=700)
    found = next_tokens(torch.full((len(params), 700), -math.inf), rows, steps=torch.zeros(len(params)).long())
    assert not found.any()


@pytest.mark.parametrize("width", [1, 4])
def test_places(width):
    lengths = torch.tensor([9, 0, 17, 4, 1, 50])
    counts = torch.tensor([1, 0, min(width, 3), width, 1, 1])
    table = torch.randint(0, 90, (6, 12), generator=torch.Generator().manual_seed(0))
    found = triton_draw.place(lengths, counts, table, width, 4)
    for one, other in zip(found, places_of(lengths, counts, table, width=width, block_size=4), strict=True):
        assert torch.equal(one, other)


def test_moving_on():
    tokens, lengths, steps = torch.tensor([1, 2, 3]), torch.tensor([4, 0, 6]), torch.tensor([1, 0, 3])
    triton_draw.move_on(torch.tensor([7, 8, 9]), tokens, lengths, steps)
    assert (tokens.tolist(), lengths.tolist(), steps.tolist()) == ([7, 0, 9], [5, 0, 7], [2, 0, 4])
