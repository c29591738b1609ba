"""Mamba-2's scan: chunks are the recurrence, however a text is cut, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.ssd import chunked_scan, recurrent_scan, scan


def random_inputs(seed, *, tokens, sequences=2, groups=2, heads=4, state_dim=5, head_dim=3, state=True):
    """q, k, v, decay and a matrix in float64, of the size that a model's are."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k = (normal(sequences, tokens, groups, state_dim) for _ in range(2))
    step = F.softplus(normal(sequences, tokens, heads))
    decay = -step * 8 * torch.rand(heads, generator=generator).double()
    v = step[..., None] * normal(sequences, tokens, heads, head_dim)
    return q, k, v, decay, normal(sequences, heads, state_dim, head_dim) if state else None


def by_hand(q, k, v, decay, matrix):
    """The paper's equation for one head and one token after the other, in loops."""
    sequences, tokens, heads, _ = v.shape
    shared, found = heads // k.shape[2], torch.zeros_like(v)
    end = torch.zeros(sequences, heads, k.shape[-1], v.shape[-1], dtype=v.dtype)
    for n in range(sequences):
        for h in range(heads):
            s = end[n, h].clone() if matrix is None else matrix[n, h].clone()
            for t in range(tokens):
                s = decay[n, t, h].exp() * s + torch.outer(k[n, t, h // shared], v[n, t, h])
                found[n, t, h] = s.T @ q[n, t, h // shared]
            end[n, h] = s
    return found, end


@given(st.integers(0, 1 << 30), st.integers(1, 40), st.integers(1, 17), st.booleans())
@settings(max_examples=40)
def test_chunks_and_recurrence_are_the_formula(seed, tokens, chunk, state):
    inputs = random_inputs(seed, tokens=tokens, state=state)
    expected = by_hand(*inputs)
    for found in (recurrent_scan(*inputs), chunked_scan(*inputs, chunk=chunk)):
        for own, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-10)


@given(st.integers(0, 1 << 30), st.lists(st.integers(1, 70), min_size=1, max_size=4))
@settings(max_examples=30)
def test_a_text_may_be_cut_anywhere(seed, pieces):
    *inputs, matrix = random_inputs(seed, tokens=sum(pieces))
    expected = scan(*inputs, matrix)
    found = []
    for part in zip(*(one.split(pieces, dim=1) for one in inputs), strict=True):
        y, matrix = scan(*part, matrix)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=1), expected[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(matrix, expected[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
def test_chunks_in_float32_err_at_most_twice_what_the_recurrence_does(tokens):
    inputs = random_inputs(7, tokens=tokens, heads=8, state_dim=32, head_dim=48)
    exact = recurrent_scan(*inputs)
    narrow = [one.float() for one in inputs]
    for place, wanted in enumerate(exact):
        plain = recurrent_scan(*narrow)[place].double() - wanted
        found = chunked_scan(*narrow)[place].double() - wanted
        assert found.square().mean().sqrt() <= 2 * plain.square().mean().sqrt()


def test_no_decay_is_so_strong_that_a_chunk_overflows():
    q, k, v, decay, matrix = random_inputs(3, tokens=130)
    decay = decay.clone()
    decay[:, 40:50] = -1e4
    for own, wanted in zip(chunked_scan(q, k, v, decay, matrix), by_hand(q, k, v, decay, matrix), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("state", [False, True])
def test_gradients_are_those_of_the_recurrence(state):
    def gradients(run):
        inputs = [one.requires_grad_() for one in random_inputs(5, tokens=21, state=state) if one is not None]
        outputs, end = run(*inputs)
        return torch.autograd.grad(outputs.square().sum() + end.sin().sum(), inputs)

    expected = gradients(recurrent_scan)
    found = gradients(lambda *given: chunked_scan(*given, chunk=8))
    for own, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(own, wanted, rtol=1e-8, atol=1e-10)


def test_autocast_leaves_the_sums_in_float32():
    inputs = [one.float() for one in random_inputs(1, tokens=70)]
    plain = scan(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scan(*inputs)
    assert all(torch.equal(own, wanted) for own, wanted in zip(found, plain, strict=True))
