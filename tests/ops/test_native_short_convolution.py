"""The short convolution's native operator on every instruction set, against the readable layer, in any company."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.machine.measure import limited_threads
from hasten.model.mixer_config import ConvolutionConfig
from hasten.model.short_convolution import ShortConvolution
from hasten.ops.native import library
from instruction_sets import ISAS, needs_native

pytestmark = needs_native


@dataclass
class Case:
    """A layer of some size, and the rows that its products give of sequences of these lengths."""

    sizes: ConvolutionConfig
    counts: list[int]
    seed: int = 0

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.layer = ShortConvolution(self.sizes, 8, 1e-5).requires_grad_(False)
        for parameter in self.layer.conv.parameters():
            parameter.normal_(generator=generator)
        self.x = torch.randn(sum(self.counts), 3 * self.sizes.width, generator=generator)  # key, query, value
        places = len(self.counts) + 1  # of which the first one belongs to nobody
        self.inputs = torch.randn(places, self.sizes.kernel - 1, self.sizes.width, generator=generator)

    def plan(self, isa=None):
        conv = self.layer.conv
        return library(isa).ops.plan_short_convolution(conv=conv.weight[:, 0].contiguous(), bias=conv.bias)

    def native(self, isa=None, *, fresh=False, dtype=torch.float32, cuts=None, padding=0, certain=None):
        """Outputs (R, C) and the inputs in the states after them. cuts: the tokens of each step."""
        inputs = self.inputs.to(dtype).clone()
        found = [self.x.new_empty(0, self.sizes.width)] * len(self.counts)
        before = [0 if fresh else 7] * len(self.counts)
        own = self.x.split(self.counts)
        for step in cuts or [self.counts]:
            rows, slots, starts = [], [], [0]
            for number, count in enumerate(step):
                first = len(found[number])
                rows.append(own[number][first : first + count])
                rows.append(self.x.new_full((padding, self.x.shape[1]), float("nan")))
                slots += [starts[-1] + i for i in range(count)] + [-1] * padding
                starts.append(starts[-1] + count + padding)
            lengths = [past + count + padding for past, count in zip(before, step, strict=True)]
            y = library(isa).ops.short_convolution(
                plan=self.plan(isa),
                x=torch.cat(rows),
                inputs=inputs,
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
        return torch.cat(found), inputs

    def readable(self, *, fresh=False, dtype=torch.float32):
        """The same by the readable layer, in `dtype`."""
        layer, outputs, ends = self.layer.to(dtype), [], []
        for number, x in enumerate(self.x.to(dtype).split(self.counts)):
            key, query, value = (part[None] for part in x.chunk(3, dim=-1))
            state = {"inputs": self.inputs[number + 1 : number + 2].to(dtype)}
            y, end = layer.mix(None if fresh else state, key * value)
            outputs.append((query * y)[0])
            ends.append(end["inputs"])
        self.layer.float()
        return torch.cat(outputs), torch.cat(ends)


SIZES = st.builds(
    lambda width, kernel, biased: ConvolutionConfig(kernel=kernel, width=width, biased=biased),
    st.sampled_from([1, 8, 16, 20, 64, 100, 130]),
    st.integers(2, 5),
    st.booleans(),
)
FEW_ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # where PyTorch happens to be exact
TRUE = ConvolutionConfig(kernel=3, width=2048)


def error(found, expected):
    return (found.double() - expected).square().mean().sqrt()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_it_errs_at_most_twice_what_pytorch_errs(isa, sizes, counts, seed, fresh):
    case = Case(sizes, counts, seed)
    exact, _ = case.readable(fresh=fresh, dtype=torch.float64)
    plain, plain_end = case.readable(fresh=fresh)
    found, inputs = case.native(isa, fresh=fresh)
    assert error(found, exact) <= 2 * error(plain, exact) + FEW_ROUNDINGS * exact.abs().max()
    assert torch.equal(inputs[1:], plain_end)
    assert torch.equal(inputs[0], case.inputs[0])  # a place that no sequence of the step has


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
    one_by_one = [[1 if step < count else 0 for count in case.counts] for step in range(max(case.counts))]
    for how in ({"cuts": cuts, "padding": padding}, {"cuts": one_by_one}):
        found, inputs = case.native(isa, fresh=fresh, dtype=dtype, **how)
        assert torch.equal(found, expected)
        assert torch.equal(inputs, end)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(SIZES, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3), st.booleans())
def test_guesses_are_computed_and_leave_no_trace(isa, sizes, tokens, fresh):
    case, certain = Case(sizes, [sum(own) for own in tokens]), [sure for sure, _ in tokens]
    expected, _ = case.native(isa, fresh=fresh)
    _, end = case.native(isa, fresh=fresh, cuts=[certain])
    found, inputs = case.native(isa, fresh=fresh, certain=certain)
    assert torch.equal(found, expected)
    assert torch.equal(inputs, end)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [40], [3, 1, 17]])
def test_the_number_of_threads_changes_nothing(counts):
    case = Case(TRUE, counts)
    found = []
    for threads in (1, 2, 3):
        with limited_threads(threads):
            found.append(case.native())
    assert all(torch.equal(one, other) for own in found[1:] for one, other in zip(own, found[0], strict=True))


def test_products_are_rounded_before_the_convolution_as_later_steps_find_them():
    case = Case(TRUE, [9])
    key, _, value = case.x.chunk(3, dim=-1)
    rounded = (key * value).bfloat16().float()
    found, inputs = case.native(dtype=torch.bfloat16, fresh=True)
    assert torch.equal(inputs[1].float(), rounded[-2:])
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
    case = Case(ConvolutionConfig(kernel=3, width=16), [2, 3])
    arguments = {
        "plan": case.plan(),
        "x": case.x,
        "inputs": case.inputs,
        "slots": torch.tensor([1, 2]),
        "certain": None,
        "query_start_loc": torch.tensor([0, 2, 5]),
        "seq_lens": torch.tensor([2, 3]),
        "slot_mapping": torch.arange(5),
    }
    library().ops.short_convolution(**arguments)
    with pytest.raises(RuntimeError, match=words):
        library().ops.short_convolution(**arguments | {name: value})
