"""The short convolution's native operator on every instruction set, against the readable layer, in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.model.mixer_config import ConvolutionConfig
from hasten.model.short_convolution import ShortConvolution
from hasten.ops.native import library
from instruction_sets import ISAS, needs_native
from mixer_cases import (
    MixerCase,
    assert_accurate,
    assert_cut_anywhere,
    assert_guesses_leave_no_trace,
    assert_threads_change_nothing,
)

pytestmark = needs_native


class Case(MixerCase):
    def __init__(self, sizes, counts, seed=0):
        super().__init__(sizes, counts, seed)
        self.layer = ShortConvolution(sizes, 8, 1e-5).requires_grad_(False)
        for parameter in self.layer.conv.parameters():
            parameter.normal_(generator=self.generator)
        self.x = self.normal(sum(counts), 3 * sizes.width)  # key, query, value
        self.state = self.states()

    def plan(self, isa=None):
        conv = self.layer.conv
        return library(isa).ops.plan_short_convolution(conv=conv.weight[:, 0].contiguous(), bias=conv.bias)

    def mixed(self, x, state):
        key, query, value = (part[None] for part in x.chunk(3, dim=-1))
        y, end = self.layer.mix(state, key * value)
        return (query * y)[0], end


SIZES = st.builds(
    lambda width, kernel, biased: ConvolutionConfig(kernel=kernel, width=width, biased=biased),
    st.sampled_from([1, 8, 16, 20, 64, 100, 130]),
    st.integers(2, 5),
    st.booleans(),
)
TRUE = ConvolutionConfig(kernel=3, width=2048)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_it_errs_at_most_twice_what_pytorch_errs(isa, sizes, counts, seed, fresh):
    assert_accurate(Case(sizes, counts, seed), isa, fresh=fresh)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(
    SIZES,
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2),
)
def test_a_text_has_the_same_bits_however_it_is_cut_and_in_any_company(isa, sizes, pieces, dtype, fresh, padding):
    case = Case(sizes, [sum(own) for own in pieces])
    assert_cut_anywhere(case, isa, pieces, padding=padding, fresh=fresh, dtype=dtype)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3), st.booleans())
def test_guesses_are_computed_and_leave_no_trace(isa, sizes, tokens, fresh):
    case, certain = Case(sizes, [sum(own) for own in tokens]), [sure for sure, _ in tokens]
    assert_guesses_leave_no_trace(case, isa, certain, fresh=fresh)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [40], [3, 1, 17]])
def test_the_number_of_threads_changes_nothing(counts):
    assert_threads_change_nothing(Case(TRUE, counts))


def test_products_are_rounded_before_the_convolution_as_later_steps_find_them():
    case = Case(TRUE, [9])
    key, _, value = case.x.chunk(3, dim=-1)
    rounded = (key * value).bfloat16().float()
    found, state = case.native(dtype=torch.bfloat16, fresh=True)
    assert torch.equal(state["inputs"][1].float(), rounded[-2:])
    key.copy_(rounded)
    value.fill_(1.0)
    assert torch.equal(case.native(fresh=True)[0], found)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slots", torch.tensor([0, 3]), "there is no state 3 among 3"),
        ("certain", torch.tensor([1, 0]), "of a sequence's 3 tokens none is certain"),
        ("x", torch.zeros(5, 7), "x has 35 numbers"),
        ("inputs", torch.zeros(3, 9), "the inputs in the states do not fit the layer"),
    ],
)
def test_what_does_not_fit_is_refused(name, value, words):
    arguments = Case(ConvolutionConfig(kernel=3, width=16), [2, 3]).step()
    library().ops.state_mixer(**arguments)
    with pytest.raises(RuntimeError, match=words):
        library().ops.state_mixer(**arguments | {name: value})
