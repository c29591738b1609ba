"""Mamba-2's native operator on every instruction set, against the readable layer, in any company."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.model.mamba import Mamba2
from hasten.model.mixer_config import MambaConfig
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
        self.layer = Mamba2(sizes, 64, 1e-2).requires_grad_(False)
        for name, values in self.layer.named_parameters():
            if name.startswith("conv."):
                values.copy_(self.normal(*values.shape) * sizes.kernel**-0.5)
        self.layer.log_rate.copy_(self.normal(sizes.heads))
        self.layer.step_bias.copy_(self.normal(sizes.heads))
        self.layer.skip.copy_(self.normal(sizes.heads))
        self.layer.value_norm.weight.copy_(1 + 0.1 * self.normal(sizes.values))
        self.x = self.normal(sum(counts), sizes.values + sizes.channels + sizes.heads)
        self.state = self.states()

    def plan(self, isa=None, **changes):
        layer, sizes = self.layer, self.sizes
        parts = {
            "conv": layer.conv.weight[:, 0].contiguous(),
            "bias": layer.conv.bias,
            "rate": layer.log_rate.exp(),
            "step_bias": layer.step_bias,
            "skip": layer.skip,
            "norm_weight": layer.value_norm.weight,
            "norm_bias": None,
            "eps": layer.value_norm.eps,
            "offset": 0.0,
            "centred": False,
            "groups": sizes.groups,
            "state_dim": sizes.state_dim,
            "head_dim": sizes.head_dim,
        }
        return library(isa).ops.plan_mamba(**parts | changes)

    def mixed(self, x, state):
        layer, sizes = self.layer, self.sizes
        z, mixed, step = (part[None] for part in x.split((sizes.values, sizes.channels, sizes.heads), dim=-1))
        y, end = layer.mix(state, mixed, F.softplus(step + layer.step_bias))
        gated = (y.flatten(-2) * F.silu(z)).unflatten(-1, (sizes.groups, -1))
        normal = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + layer.value_norm.eps)
        return (normal.flatten(-2) * layer.value_norm.weight)[0], end


SIZES = st.builds(
    lambda groups, shared, head_dim, state_dim, kernel, biased: MambaConfig(
        groups=groups,
        heads=groups * shared,
        head_dim=head_dim,
        state_dim=state_dim,
        kernel=kernel,
        conv_biased=biased,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 12, 16, 32, 40, 64, 80]),
    st.sampled_from([1, 8, 16, 20, 128]),
    st.integers(1, 5),
    st.booleans(),
)
TRUE = MambaConfig(groups=1, heads=6, head_dim=64, state_dim=128, kernel=4)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_it_errs_at_most_twice_what_pytorch_errs(isa, sizes, counts, seed, fresh):
    assert_accurate(Case(sizes, counts, seed), isa, fresh=fresh)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_states_of_128_err_at_most_twice_what_pytorch_errs(isa, tokens):
    assert_accurate_overall(Case(TRUE, [tokens, 1]), isa)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(
    SIZES,
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=3),
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
    case, own = Case(TRUE, [9]), slice(TRUE.values, TRUE.values + TRUE.channels)
    exact, _ = case.native(dtype=torch.bfloat16, fresh=True)
    case.x[:, own] = case.x[:, own].bfloat16().float()
    found, state = case.native(fresh=True)
    assert torch.equal(found, exact)
    assert torch.equal(state["inputs"][1], case.x[-3:, own])


def test_no_step_is_too_large_or_too_small():
    case = Case(TRUE, [5, 1])
    for size in (1e4, -1e4):
        case.x[:, -TRUE.heads :] = size
        found, state = case.native()
        assert found.isfinite().all()
        assert state["matrix"].isfinite().all()
    assert torch.equal(state["matrix"][1:], case.state["matrix"][case.places])  # a step of 0 changes nothing


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slots", torch.tensor([0, 3]), "there is no state 3 among 3"),
        ("certain", torch.tensor([1, 0]), "of a sequence's 3 tokens none is certain"),
        ("x", torch.zeros(5, 7), "x has 35 numbers"),
        ("matrices", torch.zeros(3, 2, 2, 2), "the matrices of the states do not fit the layer"),
        ("matrices", None, "the matrices of the states do not fit the layer"),
        ("inputs", torch.zeros(3, 9), "the inputs in the states do not fit the layer"),
    ],
)
def test_what_does_not_fit_is_refused(name, value, words):
    arguments = Case(MambaConfig(groups=1, heads=2, head_dim=4, state_dim=4, kernel=4), [2, 3]).step()
    library().ops.state_mixer(**arguments)
    with pytest.raises(RuntimeError, match=words):
        library().ops.state_mixer(**arguments | {name: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": 4}, "6 heads cannot share 4 groups of keys and queries"),
        ({"head_dim": 32}, "conv has 640 channels; the layer has 448"),
        ({"norm_weight": torch.ones(64)}, "the norm is that of all 384 values"),
        ({"norm_bias": torch.ones(384)}, "the norm has a bias"),
        ({"skip": torch.ones(5)}, "skip has 5 numbers; it must be 6"),
        ({"bias": torch.ones(5)}, "bias has 5 numbers; it must be 640"),
    ],
)
def test_a_plan_of_parts_that_do_not_fit_is_refused(changes, words):
    with pytest.raises(RuntimeError, match=words):
        Case(TRUE, [1]).plan(**changes)
