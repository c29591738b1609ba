"""The Triton kernels of the draw in their interpreter; run by test_draw_triton.py in a process of its own."""

import math

import pytest
import torch

from hasten.engine.forward import places_of
from hasten.generation.params import SamplingParams
from hasten.generation.sampling import RowParams, keep_most_likely
from hasten.ops.draw import reference_draw, triton_draw


@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_the_reference_draws_the_same(vocab):
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(7, vocab, generator=generator) * 3
    scores[2, 1:] = -math.inf
    scores[3] = -math.inf
    seeds, steps = torch.randint(0, 1 << 62, (7,), generator=generator), torch.arange(7) * 3
    found = triton_draw.draw(scores, seeds, steps)
    expected = reference_draw(scores, seeds, steps)
    assert torch.equal(found, expected)
    assert found[3] == 0
    wide = torch.full((7, vocab + 3), 1e9)
    wide[:, :vocab] = scores
    assert torch.equal(triton_draw.draw(wide[:, :vocab], seeds, steps), expected)


@pytest.mark.parametrize("scale", [1, 8])
def test_what_is_kept(scale):
    params = [
        SamplingParams(top_k=k, top_p=p)
        for k, p in [(0, 1.0), (1, 1.0), (20, 1.0), (0, 0.5), (0, 0.95), (50, 0.9), (0, 1e-6)]
    ]
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


@pytest.mark.parametrize("width", [1, 4])
def test_places(width):
    lengths, counts = torch.tensor([9, 0, 17, 4, 1]), torch.tensor([1, 0, min(width, 3), width, 1])
    table = torch.randint(0, 90, (5, 12), generator=torch.Generator().manual_seed(0))
    found = triton_draw.place(lengths, counts, table, width, 4)
    for one, other in zip(found, places_of(lengths, counts, table, width=width, block_size=4), strict=True):
        assert torch.equal(one, other)


def test_moving_on():
    tokens, lengths, steps = torch.tensor([1, 2, 3]), torch.tensor([4, 0, 6]), torch.tensor([1, 0, 3])
    triton_draw.move_on(torch.tensor([7, 8, 9]), tokens, lengths, steps)
    assert (tokens.tolist(), lengths.tolist(), steps.tolist()) == ([7, 0, 9], [5, 0, 7], [2, 0, 4])
