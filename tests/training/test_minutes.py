"""`run.minutes` on a clock that the test turns: how long a run takes, and that its decisions survive a kill."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from hasten.training import checkpoints, loop
from hasten.training.budget import Pace
from hasten.training.evaluate import Validation
from hasten.training.journal import read
from hasten.training.recipe import Recipe, Run, Schedule
from hasten.training.schedules import factor
from hasten.training.session import train
from hasten.training.step import TrainStep

PEAK = 5e-3


class Clock:
    """Seconds that pass only in training steps, `cost(seconds now)` in each, and in validations."""

    def __init__(self, cost, *, validation=0.0):
        self.now, self.cost, self.validation = 0.0, cost, validation

    def put_in(self, patch):
        run, validate = TrainStep.run, Validation.loss

        def timed_run(step, *arguments, **options):
            self.now += self.cost(self.now)
            return run(step, *arguments, **options)

        def timed_validation(validation, step):
            self.now += self.validation
            return validate(validation, step)

        patch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(TrainStep, "run", timed_run)
        patch.setattr(Validation, "loss", timed_validation)


def slower(after, *, times=4.0, each=0.5):
    return lambda now: each * (times if now >= after else 1.0)


@pytest.fixture
def minute(recipe):
    """A recipe of one minute: 120 steps of half a second."""
    return lambda **changes: recipe(**({"steps": None, "minutes": 1.0, "validate_every": 40, "layers": 1} | changes))


def rates(result):
    return [line["learning_rate"] / PEAK for line in read(result.folder / "train.jsonl")]


def test_at_an_even_speed_the_total_is_set_once_and_the_rate_comes_down(minute, monkeypatch):
    clock = Clock(lambda now: 20.0 if now == 0 else 0.5, validation=1.0)  # the first step compiles
    clock.put_in(monkeypatch)
    made = minute()
    result = train(made, progress=False)
    assert 50 <= clock.now <= 66
    assert result.steps == result.total_steps
    schedule = made.schedule
    assert rates(result) == pytest.approx([factor(schedule, step=s, total=result.steps) for s in range(result.steps)])


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.75, 0.9])
def test_a_machine_that_becomes_four_times_slower_still_ends_in_time_with_a_low_rate(minute, monkeypatch, kind, share):
    clock = Clock(slower(60 * share))
    clock.put_in(monkeypatch)
    schedule = Schedule(kind=kind, warmup_steps=8, final_fraction=0.0, decay_fraction=0.4)
    result = train(minute(schedule=schedule), progress=False)
    assert clock.now <= 1.2 * 60
    assert result.steps == result.total_steps <= 115  # of 120
    found = rates(result)
    assert found[-1] < 0.1
    assert all(before >= after for before, after in pairwise(found[8:]))  # it never rises again


def test_minutes_hold_where_steps_are_too_long_to_calibrate(minute, monkeypatch):
    clock = Clock(lambda now: 25.0)
    clock.put_in(monkeypatch)
    assert train(minute(), progress=False).steps <= 3
    assert clock.now <= 75


def test_a_moment_in_which_the_machine_is_busy_does_not_shorten_the_run(minute, monkeypatch):
    clock = Clock(lambda now: 2.0 if 30 <= now < 34 else 0.5)
    clock.put_in(monkeypatch)
    assert 108 <= train(minute(), progress=False).steps <= 120


def test_a_run_whose_total_was_lowered_goes_on_exactly(minute, monkeypatch):
    hard = {"dropout": 0.1, "checkpoint_every": 1000, "validate_every": 1000}
    hard["schedule"] = Schedule(kind="wsd", warmup_steps=8)
    with pytest.MonkeyPatch.context() as patch:
        Clock(slower(30)).put_in(patch)
        whole = train(minute(name="whole", **hard), progress=False)

    def kill(line):
        stored = checkpoints.find(whole.folder.parent / "killed/checkpoints/last")
        if stored is not None and line["step"] == stored.step + 3:
            raise KeyboardInterrupt

    clock = Clock(slower(30))
    clock.put_in(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(minute(name="killed", **hard), progress=False, on_step=kill)
    stored = checkpoints.find(whole.folder.parent / "killed/checkpoints/last")
    assert stored.progress.total == whole.steps  # the decision, and nothing else, had it written
    monkeypatch.setattr(loop.budget, "timed_steps", lambda *a, **o: pytest.fail("the total was set a second time"))
    resumed = train(minute(name="killed", **hard), progress=False)
    one, other = (read(r.folder / "train.jsonl") for r in (whole, resumed))
    numbers = ("step", "loss", "gradient_norm", "learning_rate")
    assert [[line[n] for n in numbers] for line in one] == [[line[n] for n in numbers] for line in other]
    weights = [(r.model_folder / "model.safetensors").read_bytes() for r in (whole, resumed)]
    assert weights[0] == weights[1]


def test_steps_are_a_limit_beside_minutes(minute, monkeypatch):
    Clock(lambda now: 0.01).put_in(monkeypatch)
    assert train(minute(steps=12), progress=False).steps == 12


def test_past_the_latest_end_the_run_ends_at_once():
    pace = Pace(Recipe(name="x", run=Run(minutes=1)), used=10.0, validation_batches=0)
    assert pace.lowered(step=20, total=1000, elapsed=0.5, used=30.0) < 1000
    assert pace.lowered(step=21, total=900, elapsed=40.0, used=70.0) == 21


def test_a_bend_continues_without_a_jump_and_ends_at_the_end():
    for kind in ("wsd", "cosine"):
        schedule = Schedule(kind=kind, warmup_steps=10, final_fraction=0.1, decay_fraction=0.4)
        before = factor(schedule, step=70, total=100)
        lowered = (70, before)
        assert before < 1
        assert factor(schedule, step=70, total=80, decay_start=lowered) == pytest.approx(before)
        assert factor(schedule, step=79, total=80, decay_start=lowered) == pytest.approx(0.1)
