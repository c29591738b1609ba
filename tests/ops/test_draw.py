"""The native draw of a token: the reference's, whatever the scores are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops import draw as operator
from hasten.ops.draw import draw, largest, likeliest, reference_draw
from instruction_sets import ISAS, needs_native

pytestmark = [pytest.mark.usefixtures("two_threads"), needs_native]
INF = math.inf


def scores_of(seed: int, rows: int, vocab: int, scale: float, offset: float, left: float) -> torch.Tensor:
    """Random ones, of which a share is left and the others are -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * scale + offset
    return scores.masked_fill(torch.rand(rows, vocab, generator=generator) >= left, -INF)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 2**62),
    rows=st.integers(1, 4),
    vocab=st.one_of(st.integers(1, 600), st.sampled_from([5000, 40_000, 70_000])),
    scale=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    offset=st.sampled_from([0.0, -1000.0, 1e6]),  # float32 has no room for the noise beside a million
    left=st.sampled_from([1.0, 0.5, 0.001]),
)
def test_the_token_is_the_references(isa, seed, rows, vocab, scale, offset, left):
    scores = scores_of(seed % 1000, rows, vocab, scale, offset, left)
    seeds, steps = torch.arange(seed, seed + rows), torch.arange(rows) + seed % 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_ISA", isa)
        assert torch.equal(draw(scores, seeds, steps), reference_draw(scores, seeds, steps))


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number(isa, monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", isa)
    scores = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
    scores[0] = -INF
    scores[1, 650] = math.nan
    scores[2, [3, 600]] = INF
    scores[3, 699] = 80.0
    seeds = steps = torch.arange(5)
    expected = reference_draw(scores, seeds, steps)
    assert expected.tolist()[:4] == [0, 650, 3, 699]
    assert torch.equal(draw(scores, seeds, steps), expected)


def test_the_reference_decides_between_those_that_are_too_near(monkeypatch):
    seeds, steps = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    asked = []

    def counted(scores: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        asked.append(len(scores))
        return reference_draw(scores, seeds, steps)

    monkeypatch.setattr(operator.operator, "reference_draw", counted)
    for scores, most in ((torch.zeros(200, 300), 0), (torch.full((200, 300), 1e6), 200)):
        asked.clear()
        assert torch.equal(draw(scores, seeds, steps), reference_draw(scores, seeds, steps))
        assert (sum(asked) > 0) == (most > 0)
        assert sum(asked) <= most


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    vocab=st.one_of(st.integers(1, 100), st.sampled_from([3000, 20_000])),
    share=st.floats(0, 1),
    steps=st.sampled_from([0, 1, 50]),
    left=st.sampled_from([1.0, 0.01]),
    ordered=st.booleans(),
)
def test_the_largest_are_those_of_topk(isa, seed, vocab, share, steps, left, ordered):
    scores = scores_of(seed, 2, vocab, 3.0, 0.0, left)
    if steps:  # many equal ones
        scores = (scores * steps).round() / steps
    if ordered:  # each is larger than all before it
        scores = scores.sort(dim=-1).values
    count = max(1, min(vocab, round(share**4 * vocab)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_ISA", isa)
        assert torch.equal(largest(scores, count), scores.topk(count).values)


@pytest.mark.parametrize("isa", [*ISAS, "none"])
@pytest.mark.parametrize("vocab", [1, 15, 16, 100, 1000])
def test_the_likeliest_is_the_first_of_the_largest(isa, vocab, monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", isa)
    scores = torch.randn(6, vocab + 3, generator=torch.Generator().manual_seed(0)).clamp(max=1.0)  # many equal ones
    scores[1], scores[2] = -INF, INF
    scores[3, vocab // 2], scores[4, vocab - 1], scores[5, vocab] = math.nan, 2, 2
    own = scores[:, :vocab]  # not one behind the other
    first = [row.index(max(row)) for row in own.tolist()]
    found = likeliest(own)
    assert found.dtype == torch.int64
    assert found.tolist() == [first[0], 0, 0, vocab // 2, vocab - 1, first[5]]
    assert likeliest(scores[:0]).shape == (0,)


@pytest.mark.parametrize("isa", ISAS)
def test_opcheck(isa, monkeypatch):
    from hasten.ops.native import native_ops

    monkeypatch.setenv("HASTEN_ISA", isa)
    scores, numbers = torch.randn(2, 50), torch.arange(2)
    for function, arguments in (
        (native_ops().draw, (scores, numbers, numbers)),
        (native_ops().largest, (scores, 3)),
        (native_ops().likeliest, (scores,)),
    ):
        torch.library.opcheck(function.default, arguments, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="seeds and steps are int64, one a row"):
        native_ops().draw(scores, numbers[:1], numbers)
    with pytest.raises(RuntimeError, match="there are 50 scores in a row, not 51"):
        native_ops().largest(scores, 51)
