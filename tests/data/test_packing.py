"""Windows of conversations: whole ones, each with its prompt, none without targets; what does not fit is counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import Batches, TokenSplit, evaluation_windows
from hasten.data.packing import pack
from hasten.errors import DataError


def chats(*given: tuple[int, int]) -> TokenSplit:
    """Conversations of a prompt and an answer of these many tokens; token i of the split is the number i."""
    weights = np.concatenate([np.repeat([0, 1], [prompt, answer]) for prompt, answer in given]).astype(np.uint8)
    starts = np.cumsum([0, *(prompt + answer for prompt, answer in given)])[:-1]
    tokens = np.arange(len(weights), dtype=np.uint32)
    return TokenSplit(tokens=tokens, document_starts=starts.astype(np.int64), weights=weights, name="train")


def test_as_many_whole_conversations_as_fit_are_one_window():
    packing = pack(chats((3, 2), (2, 2), (4, 1), (1, 1)), length=9)
    assert list(zip(packing.starts, packing.counts, strict=True)) == [(0, 9), (9, 7)]
    assert (packing.documents, packing.cut, packing.skipped) == (4, 0, 0)


def test_longer_ones_are_cut_at_the_end_or_left_out_and_counted():
    packing = pack(chats((2, 1), (2, 30), (30, 2), (2, 1)), length=9)
    assert list(zip(packing.starts, packing.counts, strict=True)) == [(0, 3), (3, 10), (67, 3)]
    assert packing.describe(9) == (
        "4 conversations in 3 windows of 9 tokens; 1 longer ones are cut at its end (--data.context); "
        "1 are left out, having no answer within it"
    )


def test_texts_among_them_are_cut_into_windows_and_lose_nothing():
    split = chats((0, 25), (2, 1))
    windows = evaluation_windows(split, batch_size=1, sequence_length=9)
    assert [t for batch in windows for t in batch.targets.flatten().tolist() if t >= 0] == [*range(1, 25), 27]


def test_where_no_answer_fits_the_error_says_what_would():
    with pytest.raises(
        DataError, match=r"none of the 2 .* train split has an answer within 9 tokens; the longest has 32"
    ):
        pack(chats((20, 2), (30, 2)), length=9)
    with pytest.raises(DataError, match=r"--data\.context\), or hold nothing out \(--data\.validation-fraction 0\)$"):
        pack(replace(chats((20, 2)), name="validation"), length=9)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12), st.integers(6, 30), st.data()
)
@settings(max_examples=60)
def test_every_window_has_targets_and_every_target_its_whole_prompt(given_chats, length, data):
    split = chats(*given_chats)
    try:
        batches = Batches(split, batch_size=2, sequence_length=length, seed=1)
    except DataError:
        assert all(prompt >= length + 1 for prompt, _ in given_chats)
        return
    batch = batches.batch(data.draw(st.integers(0, 20)))
    assert batch.targets.shape == (2, length)
    begins = set(split.document_starts.tolist())
    for inputs, targets, documents in zip(batch.inputs, batch.targets, batch.documents, strict=True):
        learned = targets >= 0
        assert learned.any()
        assert int(inputs[0]) in begins
        assert torch.equal(targets[learned], inputs[learned] + 1)
        for place in learned.nonzero().flatten().tolist():  # the document's first token is in the row
            first = int((documents == documents[place]).nonzero()[0])
            assert int(inputs[first]) in begins
    epoch = [batches.window(row) for row in range(batches.windows)]
    assert len(set(epoch)) == batches.windows
