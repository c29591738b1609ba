"""Gated DeltaNet's native operator on every instruction set, against the readable layer, in any company."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.machine.measure import limited_threads
from hasten.model.delta import GatedDeltaNet
from hasten.model.mixer_config import DeltaConfig
from hasten.ops.native import library
from instruction_sets import ISAS, needs_native

pytestmark = needs_native


@dataclass
class Case:
    """A layer of some sizes, and the rows that its products give of sequences of these lengths."""

    sizes: DeltaConfig
    counts: list[int]
    seed: int = 0

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.layer = GatedDeltaNet(self.sizes, 64, 1e-2).requires_grad_(False)
        for leaf, values in self.layer.named_parameters(recurse=False):
            self.layer.fill(leaf, values, generator)
        bound = self.sizes.kernel**-0.5
        self.layer.conv.weight.uniform_(-bound, bound, generator=generator)
        self.layer.value_norm.weight.copy_(1 + 0.1 * torch.randn(self.sizes.value_dim, generator=generator))
        self.features = self.sizes.channels + self.sizes.values + 2 * self.sizes.value_heads
        self.x = torch.randn(sum(self.counts), self.features, generator=generator)
        places = len(self.counts) + 1  # of which the first one belongs to nobody
        inputs = torch.randn(places, self.sizes.kernel - 1, self.sizes.channels, generator=generator)
        shape = (self.sizes.value_heads, self.sizes.key_dim, self.sizes.value_dim)
        self.state = {"inputs": inputs, "matrix": torch.randn(places, *shape, generator=generator)}

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

    def native(self, isa=None, *, fresh=False, dtype=torch.float32, cuts=None, padding=0, certain=None):
        """Outputs (R, H·Dv) and the states after them. cuts: the tokens of each step."""
        state = {"inputs": self.state["inputs"].to(dtype).clone(), "matrix": self.state["matrix"].clone()}
        found = [self.x.new_empty(0, self.sizes.values)] * len(self.counts)
        before = [0 if fresh else 7] * len(self.counts)
        own = self.x.split(self.counts)
        for step in cuts or [self.counts]:
            rows, slots, starts = [], [], [0]
            for number, count in enumerate(step):
                first = len(found[number])
                rows.append(own[number][first : first + count])
                rows.append(self.x.new_full((padding, self.features), float("nan")))
                slots += [starts[-1] + i for i in range(count)] + [-1] * padding
                starts.append(starts[-1] + count + padding)
            lengths = [past + count + padding for past, count in zip(before, step, strict=True)]
            y = library(isa).ops.gated_delta(
                plan=self.plan(isa),
                x=torch.cat(rows),
                inputs=state["inputs"],
                matrices=state["matrix"],
                slots=torch.arange(1, len(self.counts) + 1),
                certain=None if certain is None else torch.tensor(certain),
                query_start_loc=torch.tensor(starts),
                seq_lens=torch.tensor(lengths),
                slot_mapping=torch.tensor(slots),
            )
            for number, count in enumerate(step):
                part = y[starts[number] : starts[number + 1]]
                assert torch.equal(part[count:], torch.zeros_like(part[count:]))
                found[number] = torch.cat([found[number], part[:count]])
                before[number] += count
        return torch.cat(found), state

    def readable(self, *, fresh=False, dtype=torch.float32):
        """The same by the readable layer, in `dtype`."""
        layer, sizes = self.layer.to(dtype), self.sizes
        outputs, ends = [], []
        for number, x in enumerate(self.x.to(dtype).split(self.counts)):
            parts = (sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads)
            mixed, z, beta, decay = (part[None] for part in x.split(parts, dim=-1))
            rate = layer.log_rate.exp() * F.softplus(decay + layer.rate_bias)
            state = {name: tensor[number + 1 : number + 2].to(dtype) for name, tensor in self.state.items()}
            y, end = layer.mix(None if fresh else state, mixed, -rate, beta.sigmoid())
            norm = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + layer.value_norm.eps) * layer.value_norm.weight
            outputs.append((norm * F.silu(z).unflatten(-1, (sizes.value_heads, -1)))[0].flatten(1))
            ends.append(end)
        self.layer.float()
        return torch.cat(outputs), {name: torch.cat([end[name] for end in ends]) for name in self.state}


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
FEW_ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # where PyTorch happens to be exact
TRUE = DeltaConfig(key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4)


def error(found, expected):
    return (found.double() - expected).square().mean().sqrt()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_it_errs_at_most_twice_what_pytorch_errs(isa, sizes, counts, seed, fresh):
    case = Case(sizes, counts, seed)
    exact, end = case.readable(fresh=fresh, dtype=torch.float64)
    plain, plain_end = case.readable(fresh=fresh)
    found, state = case.native(isa, fresh=fresh)
    assert error(found, exact) <= 2 * error(plain, exact) + FEW_ROUNDINGS * exact.abs().max()
    assert (
        error(state["matrix"][1:], end["matrix"])
        <= 2 * error(plain_end["matrix"], end["matrix"]) + FEW_ROUNDINGS * end["matrix"].abs().max()
    )
    assert torch.equal(state["inputs"][1:], plain_end["inputs"])
    assert torch.equal(state["inputs"][0], case.state["inputs"][0])  # a place that no sequence of the step has
    assert torch.equal(state["matrix"][0], case.state["matrix"][0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_heads_of_128_err_at_most_twice_what_pytorch_errs(isa, tokens):
    case = Case(TRUE, [tokens, 1])
    exact, end = case.readable(dtype=torch.float64)
    plain, plain_end = case.readable()
    found, state = case.native(isa)
    assert error(found, exact) <= 2 * error(plain, exact)
    assert error(state["matrix"][1:], end["matrix"]) <= 2 * error(plain_end["matrix"], end["matrix"])


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
    expected, end = case.native(isa, fresh=fresh, dtype=dtype)
    steps = max(map(len, pieces))
    cuts = [[own[step] if step < len(own) else 0 for own in pieces] for step in range(steps)]
    found, state = case.native(isa, fresh=fresh, dtype=dtype, cuts=cuts, padding=padding)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(state.values(), end.values(), strict=True))
    one_by_one = [[1 if step < count else 0 for count in case.counts] for step in range(max(case.counts))]
    found, state = case.native(isa, fresh=fresh, dtype=dtype, cuts=one_by_one)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(state.values(), end.values(), strict=True))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3), st.booleans())
def test_guesses_are_computed_and_leave_no_trace(isa, sizes, tokens, fresh):
    case, certain = Case(sizes, [sum(own) for own in tokens]), [sure for sure, _ in tokens]
    expected, _ = case.native(isa, fresh=fresh)
    _, end = case.native(isa, fresh=fresh, cuts=[certain])
    found, state = case.native(isa, fresh=fresh, certain=certain)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(state.values(), end.values(), strict=True))


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [40], [3, 1, 17]])
def test_the_number_of_threads_changes_nothing(counts):
    case = Case(TRUE, counts)
    found = []
    for threads in (1, 2, 3):
        with limited_threads(threads):
            found.append(case.native())
    for outputs, state in found[1:]:
        assert torch.equal(outputs, found[0][0])
        assert torch.equal(state["matrix"], found[0][1]["matrix"])


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
    case = Case(DeltaConfig(key_heads=1, value_heads=2, key_dim=4, value_dim=4, kernel=4), [2, 3])
    arguments = {
        "plan": case.plan(),
        "x": case.x,
        "inputs": case.state["inputs"],
        "matrices": case.state["matrix"],
        "slots": torch.tensor([1, 2]),
        "certain": None,
        "query_start_loc": torch.tensor([0, 2, 5]),
        "seq_lens": torch.tensor([2, 3]),
        "slot_mapping": torch.arange(5),
    }
    library().ops.gated_delta(**arguments)
    with pytest.raises(RuntimeError, match=words):
        library().ops.gated_delta(**arguments | {name: value})
