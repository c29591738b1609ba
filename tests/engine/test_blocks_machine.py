"""Random operations on the block manager against a trivially right model, contents compared through attention.

10,000 operations by default; HASTEN_BLOCK_STEPS=1000000 asks for as many, HASTEN_BLOCK_SEED=7 for those of a seed.
"""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from block_model import Checked
from hasten.ops.attention.cache_rows import PLAIN, RowFormat

STEPS = int(os.environ.get("HASTEN_BLOCK_STEPS", "10000"))
SEED = os.environ.get("HASTEN_BLOCK_SEED")
AT_ONCE = 50
TOTAL: Counter = Counter()
ROWS = (PLAIN, RowFormat(8), RowFormat(4, rotated=True))

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
INDEX = st.integers(0, 30)


class Machine(RuleBasedStateMachine):
    """What an engine may do; a step is put together by several `schedule` and then run.

    Forks and cuts stand between steps; that they are refused inside of one is tried too.
    """

    @initialize(
        blocks=st.integers(3, 24),
        size=st.integers(1, 4),
        rows=st.sampled_from(ROWS),
        reach=st.none() | st.integers(2, 7),
    )
    def start(self, blocks, size, rows, reach):
        self.checked = Checked(blocks, size, rows, reach)

    def any(self):
        return bool(self.checked.tokens)

    def idle(self):
        return self.checked.pick(0, idle=True) is not None

    def within_a_step(self):
        return bool(self.checked.pending)

    def between_steps(self):
        return self.any() and not self.checked.pending

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "other"]))
    def begin(self, tokens, salt):
        self.checked.begin(tokens, salt)

    @precondition(any)
    @rule(index=INDEX, count=st.integers(1, 9), fresh=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def schedule(self, index, count, fresh):
        self.checked.schedule(self.checked.pick(index), count, fresh)

    @precondition(any)
    @rule()
    def schedule_all_and_run(self):
        """A decode step of everybody who finds room."""
        for name in list(self.checked.tokens):
            self.checked.schedule(name, 9, [0])
        self.checked.run()

    @precondition(any)
    @rule()
    def run(self):
        self.checked.run()

    @precondition(idle)
    @rule(index=INDEX, more=st.integers(1, 6), preempted=st.booleans())
    def reserve(self, index, more, preempted):
        """Room that is not written in this step, or given back again while the step is put together."""
        name = self.checked.pick(index, idle=True)
        if self.checked.reserve(name, len(self.checked.tokens[name]) + more) and preempted:
            self.checked.release(name)

    @precondition(between_steps)
    @rule(index=INDEX)
    def fork(self, index):
        self.checked.fork(self.checked.pick(index, idle=True))

    @precondition(between_steps)
    @rule(index=INDEX, length=INDEX)
    def truncate(self, index, length):
        self.checked.truncate(self.checked.pick(index, idle=True), length)

    @precondition(within_a_step)
    @rule(index=INDEX, length=INDEX)
    def fork_or_truncate_within_a_step(self, index, length):
        self.checked.refused(self.checked.pick(index), length)

    @precondition(between_steps)
    @rule(index=INDEX, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), right=st.integers(0, 5))
    def guess(self, index, tokens, right):
        self.checked.guess(self.checked.pick(index, idle=True), tokens, right)

    @precondition(idle)
    @rule(index=INDEX)
    def release(self, index):
        self.checked.release(self.checked.pick(index, idle=True))

    @precondition(any)
    @rule()
    def abort_all(self):
        """What follows a step that failed."""
        self.checked.pending, self.checked.copies = {}, []
        for name in list(self.checked.tokens):
            self.checked.release(name)
        self.checked.manager.forget()
        assert self.checked.manager.free == self.checked.blocks

    @invariant()
    def books_and_contents_agree(self):
        if hasattr(self, "checked"):
            TOTAL["steps"] += 1
            self.checked.check()

    def teardown(self):
        if hasattr(self, "checked"):
            TOTAL.update(self.checked.counts)


@pytest.mark.slow
@pytest.mark.timeout(300 + STEPS // 100)
def test_random_operations_agree_with_the_model():
    TOTAL.clear()
    rounds = 0
    while TOTAL["steps"] < STEPS:
        # A round that ends early is followed by one of other operations.
        run_state_machine_as_test(
            Machine if SEED is None else seed(f"{SEED} {rounds}")(Machine),
            settings=settings(
                max_examples=max(1, (STEPS - TOTAL["steps"]) // AT_ONCE),
                stateful_step_count=AT_ONCE,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
    print(dict(TOTAL))
    for happened in ("adopted", "refused", "copied", "evicted", "forbidden", "left"):
        assert TOTAL[happened] > 0, f"it never came to pass that a block was {happened}"
