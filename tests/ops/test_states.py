"""What layers that keep states compute with: the causal convolution, and sequences in groups of one length."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.states import causal_convolution, group_sequences, in_groups


@given(st.integers(0, 1 << 30), st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
@settings(max_examples=30)
def test_the_convolution_is_pytorchs_and_may_be_cut_anywhere(seed, kernel, pieces, biased):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, sum(pieces), 5, generator=generator)
    weight = torch.randn(5, kernel, generator=generator)
    bias = torch.randn(5, generator=generator) if biased else None
    whole, last = causal_convolution(x, weight, bias=bias)
    padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
    torch.testing.assert_close(whole, F.conv1d(padded, weight[:, None], bias, groups=5).transpose(1, 2))
    found, before = [], None
    for part in x.split(pieces, dim=1):
        y, before = causal_convolution(part, weight, before, bias)
        found.append(y)
    assert torch.equal(torch.cat(found, dim=1), whole)
    assert torch.equal(before, last)
    assert before.shape == (2, kernel - 1, 5)


def test_the_convolution_of_16_bit_inputs_keeps_them_and_sums_in_float32():
    x, weight = torch.randn(1, 7, 3).bfloat16(), torch.randn(3, 4).bfloat16()
    y, last = causal_convolution(x, weight)
    assert (y.dtype, last.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(y, causal_convolution(x.float(), weight.float())[0])
    assert torch.equal(last, x[:, -3:])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6), st.integers(0, 3))
def test_groups_hold_every_sequence_once(sequences, padding):
    """Each sequence is seen with its own tokens and place; padding behind any of them is zero."""
    counts, starts = [count for count, _ in sequences], [start for _, start in sequences]
    if not any(counts):
        return
    first, tokens = [], 0
    for count in counts:
        first.append(tokens)
        tokens += count + padding
    x = torch.arange(1, tokens + 1).float()[None, :, None]
    slots = list(range(len(counts)))[::-1]
    place = {"tokens": tokens, "device": x.device}
    groups = group_sequences(first, counts, starts=starts, slots=slots, **place)
    seen = []

    def run(group, own):
        where = torch.arange(len(counts))[group.slots].tolist()
        assert own.shape[:2] == (group.size, len(own[0]))
        seen.extend(zip(where, own[..., 0].tolist(), [group.fresh] * group.size, strict=True))
        return own

    found = in_groups(groups, run, [x])
    expected = torch.zeros_like(x)
    wanted = []
    for number, (count, start) in enumerate(sequences):
        rows = slice(first[number], first[number] + count)
        expected[:, rows] = x[:, rows]
        if count:
            wanted.append((slots[number], x[0, rows, 0].tolist(), start == 0))
    assert sorted(seen) == sorted(wanted)
    assert torch.equal(found, expected)
