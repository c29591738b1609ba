"""Batches: a pure function of position, the same for every number of workers, nothing lost and nothing twice."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import Batches, TokenSplit, evaluation_windows
from hasten.errors import ConfigError, DataError


def split_of(lengths: list[int], *, weights: bool = False) -> TokenSplit:
    """Documents of these lengths; token i of the split is the number i, so that every position can be recognised."""
    total = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    mask = (np.arange(total) % 3 == 0).astype(np.uint8) if weights else None
    return TokenSplit(tokens=np.arange(total, dtype=np.uint32), document_starts=starts, weights=mask, bytes=total)


lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenSplit, int, int]:
    lengths = draw(lengths_lists.filter(lambda chosen: sum(chosen) >= 2))
    sequence_length = draw(st.integers(1, sum(lengths) - 1))
    return split_of(lengths), sequence_length, draw(st.integers(1, 5))


def same(first, second) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("inputs", "targets", "documents"))


@settings(max_examples=40)
@given(cases(), st.integers(0, 2**40), st.integers(0, 30), st.booleans())
def test_batches_are_the_same_for_every_worker_count_and_start(case, seed, start, shuffle):
    split, sequence_length, batch_size = case
    expected = Batches(split, batch_size=batch_size, sequence_length=sequence_length, seed=seed, shuffle=shuffle)
    for workers in (0, 1, 3):
        batches = Batches(
            split,
            batch_size=batch_size,
            sequence_length=sequence_length,
            seed=seed,
            workers=workers,
            shuffle=shuffle,
        )
        iterator = batches.iterate(start)
        for position in range(start, start + 4):
            number, batch = next(iterator)
            assert number == position
            assert same(batch, expected.batch(position))
        iterator.close()


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**40), st.integers(1, 4), st.booleans())
def test_each_window_is_used_exactly_once_an_epoch_across_ranks(case, seed, world_size, shuffle):
    split, sequence_length, batch_size = case
    ranks = [
        Batches(
            split,
            batch_size=batch_size,
            sequence_length=sequence_length,
            seed=seed,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
        )
        for rank in range(world_size)
    ]
    windows = ranks[0].windows
    assert windows == len(split) // sequence_length
    rows: list[list[int]] = []
    position = 0
    while len(rows) < 2 * windows:
        for batches in ranks:
            rows.extend(batches.batch(position).inputs.tolist())
        position += 1
    for epoch in (rows[:windows], rows[windows : 2 * windows]):
        seen = [token for row in epoch for token in row]
        assert len(seen) == windows * sequence_length
        assert len(set(seen)) == len(seen)  # no token twice, so no window twice


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**40), st.integers(0, 50))
def test_targets_are_the_inputs_shifted_by_one(case, seed, position):
    split, sequence_length, batch_size = case
    batch = Batches(split, batch_size=batch_size, sequence_length=sequence_length, seed=seed).batch(position)
    assert batch.inputs.shape == batch.targets.shape == (batch_size, sequence_length)
    assert batch.inputs.dtype == batch.targets.dtype == batch.documents.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal(batch.targets, (batch.inputs + 1) % len(split))  # tokens are their own positions


@settings(max_examples=60)
@given(cases(), st.integers(0, 50))
def test_documents_number_the_documents_of_each_row(case, position):
    split, sequence_length, batch_size = case
    batch = Batches(split, batch_size=batch_size, sequence_length=sequence_length, seed=1).batch(position)
    begins = set(split.document_starts.tolist())
    for tokens, documents in zip(batch.inputs.tolist(), batch.documents.tolist(), strict=True):
        assert documents[0] == 0
        for at in range(1, sequence_length):
            assert documents[at] - documents[at - 1] == (tokens[at] in begins)


@settings(max_examples=60)
@given(cases())
def test_evaluation_predicts_every_token_exactly_once_in_order(case):
    split, sequence_length, batch_size = case
    predicted: list[int] = []
    for batch in evaluation_windows(split, batch_size=batch_size, sequence_length=sequence_length):
        assert batch.inputs.shape == (batch_size, sequence_length)
        learned = batch.targets != -100
        assert torch.equal(batch.inputs[learned] + 1, batch.targets[learned])
        predicted.extend(batch.targets[learned].tolist())
    assert predicted == list(range(1, len(split)))


def test_evaluation_takes_every_window():
    assert len(list(evaluation_windows(split_of([100]), batch_size=2, sequence_length=10))) == 5


@given(st.integers(0, 100))
@settings(max_examples=20)
def test_weights_take_the_loss_from_the_other_tokens(position):
    split = split_of([30, 30], weights=True)
    batch = Batches(split, batch_size=2, sequence_length=29, seed=3).batch(position)
    followers = batch.inputs + 1
    assert torch.equal(batch.targets, torch.where(followers % 3 == 0, followers, -100))


def test_weights_count_in_evaluation_too():
    windows = evaluation_windows(split_of([30, 30], weights=True), batch_size=2, sequence_length=59)
    predicted = [target for batch in windows for target in batch.targets.flatten().tolist() if target != -100]
    assert predicted == list(range(3, 60, 3))


def test_epochs_are_shuffled_differently_and_seeds_too():
    split = split_of([1000])

    def rows(seed: int, positions: range) -> list[list[int]]:
        batches = Batches(split, batch_size=1, sequence_length=10, seed=seed)
        return [batches.batch(position).inputs[0].tolist() for position in positions]

    first, second = rows(0, range(100)), rows(0, range(100, 200))
    assert first != second
    assert {row[0] % 10 for row in first} != {row[0] % 10 for row in second}  # other borders, too
    assert first != rows(1, range(100))
    assert [row[0] for row in first] != sorted(row[0] for row in first)


def test_without_shuffling_the_windows_come_in_order():
    batches = Batches(split_of([95]), batch_size=3, sequence_length=10, shuffle=False)
    assert batches.batch(0).inputs[:, 0].tolist() == [0, 10, 20]
    assert batches.batch(3).inputs[:, 0].tolist() == [0, 10, 20]  # 9 windows: the second epoch


def test_closing_the_iterator_ends_the_workers():
    def workers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("hasten-batches")]

    iterator = Batches(split_of([100]), batch_size=1, sequence_length=10, workers=3).iterate()
    next(iterator)
    assert workers()
    iterator.close()
    assert not workers()


def test_an_error_in_a_worker_reaches_the_caller():
    class Unreadable:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index):
            raise OSError("the disk is gone")

    split = TokenSplit(tokens=Unreadable(), document_starts=np.zeros(1, np.int64))
    iterator = Batches(split, batch_size=1, sequence_length=10, workers=2).iterate()
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)


def test_evaluation_fills_up_a_short_split():
    (batch,) = evaluation_windows(split_of([4, 6]), batch_size=2, sequence_length=16)
    assert batch.targets[0].tolist() == [*range(1, 10), *[-100] * 7]
    assert batch.targets[1].tolist() == [-100] * 16
    with pytest.raises(DataError, match="has 1 tokens, and a loss takes two"):
        next(evaluation_windows(split_of([1]), batch_size=1, sequence_length=4))


def test_a_split_shorter_than_a_window_says_the_numbers():
    split = split_of([4, 6])
    message = r"10 tokens \(2 documents\).*sequence_length 10 takes 11"
    with pytest.raises(DataError, match=message):
        Batches(split, batch_size=1, sequence_length=10)
    with pytest.raises(DataError, match=r"at most 9\)"):
        Batches(split, batch_size=1, sequence_length=20)
    assert Batches(split, batch_size=1, sequence_length=9).windows == 1


@pytest.mark.parametrize(
    "wrong", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"workers": -1}, {"batch_size": 0}, {"sequence_length": 0}]
)
def test_numbers_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        Batches(split_of([50]), **({"batch_size": 1, "sequence_length": 10} | wrong))


def test_a_negative_position_is_refused():
    with pytest.raises(ConfigError, match="-1"):
        Batches(split_of([50]), batch_size=1, sequence_length=10).batch(-1)
