"""The scheduler without a model: what it promises about order, fairness, room and guesses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.engine import scheduler
from hasten.engine.blocks import BlockManager
from hasten.engine.scheduler import Scheduler
from hasten.errors import ConfigError


class Machine:
    """A scheduler whose sequences end after given lengths; token number i of a text is `seed + i`."""

    def __init__(self, *, blocks: int = 100, block_size: int = 4, sequences: int = 8, budget: int = 16, **manager):
        self.scheduler = Scheduler(
            BlockManager(blocks=blocks, block_size=block_size, **manager), max_sequences=sequences, token_budget=budget
        )
        self.ends = {}
        self.steps = []  # {sequence: count} of each
        self.computed = {}  # sequence -> the tokens that were computed last, by position

    def add(self, prompt: int, answer: int = 5, *, seed: int = 0, **settings):
        tokens = range(seed, seed + prompt)
        sequence = self.scheduler.add(tokens, **settings)
        self.ends[sequence] = prompt + answer
        return sequence

    def step(self, **options):
        plan = self.scheduler.plan(**options)
        self.scheduler.check()
        assert sum(entry.count for entry in plan) <= self.scheduler.token_budget
        for entry in plan:
            assert entry.count > 0
            assert entry.start == entry.sequence.computed
            room = len(self.scheduler.blocks.block_table(entry.sequence.number)) * self.scheduler.blocks.block_size
            assert entry.end <= room
        self.steps.append({entry.sequence: entry.count for entry in plan})
        self.scheduler.advance(plan)
        for entry in plan:
            if entry.complete:
                self.scheduler.accept(entry.sequence, [entry.sequence.tokens[0] + len(entry.sequence.tokens)])
                if len(entry.sequence.tokens) >= self.ends[entry.sequence]:
                    self.scheduler.finish(entry.sequence)
        self.scheduler.check()
        return plan

    def run(self, limit: int = 2000):
        for _ in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                assert self.scheduler.blocks.free == self.scheduler.blocks.blocks
                return
            assert self.step(), "a step that does nothing while somebody waits"
        raise AssertionError("it does not end")


def test_a_long_prompt_never_stops_a_decode():
    machine = Machine(budget=16)
    short = [machine.add(4, 40, seed=100 * i) for i in range(1, 4)]
    machine.step()
    long = machine.add(200, 3)
    machine.run()
    reading = [step for step in machine.steps if step.get(long, 0) > 1]
    assert len(reading) == -(-200 // (16 - 3)), "the prompt takes all the budget that the decodes leave"
    for sequence in short:
        places = [i for i, step in enumerate(machine.steps) if sequence in step]
        assert places == list(range(places[0], places[0] + 40)), "a token in every step"


def test_a_short_prompt_does_not_wait_for_a_long_one():
    machine = Machine(budget=16)
    long = machine.add(200, 3)
    machine.step()
    short = machine.add(8, 3, seed=1000)
    machine.step()
    assert machine.steps[-1] == {long: 8, short: 8}
    machine.step()
    assert machine.steps[-1] == {short: 1, long: 15}


def test_what_others_leave_of_the_budget_is_used():
    machine = Machine(budget=16)
    long = machine.add(200, 3)
    short = machine.add(2, 3, seed=1000)
    machine.step()
    assert machine.steps[-1] == {long: 14, short: 2}


def test_twins_share_what_is_computed_in_the_same_step():
    machine = Machine(budget=64)
    first, twin = machine.add(18), machine.add(18)
    machine.step()
    assert machine.steps[-1] == {first: 18, twin: 2}
    assert twin.cached == 16


def test_the_youngest_gives_way_and_comes_back():
    machine = Machine(blocks=8, block_size=4)
    old, young = machine.add(10, 20), machine.add(10, 20, seed=500)
    machine.run()
    assert machine.scheduler.preemptions > 0
    places = [i for i, step in enumerate(machine.steps) if old in step]
    assert places == list(range(len(places))), "the oldest is never stopped"
    assert len(young.tokens) == 30


def test_smaller_priority_numbers_go_first():
    machine = Machine(sequences=2, budget=8)
    low = [machine.add(4, 30, seed=100 * i, priority=5) for i in range(1, 4)]
    machine.step()
    urgent = machine.add(4, 3, seed=1000, priority=-1)
    machine.step()
    assert urgent in machine.steps[-1]
    assert low[1] not in machine.steps[-1], "the later of the two that ran made way"
    machine.run()
    assert all(len(sequence.tokens) == 34 for sequence in low)


def test_samples_that_lost_their_blocks_come_back_together():
    machine = Machine(sequences=3, budget=64)
    first = machine.add(9, 40, slots=3)
    machine.step()
    samples = [first, machine.scheduler.fork(first), machine.scheduler.fork(first)]
    machine.ends |= dict.fromkeys(samples, 49)
    for _ in range(5):
        machine.step()
    urgent = machine.add(4, 2, seed=1000, priority=-1, slots=3)
    machine.step()
    assert machine.steps[-1] == {urgent: 4}
    machine.step()
    machine.step()
    assert machine.steps[-1].keys() == set(samples), "none waits until another has ended"
    assert machine.scheduler.blocks.stats.shared_blocks >= 2, "they share their prompt again"
    machine.run()
    assert [len(sample.tokens) for sample in samples] == [49] * 3


def test_samples_are_counted_before_they_exist():
    machine = Machine(sequences=4)
    several = machine.add(4, 5, slots=3)
    machine.add(4, 5, seed=100, slots=2)
    assert machine.scheduler.plan()[0].sequence is several
    assert len(machine.scheduler.running) == 1


def test_guesses_are_verified_in_one_step_and_wrong_ones_taken_back():
    machine = Machine(blocks=10, block_size=4)
    sequence = machine.add(6, 100)
    machine.step()
    sequence.drafts = [50, 51, 52, 53]
    plan = machine.scheduler.plan()
    assert (plan[0].start, plan[0].count, plan[0].complete) == (6, 5, True)
    assert len(machine.scheduler.blocks.block_table(sequence.number)) == 3
    machine.scheduler.advance(plan)
    machine.scheduler.accept(sequence, [50, 99])  # one was right
    assert (sequence.tokens[6:], sequence.computed, sequence.drafts) == ([6, 50, 99], 8, [])
    assert len(machine.scheduler.blocks.block_table(sequence.number)) == 2
    machine.scheduler.check()
    assert machine.scheduler.plan()[0].count == 1


def test_guesses_give_way_to_the_budget():
    machine = Machine(sequences=4, budget=4)
    first, second = machine.add(2, 50), machine.add(2, 50, seed=100)
    machine.step()
    first.drafts, second.drafts = [7, 7, 7], [7, 7, 7]
    machine.step()
    assert machine.steps[-1] == {first: 3, second: 1}
    first.drafts, second.drafts = [7], [7, 7, 7]
    machine.step()
    assert machine.steps[-1] == {first: 2, second: 2}


def test_a_budget_below_the_sequences_is_refused():
    with pytest.raises(ConfigError, match="a step of 4 tokens"):
        Scheduler(BlockManager(blocks=4), max_sequences=5, token_budget=4)


ARRIVAL = st.tuples(
    st.integers(1, 40),  # prompt
    st.integers(1, 25),  # answer
    st.integers(0, 3),  # which text: equal beginnings are found in the cache
    st.integers(0, 2),  # priority
    st.integers(0, 6),  # steps before it comes
    st.booleans(),  # aborted after some steps
)


@settings(max_examples=150)
@given(
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=12),
    blocks=st.integers(17, 40),
    budget=st.integers(4, 40),
    prefix_cache=st.booleans(),
)
def test_everybody_ends_whatever_comes(arrivals, blocks, budget, prefix_cache):
    machine = Machine(blocks=blocks, sequences=4, budget=budget, prefix_cache=prefix_cache)
    doomed = []
    for prompt, answer, seed, priority, pause, abort in arrivals:
        for _ in range(pause):
            machine.step()
            while doomed and doomed[0].computed:
                machine.scheduler.finish(doomed.pop(0))
        sequence = machine.add(prompt, answer, seed=1000 * seed, priority=priority)
        if abort:
            doomed.append(sequence)
    for sequence in doomed:
        machine.scheduler.finish(sequence)
        machine.scheduler.check()
    machine.run()
    done = [sequence for sequence, end in machine.ends.items() if len(sequence.tokens) == end]
    assert len(done) >= len(arrivals) - sum(abort for *_, abort in arrivals)


def test_scored_prompts_share_the_memory_of_a_steps_logits(monkeypatch):
    monkeypatch.setattr(scheduler, "_MOST_SCORED", 20)
    machine = Machine(budget=64, blocks=200)
    scored = [machine.add(50, 2, seed=1000 * i) for i in (1, 2)]
    for sequence in scored:
        sequence.scored = 49
    plain = machine.add(30, 2, seed=5000)
    while any(one.computed < 49 for one in scored):
        plan = machine.step()
        assert sum(entry.scored for entry in plan) <= 20
    machine.run()
    assert len(plain.tokens) == 32


def test_who_comes_when_nobody_waits_gets_a_free_slot_at_once():
    machine = Machine(sequences=8, budget=64)
    running = [machine.add(4, 60, seed=100 * i) for i in range(1, 9)]
    machine.step()
    waiting = machine.add(4, 5, seed=2000)
    machine.step()
    assert not waiting.running
    machine.scheduler.finish(waiting)
    machine.scheduler.finish(running[0])
    late = machine.add(4, 5, seed=3000)
    assert not machine.scheduler.settled
    machine.step()
    assert late.running


def test_an_eighth_of_the_slots_stays_free_for_some_steps():
    machine = Machine(sequences=15, budget=64)
    running = [machine.add(4, 60, seed=100 * i) for i in range(1, 16)]
    waiting = machine.add(4, 5, seed=5000)
    machine.step()
    machine.scheduler.finish(running[0])
    for _ in range(8):
        assert machine.scheduler.settled
        machine.step(begin=False)
    assert not machine.scheduler.settled
    assert not waiting.running
    machine.step()
    assert waiting.running
    machine.add(4, 5, seed=6000)
    machine.step()
    machine.scheduler.finish(running[1])
    assert machine.scheduler.settled
    machine.scheduler.finish(running[2])
    assert not machine.scheduler.settled, "two of fifteen are more"


def test_who_waits_for_anything_but_a_slot_may_begin_in_the_next_step():
    machine = Machine(sequences=8, budget=64)
    for i in range(1, 8):
        machine.add(4, 60, seed=100 * i)
    machine.step()
    machine.scheduler.ready = lambda *_: False
    machine.add(4, 5, seed=2000)
    machine.step()
    assert not machine.scheduler.settled


def test_nobody_begins_with_the_block_that_one_who_runs_may_need():
    machine = Machine(blocks=5, block_size=4)
    machine.add(6, 10)
    machine.step()
    large = machine.add(12, 5, seed=1000)
    machine.step()
    assert not large.running
    machine.run()
    assert machine.scheduler.preemptions == 0


def test_each_sample_takes_a_slot():
    machine = Machine(sequences=3, budget=64)
    first = machine.add(9, 40, slots=3)
    machine.step()
    samples = [first, machine.scheduler.fork(first), machine.scheduler.fork(first)]
    machine.ends |= dict.fromkeys(samples, 49)
    other = machine.add(4, 5, seed=1000)
    machine.step()
    assert not other.running
    machine.scheduler.finish(samples[2])
    machine.step()
    assert other.running


def test_prompts_are_read_ahead_where_nobody_is_preempted():
    machine = Machine(blocks=9, block_size=4, sequences=4, budget=16)
    assert not machine.scheduler.can_read_prompts, "there is none"
    machine.add(3, 40, priority=5)
    machine.step()
    assert not machine.scheduler.can_read_prompts, "nobody waits"
    machine.add(8, 5, seed=1000, priority=5)
    assert machine.scheduler.can_read_prompts
    urgent = machine.add(8, 5, seed=2000, priority=4)
    assert not machine.scheduler.can_read_prompts, "the one that runs might make way"
    machine.scheduler.finish(urgent)
    assert machine.scheduler.can_read_prompts
    machine.step(begin=False)
    machine.step(begin=False)  # it has a second block
    assert not machine.scheduler.can_read_prompts, "a step and two of each might need all blocks"


def test_a_sequence_that_outgrows_a_length_is_computed_again_once():
    machine = Machine(budget=32)
    machine.scheduler.stretches_at = 10
    long, short = machine.add(8, 6), machine.add(3, 6, seed=1000)
    machine.run()
    assert [step[long] for step in machine.steps] == [8, 1, 1, 11, 1, 1]
    assert [step[short] for step in machine.steps] == [3, 1, 1, 1, 1, 1]
    assert (long.stretched, short.stretched) == (True, False)


def test_one_that_gives_its_own_blocks_back_leaves_others_the_budget_and_no_more():
    machine = Machine(blocks=11, block_size=16, sequences=2, budget=8)
    young = machine.add(13, 40, seed=1000, priority=1)
    machine.step()
    machine.step()
    urgent = machine.add(144, 3)
    while young.running:
        machine.step()
    assert machine.steps[-1] == {urgent: 8}
    assert urgent.computed == 19 * 7 + 8


def test_how_many_tokens_of_prompts_the_next_step_may_read():
    machine = Machine(budget=16)
    assert machine.scheduler.behind == 0
    machine.add(40)
    assert machine.scheduler.behind == 16, "no more than a step computes"
    machine.step()
    machine.step()
    assert machine.scheduler.behind == 40 - 32 - 1, "beside the one that every sequence is behind"
    machine.add(5, seed=1000)
    machine.add(3, seed=2000)
    assert machine.scheduler.behind == 7 + 5, "the first of those that wait"
    while machine.scheduler.waiting:
        machine.step()
    machine.step()
    assert machine.scheduler.behind == 0


@pytest.mark.parametrize(("prompt", "readable"), [(24, True), (25, False), (28, False)])
def test_a_prompt_is_read_ahead_only_where_all_of_it_leaves_a_block_for_each(prompt, readable):
    machine = Machine(blocks=9, block_size=4, sequences=4, budget=16)
    machine.add(3, 40)
    machine.step()  # eight blocks are free
    machine.add(prompt, 5, seed=1000)
    assert machine.scheduler.can_read_prompts == readable


def test_a_prompt_that_was_begun_is_read_on_ahead_and_one_that_was_preempted_is_not():
    machine = Machine(blocks=40, block_size=4, sequences=4, budget=16)
    machine.add(40)
    machine.step()
    assert machine.scheduler.can_read_prompts
    other = Machine(blocks=40, block_size=4, sequences=4, budget=16)
    other.add(3, 40, priority=-1)
    begun = other.add(3, 40, seed=1000)
    other.step()
    other.scheduler._preempt(begun)
    assert not other.scheduler.can_read_prompts


def test_states_are_those_before_the_guesses():
    machine = Machine()
    machine.scheduler.keeps_states = True
    sequence = machine.add(6, 100)
    machine.step()
    sequence.drafts = [50, 51]
    plan = machine.scheduler.plan()
    assert (plan[0].count, plan[0].guesses) == (3, 2)
    machine.scheduler.advance(plan)
    machine.scheduler.accept(sequence, [50, 99])
    assert sequence.computed == 7, "the right guess is computed again"
    sequence.drafts = [60, 61, 62]
    machine.scheduler.token_budget = 4
    plan = machine.scheduler.plan()
    assert (plan[0].count, plan[0].guesses, plan[0].complete) == (4, 2, True), "the last guess has no room"
    other = Machine(budget=4, sequences=2)
    other.scheduler.keeps_states = True
    other.add(9)
    assert [entry.guesses for entry in other.step()] == [0], "a part of a prompt has none"


def test_who_is_not_ready_is_asked_again_and_who_ends_before_it_began_is_reported():
    machine, asked, gone = Machine(block_size=4), [], []
    machine.scheduler.ready = lambda sequence, keys: asked.append(keys()) or len(asked) > 2
    machine.scheduler.gone = gone.append
    first = machine.add(9, 3)
    for _ in range(2):
        assert machine.step() == []
    machine.step()
    assert first.running
    assert asked == [machine.scheduler.blocks.keys(range(9))] * 3
    assert len(asked[0]) == 2
    waiting = machine.add(9, 3, seed=1000)
    machine.scheduler.finish(first)
    assert gone == []
    machine.scheduler.finish(waiting)
    machine.scheduler.finish(waiting)
    assert gone == [waiting]


def test_who_did_not_fit_is_not_tried_again_until_blocks_are_free():
    machine = Machine(blocks=7, block_size=4)
    machine.add(1, 10)
    small = machine.add(6, 10, seed=500)
    machine.step()
    asked = []
    machine.scheduler.ready = lambda sequence, keys: asked.append(sequence) or True
    large = machine.add(13, 5, seed=1000)
    assert not machine.scheduler.nobody_begins
    machine.step()
    assert asked == [large]
    assert machine.scheduler.nobody_begins
    assert machine.scheduler.settled
    machine.step()
    assert asked == [large]
    machine.scheduler.finish(small)
    machine.step()
    assert large.running


def test_nobody_begins_where_the_first_needs_more_slots():
    machine = Machine(sequences=4, budget=64)
    assert machine.scheduler.nobody_begins, "nobody waits"
    machine.add(4, 40)
    assert not machine.scheduler.nobody_begins
    machine.step()
    assert machine.scheduler.nobody_begins
    waiting = machine.add(4, 5, seed=1000, slots=4)
    assert machine.scheduler.nobody_begins
    machine.scheduler.finish(waiting)
    machine.add(4, 5, seed=1000, slots=3)
    assert not machine.scheduler.nobody_begins
    machine.add(4, 5, seed=2000, slots=4, priority=-1)
    assert not machine.scheduler.nobody_begins, "the one that runs makes way"


def test_an_urgent_text_that_fits_beside_the_others_preempts_nobody():
    machine = Machine(blocks=10, block_size=4, sequences=2)
    machine.add(4, 30, priority=1)
    machine.step()
    urgent = machine.add(16, 5, seed=1000)
    machine.step()
    assert urgent.running
    assert machine.scheduler.preemptions == 0


def test_where_a_block_has_room_for_a_whole_text_none_is_kept_for_others():
    for each in (False, True):
        scheduler = Scheduler(BlockManager(blocks=2, block_size=64), max_sequences=2, token_budget=64, block_each=each)
        scheduler.add(range(4))
        scheduler.advance(scheduler.plan())
        scheduler.add(range(100, 104))
        scheduler.plan()
        assert len(scheduler.running) == 1 + each


@pytest.mark.parametrize(("scored", "steps"), [(20, [50]), (21, [20, 30]), (45, [20, 20, 10])])
def test_what_is_not_scored_of_a_prompt_takes_what_is_left_of_the_budget(scored, steps, monkeypatch):
    monkeypatch.setattr(scheduler, "_MOST_SCORED", 20)
    machine = Machine(budget=64, blocks=200)
    sequence = machine.add(50, 2)
    sequence.scored = scored
    for count in steps:
        machine.step()
        assert machine.steps[-1] == {sequence: count}


def test_of_several_the_youngest_gives_way():
    machine = Machine(blocks=5, block_size=4)
    texts = [machine.add(3, 20, seed=100 * i) for i in range(3)]
    machine.step()
    assert [text.running for text in texts] == [True, True, True]
    machine.step()
    machine.step()  # each wants a second block, and two are free
    assert [text.running for text in texts] == [True, True, False]


def test_who_comes_back_waits_for_its_siblings_alone():
    machine = Machine(budget=16, sequences=4)
    back = machine.add(4, 40)
    machine.step()
    machine.scheduler._preempt(back)
    long = machine.add(200, 3, seed=1000, priority=-1)
    machine.step()
    assert machine.steps[-1] == {long: 15, back: 1}, "the one whose first block is still there"


def test_an_eighth_is_one_of_eight_and_an_urgent_text_does_not_wait_for_it():
    machine = Machine(sequences=8, budget=64)
    running = [machine.add(4, 60, seed=100 * i, priority=1) for i in range(8)]
    machine.add(4, 5, seed=5000, priority=2)
    machine.step()
    machine.scheduler.finish(running[0])
    assert machine.scheduler.settled
    machine.add(4, 5, seed=6000)
    assert not machine.scheduler.settled
