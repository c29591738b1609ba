"""Fewer threads while other programs take cores away, and all of them again when they end."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import hasten
from hasten.machine import contention
from hasten.machine.contention import ProcessUsage, SharedCores, context_of_steps, shared_cores
from hasten.model.fused import refusal


class Machine:
    """A machine of four cores, seen from a process whose threads want all the time that they can get."""

    def __init__(self) -> None:
        self.now, self.seconds, self.switches, self.idle = 100.0, 0.0, 0, 0.0
        self.others = 0  # cores that other programs use all the time

    def step(self, threads: int, seconds: float = 0.05) -> None:
        """A step of a team, as one without the cores it needs goes."""
        contended = threads > 4 - self.others
        self.now += seconds
        self.seconds += seconds * threads * (0.6 if contended else 0.99)
        self.switches += int(seconds * (400 if contended else 30))
        self.idle += seconds * max(0.0, 4 - self.others - threads)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(contention, "usage", lambda: ProcessUsage(made.seconds, made.switches))
    monkeypatch.setattr(contention, "idle_seconds", lambda: made.idle)
    monkeypatch.setattr(contention, "time", SimpleNamespace(perf_counter=lambda: made.now))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield made
    torch.set_num_threads(before)


def steps(machine: Machine, cores: SharedCores, seconds: float) -> list[int]:
    """Steps for some seconds; how many threads each had."""
    ends, found = machine.now + seconds, []
    while machine.now < ends:
        with cores:
            found.append(torch.get_num_threads())
            machine.step(found[-1])
        assert torch.get_num_threads() == 4, "outside a step nothing has changed"
    return found


def test_alone_a_team_keeps_its_threads(machine: Machine) -> None:
    assert set(steps(machine, SharedCores(), 5)) == {4}


@pytest.mark.parametrize("others", [1, 2, 3, 4])
def test_a_team_leaves_other_programs_their_cores_and_comes_back(machine: Machine, others: int) -> None:
    cores = SharedCores()
    steps(machine, cores, 1)
    machine.others = others
    assert steps(machine, cores, 3)[-1] == max(1, 4 - others)
    assert set(steps(machine, cores, 5)) == {max(1, 4 - others)}, "it does not try what it knows to fail"
    machine.others = 0
    assert steps(machine, cores, 2)[-1] == 4


def test_it_reacts_within_three_tenths_of_a_second(machine: Machine) -> None:
    cores = SharedCores()
    steps(machine, cores, 1.02)
    machine.others = 1
    assert 3 in steps(machine, cores, 0.3)
    steps(machine, cores, 5)
    machine.others = 0
    assert steps(machine, cores, 1)[-1] == 4


def test_a_step_of_seconds_that_was_disturbed_is_not_tried_again_at_once(machine: Machine) -> None:
    cores = SharedCores()
    machine.others = 1
    with cores:
        machine.step(4, seconds=2)
    machine.others = 0
    assert set(steps(machine, cores, 7)) == {3}
    assert steps(machine, cores, 2)[-1] == 4


def test_one_thread_stays_one(machine: Machine) -> None:
    torch.set_num_threads(1)
    machine.others = 4
    cores = SharedCores()
    for _ in range(50):
        with cores:
            assert torch.get_num_threads() == 1
            machine.step(1)
    assert cores.given_up == 0


def test_each_thread_has_its_own_and_the_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contention.VARIABLE, raising=False)
    found = [shared_cores(), shared_cores()]
    thread = threading.Thread(target=lambda: found.append(shared_cores()))
    thread.start()
    thread.join()
    assert found[0] is found[1]
    assert found[0] is not found[2]
    with shared_cores():
        assert not isinstance(shared_cores(), SharedCores), "a step inside one is a part of it"
    assert context_of_steps(shares_cores=True) is shared_cores
    assert context_of_steps(shares_cores=False) is nullcontext
    monkeypatch.setenv(contention.VARIABLE, "0")
    assert context_of_steps(shares_cores=True) is nullcontext


def test_the_text_is_the_same_whatever_the_number_of_threads(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(cores: SharedCores, now: float) -> None:
        cores.given_up = 1 - cores.given_up
        looks.append(now)

    looks: list[float] = []
    model = hasten.load(tiny_folder, dtype="bfloat16")
    if refusal(model) is not None:
        pytest.skip(f"only fused models run on fewer threads: {refusal(model)}")
    monkeypatch.setattr(contention, "WINDOW", 0.0)
    monkeypatch.setattr(SharedCores, "_look", changing)
    torch.set_num_threads(2)
    texts = []
    for share in ("0", "1"):
        monkeypatch.setenv(contention.VARIABLE, share)
        texts.append(hasten.generate(model, "hello world " * 20, max_new_tokens=40, temperature=0.8, seed=3)[0].text)
    torch.set_num_threads(1)
    assert texts[0] == texts[1]
    assert len(looks) >= 40
