"""Layers that keep states beside their native operator: texts in steps, cut anywhere, with padding and guesses."""

import torch

from hasten.machine.measure import limited_threads
from hasten.ops.native import library

FEW_ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # where PyTorch happens to be exact


class MixerCase:
    """A layer of some sizes, and the rows that its products give of texts of these lengths.

    A kind sets x (R, features) and state (places, …), whose first place belongs to nobody, and gives the operator's
    plan and what the readable layer computes.
    """

    def __init__(self, sizes, counts, seed=0):
        self.sizes, self.counts = sizes, counts
        self.places = torch.arange(len(counts), 0, -1)  # of each text's states: not in the order of the texts
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size):
        return torch.randn(size, generator=self.generator)

    def states(self):
        """Random states of all places."""
        places = len(self.counts) + 1
        return {name: self.normal(places, *one.size) for name, one in self.sizes.state.items()}

    def plan(self, isa=None):
        raise NotImplementedError

    def mixed(self, x, state):
        """The outputs of one text's rows (T, features) by the readable layer, and the state after them."""
        raise NotImplementedError

    def native(self, isa=None, *, fresh=False, dtype=torch.float32, cuts=None, padding=0, certain=None):
        """Outputs (R, values), and after them the states of place 0 and of the texts in order. cuts: the tokens of each
        step."""
        state = {name: one.to(dtype) if name == "inputs" else one for name, one in self.state.items()}
        state = {name: one.clone() for name, one in state.items()}
        found = [self.x.new_empty(0, self.sizes.values)] * len(self.counts)
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
            y = library(isa).ops.state_mixer(
                plan=self.plan(isa),
                x=torch.cat(rows),
                inputs=state["inputs"],
                matrices=state.get("matrix"),
                slots=self.places,
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
        of_texts = torch.cat([torch.zeros(1, dtype=torch.int64), self.places])
        return torch.cat(found), {name: one[of_texts] for name, one in state.items()}

    def readable(self, *, fresh=False, dtype=torch.float32):
        """The same by the readable layer, in `dtype`; states without the first place."""
        self.layer.to(dtype)
        outputs, ends = [], []
        for number, x in enumerate(self.x.to(dtype).split(self.counts)):
            place = self.places[number]
            state = {name: one[place : place + 1].to(dtype) for name, one in self.state.items()}
            y, end = self.mixed(x, None if fresh else state)
            outputs.append(y)
            ends.append(end)
        self.layer.float()
        return torch.cat(outputs), {name: torch.cat([end[name] for end in ends]) for name in self.state}

    def step(self):
        """The operator's arguments for one step of all rows."""
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        return {
            "plan": self.plan(),
            "x": self.x,
            "inputs": self.state["inputs"],
            "matrices": self.state.get("matrix"),
            "slots": self.places,
            "certain": None,
            "query_start_loc": starts,
            "seq_lens": torch.tensor(self.counts),
            "slot_mapping": torch.arange(len(self.x)),
        }


def error(found, expected):
    return (found.double() - expected).square().mean().sqrt()


def assert_same(found, expected):
    """Outputs and states have the same bits."""
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(one, expected[1][name]) for name, one in found[1].items())


def assert_accurate(case, isa, *, fresh):
    """It errs at most twice what PyTorch errs, keeps the inputs as they are, and leaves a place of nobody alone."""
    exact, end = case.readable(fresh=fresh, dtype=torch.float64)
    plain, plain_end = case.readable(fresh=fresh)
    found, state = case.native(isa, fresh=fresh)
    assert error(found, exact) <= 2 * error(plain, exact) + FEW_ROUNDINGS * exact.abs().max()
    if "matrix" in state:
        allowed = 2 * error(plain_end["matrix"], end["matrix"]) + FEW_ROUNDINGS * end["matrix"].abs().max()
        assert error(state["matrix"][1:], end["matrix"]) <= allowed
    assert torch.equal(state["inputs"][1:], plain_end["inputs"])
    assert all(torch.equal(one[0], case.state[name][0]) for name, one in state.items())


def assert_accurate_overall(case, isa):
    """The root mean square of all errors is at most twice PyTorch's, in a layer of real sizes."""
    exact, end = case.readable(dtype=torch.float64)
    plain, plain_end = case.readable()
    found, state = case.native(isa)
    assert error(found, exact) <= 2 * error(plain, exact)
    assert error(state["matrix"][1:], end["matrix"]) <= 2 * error(plain_end["matrix"], end["matrix"])


def assert_cut_anywhere(case, isa, pieces, *, padding, **how):
    """Texts in steps of these pieces, beside padding, and token by token, have the bits of one step."""
    expected = case.native(isa, **how)
    steps = max(map(len, pieces))
    cuts = [[own[step] if step < len(own) else 0 for own in pieces] for step in range(steps)]
    assert_same(case.native(isa, cuts=cuts, padding=padding, **how), expected)
    one_by_one = [[1 if step < count else 0 for count in case.counts] for step in range(max(case.counts))]
    assert_same(case.native(isa, cuts=one_by_one, **how), expected)


def assert_guesses_leave_no_trace(case, isa, certain, *, fresh):
    """Tokens behind the certain ones are computed, and no state is of them."""
    outputs, _ = case.native(isa, fresh=fresh)
    _, state = case.native(isa, fresh=fresh, cuts=[certain])
    assert_same(case.native(isa, fresh=fresh, certain=certain), (outputs, state))


def assert_threads_change_nothing(case):
    found = []
    for threads in (1, 2, 3):
        with limited_threads(threads):
            found.append(case.native())
    for own in found[1:]:
        assert_same(own, found[0])
