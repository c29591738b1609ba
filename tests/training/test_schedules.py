from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.training.recipe import Schedule
from hasten.training.schedules import decay_steps, factor, learning_rate, warmup_steps

schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup_steps=st.integers(0, 50),
    final_fraction=st.floats(0, 1),
    decay_fraction=st.floats(0, 1),
)


@given(schedules, st.integers(1, 400), st.data())
def test_the_factor_stays_within_zero_and_one(schedule, total, data):
    step = data.draw(st.integers(0, total + 20))
    assert 0 <= factor(schedule, step=step, total=total) <= 1 + 1e-12


@given(schedules, st.integers(120, 400))
def test_it_rises_in_the_warm_up_never_rises_after_it_and_ends_at_its_end_value(schedule, total):
    values = [factor(schedule, step=step, total=total) for step in range(total)]
    warmup = schedule.warmup_steps
    assert all(a < b for a, b in pairwise(values[:warmup]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[warmup:]))
    if warmup:
        assert values[warmup - 1] == 1
    decays = schedule.kind == "cosine" or (schedule.kind == "wsd" and decay_steps(schedule, total) > 1)
    if schedule.kind == "constant":
        assert values[-1] == 1
    elif decays:
        assert values[-1] == pytest.approx(schedule.final_fraction)


@given(schedules.filter(lambda s: s.kind != "wsd" or s.decay_fraction > 0.1), st.integers(120, 400))
def test_it_has_no_jumps(schedule, total):
    values = [factor(schedule, step=step, total=total) for step in range(total)]
    steepest = max(1 / max(1, schedule.warmup_steps), 2 / (total - 1 - schedule.warmup_steps), 1.5 / (0.1 * total))
    assert all(abs(a - b) <= steepest + 1e-9 for a, b in pairwise(values))


@given(schedules.filter(lambda s: s.warmup_steps > 0), st.integers(120, 400), st.data())
def test_the_warm_up_does_not_depend_on_the_total(schedule, total, data):
    step = data.draw(st.integers(0, schedule.warmup_steps - 1))
    assert factor(schedule, step=step, total=None) == factor(schedule, step=step, total=total)


def test_wsd_is_flat_until_it_decays():
    schedule = Schedule(kind="wsd", warmup_steps=10, final_fraction=0.0, decay_fraction=0.2)
    values = [learning_rate(schedule, peak=3.0, step=step, total=100) for step in range(100)]
    assert values[9:81] == [3.0] * 72
    assert values[80:] == pytest.approx([3.0 * (1 - n / 19) for n in range(20)])


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_decay_of_no_or_one_step_changes_no_step_before_the_last(decay):
    schedule = Schedule(kind="wsd", warmup_steps=0, final_fraction=0.25, decay_fraction=decay)
    assert [factor(schedule, step=step, total=100) for step in (0, 98, 99)] == [1.0, 1.0, 0.25]


def test_the_warm_up_takes_at_most_its_share_of_all_steps():
    schedule = Schedule(warmup_steps=100, warmup_share=0.25)
    assert [warmup_steps(schedule, total) for total in (None, 1000, 100, 10, 1)] == [100, 100, 25, 3, 1]
    assert warmup_steps(Schedule(warmup_steps=0, warmup_share=0.25), 100) == 0
    assert warmup_steps(Schedule(warmup_steps=100), 10) == 100, "a run that ends within its warm-up"
