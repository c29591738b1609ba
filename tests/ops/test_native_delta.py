"""Gated DeltaNet's native operator on every instruction set, against the readable layer, in any company."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.model.delta import GatedDeltaNet
from hasten.model.mixer_config import DeltaConfig
from hasten.ops.native import library
from instruction_sets import ISAS, needs_native
from mixer_cases import (
    MixerCase,
    assert_accurate,
    assert_accurate_overall,
    assert_cut_anywhere,
    assert_guesses_leave_no_trace,
    assert_threads_change_nothing,
)

pytestmark = needs_native


class Case(MixerCase):
    def __init__(self, sizes, counts, seed=0):
        super().__init__(sizes, counts, seed)
        generator = self.generator
        self.layer = GatedDeltaNet(sizes, 64, 1e-2).requires_grad_(False)
        for leaf, values in self.layer.named_parameters(recurse=False):
            self.layer.fill(leaf, values, generator)
        bound = self.sizes.kernel**-0.5
        self.layer.conv.weight.uniform_(-bound, bound, generator=generator)
        self.layer.value_norm.weight.copy_(1 + 0.1 * torch.randn(self.sizes.value_dim, generator=generator))
        self.x = self.normal(sum(counts), sizes.channels + sizes.values + 2 * sizes.value_heads)
        self.state = self.states()

    def plan(self, isa=None):
        layer, sizes = self.layer, self.sizes
        return library(isa).ops.plan_delta(
            conv=layer.conv.weight[:, 0].contiguous(),
            rate=layer.log_rate.exp(),
            rate_bias=layer.rate_bias,
            norm_weight=layer.value_norm.weight,
            norm_bias=None,
            eps=layer.value_norm.eps,
            offset=0.0,
            centred=False,
            key_heads=sizes.key_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
        )

    def mixed(self, x, state):
        layer, sizes = self.layer, self.sizes
        parts = (sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads)
        mixed, z, beta, decay = (part[None] for part in x.split(parts, dim=-1))
        rate = layer.log_rate.exp() * F.softplus(decay + layer.rate_bias)
        y, end = layer.mix(state, mixed, -rate, beta.sigmoid())
        norm = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + layer.value_norm.eps) * layer.value_norm.weight
        return (norm * F.silu(z).unflatten(-1, (sizes.value_heads, -1)))[0].flatten(1), end


SIZES = st.builds(
    lambda key_heads, shared, key_dim, value_dim, kernel: DeltaConfig(
        key_heads=key_heads, value_heads=key_heads * shared, key_dim=key_dim, value_dim=value_dim, kernel=kernel
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 8, 16, 20, 128]),
    st.sampled_from([1, 12, 16, 32, 40, 128]),
    st.integers(1, 5),
)
TRUE = DeltaConfig(key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_it_errs_at_most_twice_what_pytorch_errs(isa, sizes, counts, seed, fresh):
    assert_accurate(Case(sizes, counts, seed), isa, fresh=fresh)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_heads_of_128_err_at_most_twice_what_pytorch_errs(isa, tokens):
    assert_accurate_overall(Case(TRUE, [tokens, 1]), isa)


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


def test_16_bit_inputs_are_those_of_the_convolution():
    """Values are rounded before the convolution, as later steps find them in the state."""
    case = Case(TRUE, [9])
    exact, _ = case.native(dtype=torch.bfloat16, fresh=True)
    case.x[:, : TRUE.channels] = case.x[:, : TRUE.channels].bfloat16().float()
    found, state = case.native(fresh=True)
    assert torch.equal(found, exact)
    assert torch.equal(state["inputs"][1], case.x[-3:, : TRUE.channels])


def test_no_decay_is_too_strong():
    case = Case(TRUE, [5, 1])
    case.x[:, -TRUE.value_heads :] = 1e4
    found, state = case.native()
    assert found.isfinite().all()
    assert state["matrix"].isfinite().all()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slots", torch.tensor([0, 3]), "there is no state 3 among 3"),
        ("slots", torch.tensor([1]), "slots has 1 numbers; it must be 2"),
        ("query_start_loc", torch.tensor([0, 2, 9]), "the rows from 2 to 9 of 5"),
        ("seq_lens", torch.tensor([2, 3], dtype=torch.int32), "seq_lens has 2 numbers; it must be 2 int64"),
        ("certain", torch.tensor([1, 0]), "of a sequence's 3 tokens none is certain"),
        ("slot_mapping", torch.arange(4), "slot_mapping has 4 numbers; it must be 5"),
        ("x", torch.zeros(5, 7), "x has 35 numbers"),
        ("matrices", torch.zeros(3, 2, 2, 2), "the matrices of the states do not fit the layer"),
        ("inputs", torch.zeros(3, 9), "the inputs in the states do not fit the layer"),
    ],
)
def test_what_does_not_fit_is_refused(name, value, words):
    arguments = Case(DeltaConfig(key_heads=1, value_heads=2, key_dim=4, value_dim=4, kernel=4), [2, 3]).step()
    library().ops.state_mixer(**arguments)
    with pytest.raises(RuntimeError, match=words):
        library().ops.state_mixer(**arguments | {name: value})
