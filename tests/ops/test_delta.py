"""The gated delta rule: chunks are the recurrence, however a text is cut, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_cases import random_inputs
from hasten.ops.delta import chunked_delta_rule, delta_rule, recurrent_delta_rule


def by_hand(q, k, v, decay, beta, matrix):
    """The paper's equation for one head and one token after the other, in loops."""
    sequences, tokens, heads, _ = v.shape
    shared, found = heads // k.shape[2], torch.zeros_like(v)
    end = torch.zeros(sequences, heads, k.shape[-1], v.shape[-1], dtype=v.dtype)
    for n in range(sequences):
        for h in range(heads):
            s = end[n, h].clone() if matrix is None else matrix[n, h].clone()
            for t in range(tokens):
                key, query = k[n, t, h // shared], q[n, t, h // shared]
                s = decay[n, t, h].exp() * s
                s = s + torch.outer(key, beta[n, t, h] * (v[n, t, h] - s.T @ key))
                found[n, t, h] = s.T @ query
            end[n, h] = s
    return found, end


@given(st.integers(0, 1 << 30), st.integers(1, 40), st.integers(1, 17), st.booleans())
@settings(max_examples=40)
def test_chunks_and_recurrence_are_the_formula(seed, tokens, chunk, state):
    inputs = random_inputs(seed, tokens=tokens, state=state)
    expected = by_hand(*inputs)
    for found in (recurrent_delta_rule(*inputs), chunked_delta_rule(*inputs, chunk=chunk)):
        for own, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-10)


@given(st.integers(0, 1 << 30), st.lists(st.integers(1, 90), min_size=1, max_size=4))
@settings(max_examples=30)
def test_a_text_may_be_cut_anywhere(seed, pieces):
    *inputs, matrix = random_inputs(seed, tokens=sum(pieces))
    expected, end = delta_rule(*inputs, matrix)
    found = []
    for part in zip(*(one.split(pieces, dim=1) for one in inputs), strict=True):
        outputs, matrix = delta_rule(*part, matrix)
        found.append(outputs)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(matrix, end, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
def test_chunks_in_float32_err_at_most_twice_what_the_recurrence_does(tokens):
    sizes = {"sequences": 2, "key_heads": 4, "heads": 8, "key_dim": 32, "value_dim": 48}
    inputs = random_inputs(7, tokens=tokens, **sizes)
    exact, end = recurrent_delta_rule(*inputs)
    narrow = [one.float() for one in inputs]
    for place, wanted in enumerate((exact, end)):
        plain = recurrent_delta_rule(*narrow)[place].double() - wanted
        found = chunked_delta_rule(*narrow)[place].double() - wanted
        assert found.square().mean().sqrt() <= 2 * plain.square().mean().sqrt()


def test_no_decay_is_so_strong_that_a_chunk_overflows():
    q, k, v, decay, beta, matrix = random_inputs(3, tokens=130)
    decay = decay.clone()
    decay[:, 40:50] = -1e4
    for own, wanted in zip(
        chunked_delta_rule(q, k, v, decay, beta, matrix), by_hand(q, k, v, decay, beta, matrix), strict=True
    ):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("state", [False, True])
def test_gradients_are_those_of_the_recurrence(state):
    def gradients(run):
        inputs = [one.requires_grad_() for one in random_inputs(5, tokens=21, state=state) if one is not None]
        outputs, end = run(*inputs)
        return torch.autograd.grad(outputs.square().sum() + end.sin().sum(), inputs)

    expected = gradients(recurrent_delta_rule)
    found = gradients(lambda *given: chunked_delta_rule(*given, chunk=8))
    for own, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(own, wanted, rtol=1e-8, atol=1e-10)


def test_autocast_leaves_the_sums_in_float32():
    inputs = [one.float() for one in random_inputs(1, tokens=70)]
    plain = delta_rule(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = delta_rule(*inputs)
    assert all(torch.equal(own, wanted) for own, wanted in zip(found, plain, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_one_token_is_a_step_of_the_recurrence_and_more_are_chunks(tokens):
    inputs = [one.float() for one in random_inputs(2, tokens=tokens, sequences=1, key_dim=32, value_dim=48)]
    step, chunks = recurrent_delta_rule(*inputs), chunked_delta_rule(*inputs)
    assert not all(map(torch.equal, step, chunks))  # they round differently
    assert all(map(torch.equal, delta_rule(*inputs), step if tokens == 1 else chunks))
