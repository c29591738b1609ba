"""The block manager: sharing, copy on write, the prefix cache, and that nothing changes when something fails."""

from dataclasses import asdict

import pytest

from hasten.engine.block_table import Rows, SequenceBlocks
from hasten.engine.blocks import BlockManager, OutOfBlocks, blocks_of
from hasten.errors import ConfigError, HastenError


def grown(manager, sequence, tokens, *, salt=""):
    """Begin a sequence and write all of its tokens."""
    cached = manager.begin(sequence, tokens, salt=salt)
    assert manager.reserve(sequence, len(tokens)) == []
    manager.written(sequence, tokens)
    manager.check()
    manager.computed()
    return cached


def test_a_sequence_takes_blocks_as_it_grows_and_gives_them_back():
    manager = BlockManager(blocks=4, block_size=4)
    grown(manager, 1, range(5))
    assert (manager.free, len(manager.block_table(1))) == (2, 2)
    assert manager.needs(1, 8) == 0
    assert manager.needs(1, 9) == 1
    assert manager.reserve(1, 8) == []
    assert manager.free == 2
    manager.release(1)
    manager.check()
    assert manager.free == 4


def test_the_first_write_to_a_shared_block_copies_it_and_the_last_owner_writes_in_place():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(6))
    for child in (2, 3):
        manager.fork(1, child)
    assert manager.block_table(1) == manager.block_table(2) == manager.block_table(3)
    assert (manager.stats.used_blocks, manager.stats.shared_blocks, manager.stats.blocks_saved) == (2, 2, 4)
    assert [manager.needs(1, length) for length in (5, 6, 7, 8, 9)] == [0, 0, 1, 1, 2]
    source = manager.block_table(1)[1]
    for sequence in (1, 2):
        [(copied, target)] = manager.reserve(sequence, 7)
        assert copied == source
        assert manager.block_table(sequence) == [manager.block_table(3)[0], target]
        manager.check()
    assert manager.reserve(3, 7) == []
    assert manager.block_table(3)[1] == source
    assert (manager.stats.copied_blocks, manager.stats.shared_blocks, manager.stats.blocks_saved) == (2, 1, 2)


def test_a_fork_at_a_border_of_blocks_copies_nothing():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(8))
    manager.fork(1, 2)
    assert manager.reserve(1, 9) == manager.reserve(2, 9) == []
    assert manager.stats.used_blocks == 4


def test_room_that_is_not_written_is_not_shared():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(5))
    manager.reserve(1, 20)
    manager.fork(1, 2)
    assert len(manager.block_table(1)) == len(manager.block_table(2)) == 2
    manager.check()


def test_out_of_blocks_changes_nothing():
    manager = BlockManager(blocks=3, block_size=4)
    grown(manager, 1, range(6))
    manager.fork(1, 2)
    before = (manager.block_table(1), manager.block_table(2), manager.free, manager.stats)
    with pytest.raises(OutOfBlocks, match="2 more blocks of 4; 1 of 3 are free") as raised:
        manager.reserve(1, 9)
    assert isinstance(raised.value, HastenError)
    assert (manager.block_table(1), manager.block_table(2), manager.free, manager.stats) == before
    manager.check()
    assert len(manager.reserve(1, 8)) == 1


def test_full_blocks_of_the_beginning_are_adopted_but_never_all_tokens():
    manager = BlockManager(blocks=16, block_size=4)
    assert grown(manager, 1, range(8)) == 0
    assert grown(manager, 2, range(8)) == 4
    assert grown(manager, 3, range(9)) == 8
    assert grown(manager, 4, [0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert grown(manager, 5, [7, 1, 2, 3, 4, 5]) == 0
    assert manager.block_table(3)[:2] == manager.block_table(1)
    assert (manager.stats.prefix_hits, manager.stats.prefix_queries) == (16, 8 + 8 + 9 + 9 + 6)


def test_blocks_are_found_after_their_sequence_has_ended_and_its_beginning_stays_longest():
    manager = BlockManager(blocks=4, block_size=4)
    grown(manager, 1, range(13))
    first = manager.block_table(1)
    manager.release(1)
    grown(manager, 2, [50, 51])  # takes the block that was not full
    assert manager.stats.evicted_blocks == 0
    manager.reserve(2, 5)  # takes the youngest full one
    assert manager.stats.evicted_blocks == 1
    assert manager.begin(3, range(13)) == 8
    assert manager.block_table(3) == first[:2]
    manager.check()


def test_blocks_found_elsewhere_are_adopted_and_the_end_of_a_beginning_is_evicted_first():
    manager = BlockManager(blocks=4, block_size=4)
    keys = manager.keys(range(17))
    grown(manager, 1, range(5))  # keeps the first block, and one that is not full
    adopted = manager.adopt(keys, {keys[1], keys[3]})
    assert [key for key, _ in adopted] == [keys[1], keys[3]]
    assert manager.computed_blocks(keys) == [(keys[0], manager.block_table(1)[0])], "the others are still to be filled"
    manager.check()
    manager.computed()
    assert [key for key, _ in manager.computed_blocks(keys)] == [keys[0], keys[1], keys[3]]
    grown(manager, 2, [90])
    assert [manager.finds(key) for key in keys] == [True, True, False, False]
    assert manager.adopt(keys, set(keys)) == [], "the one free block has the second"


@pytest.mark.parametrize(("tokens", "mark"), [(1, 0), (8, 4), (9, 8)])
def test_the_last_block_border_before_the_last_token_is_marked(tokens, mark):
    manager = BlockManager(blocks=8, block_size=4)
    manager.begin(1, range(tokens))
    assert manager.table(1).mark == mark


def test_the_least_recently_used_block_is_evicted():
    manager = BlockManager(blocks=3, block_size=4)
    for sequence in (1, 2, 3):
        grown(manager, sequence, [sequence] * 4)
    for sequence in (2, 1, 3):
        manager.release(sequence)
    assert manager.begin(4, [2] * 5) == 4  # out of the middle, and back: now the last used
    manager.release(4)
    grown(manager, 5, [9] * 4)
    manager.release(5)
    assert [manager.begin(10 + token, [token] * 5) for token in (1, 2, 3)] == [0, 4, 4]


def test_twins_of_one_step_share_and_duplicates_are_kept():
    manager = BlockManager(blocks=8, block_size=4)
    manager.begin(1, range(6))
    manager.begin(2, range(6))  # both begun before either is scheduled
    for sequence in (1, 2):
        manager.reserve(sequence, 6)
        manager.written(sequence, range(6))
    assert not set(manager.block_table(1)) & set(manager.block_table(2))
    assert manager.begin(3, range(6)) == 4
    assert manager.block_table(3) == manager.block_table(1)[:1]
    manager.check()


def test_salts_and_processes_share_nothing():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(8), salt="one")
    assert grown(manager, 2, range(8), salt="two") == 0
    assert grown(manager, 3, range(8), salt="one") == 4
    other = BlockManager(blocks=8, block_size=4)
    grown(other, 1, range(8), salt="one")
    assert not manager._cached.keys() & other._cached.keys()


def test_a_block_that_is_written_anew_can_no_longer_be_found():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(8))
    manager.truncate(1, 6)
    manager.reserve(1, 8)
    manager.check()
    manager.written(1, [0, 1, 2, 3, 4, 5, 60, 70])
    assert manager.begin(2, [*range(8), 9]) == 4
    assert manager.begin(3, [0, 1, 2, 3, 4, 5, 60, 70, 9]) == 8


def test_a_shared_block_that_was_cut_is_copied_and_stays_findable():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(8))
    manager.fork(1, 2)
    manager.truncate(2, 6)
    assert len(manager.reserve(2, 7)) == 1
    manager.check()
    assert manager.begin(3, range(9)) == 8


def test_forks_and_cuts_are_refused_until_the_step_is_computed():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(6))
    manager.begin(2, [9, 9])
    manager.reserve(1, 7)
    manager.written(1, range(7))
    before = manager.block_table(1), manager.block_table(2), manager.free
    for call in (manager.fork, manager.truncate):
        for sequence in (1, 2):
            with pytest.raises(AssertionError, match="between `written` and `computed`"):
                call(sequence, 3)
    assert (manager.block_table(1), manager.block_table(2), manager.free) == before
    manager.computed()
    manager.fork(1, 3)
    assert len(manager.reserve(3, 8)) == 1  # the copy of a block that is whole now
    manager.written(3, range(8))
    manager.release(3)  # as after a step that failed
    manager.truncate(1, 3)
    manager.check()


def test_truncation_gives_back_what_lies_behind():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(4))
    manager.reserve(1, 20)
    manager.truncate(1, 5)
    assert len(manager.block_table(1)) == 2
    manager.truncate(1, 50)
    manager.check()
    manager.truncate(1, 0)
    assert manager.block_table(1) == []
    manager.check()


def test_guesses_that_were_right_are_shared_like_all_else():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(6))
    manager.reserve(1, 12)  # four guesses, of which nobody is told
    manager.truncate(1, 10)
    manager.fork(1, 2)
    assert len(manager.block_table(1)) == len(manager.block_table(2)) == 3
    assert len(manager.reserve(2, 11)) == 1
    manager.written(2, range(11))
    assert manager.begin(3, range(9)) == 8
    manager.check()


def test_forgetting_empties_the_cache_but_no_tables():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(9))
    table = manager.block_table(1)
    manager.forget()
    manager.check()
    assert manager.block_table(1) == table
    assert manager.begin(2, range(9)) == 0


def test_without_a_prefix_cache_only_forks_share():
    manager = BlockManager(blocks=8, block_size=4, prefix_cache=False)
    grown(manager, 1, range(9))
    assert grown(manager, 2, range(9)) == 0
    manager.fork(1, 3)
    assert manager.stats.shared_blocks == 3


def test_blocks_to_which_no_query_looks_back_are_left():
    manager = BlockManager(blocks=6, block_size=4, reach=5)
    tokens = list(range(60))
    manager.begin(1, tokens)
    for length in range(2, 60, 2):
        manager.reserve(1, length)
        manager.written(1, tokens[:length])
        manager.computed()
        manager.check()
        assert manager.count(1) <= blocks_of(length, 4, reach=5, step=2) <= 3
        assert len(manager.block_table(1)) == -(-length // 4)
    manager.fork(1, 2)
    manager.check()
    assert manager.begin(3, tokens[:20]) == 0, "the room of its beginning was needed"
    assert manager.begin(4, tokens[:59]) == 56, "but only the end of it is looked back to"
    assert manager.count(4) == 1
    manager.check()
    for sequence in (1, 2, 3, 4):
        manager.release(sequence)
    manager.check()
    assert manager.free == 6
    again = BlockManager(blocks=16, block_size=4, reach=5)
    grown(again, 1, tokens)
    again.release(1)
    assert again.begin(2, tokens[:50]) == 48
    assert again.count(2) == 1  # the block with positions 44 to 47: a query at 48 sees four keys before it
    again.check()


@pytest.mark.parametrize("reach", [None, 5])
def test_a_table_reads_as_the_list_of_its_blocks_whatever_was_left(reach):
    manager = BlockManager(blocks=16, block_size=4, reach=reach)
    manager.begin(1, range(60))
    table = manager.table(1)
    for length in (2, 12, 30):
        manager.reserve(1, length)
        manager.written(1, range(length))
        manager.computed()
        blocks = manager.block_table(1)
        assert len(table) == len(blocks) == -(-length // 4)
        assert list(table) == blocks
        for part in (slice(1), slice(2, 5), slice(-1, None)):
            assert table[part] == blocks[part]
    assert table.own == blocks[-manager.count(1) :]
    assert (manager.count(1) < len(blocks)) == (reach is not None)


def test_a_table_made_of_blocks_alone_reads_as_these():
    table = SequenceBlocks([7, 3, 5], [b""], 0, 12, 0)
    assert (list(table), table.own, table[1:]) == ([7, 3, 5], [7, 3, 5], [3, 5])
    assert [table.offered, Rows(table, 0, 12).slot] == [0, 0]


def test_only_replaced_and_removed_entries_count_as_edits():
    """A copy of a table that has had no edits since need only be extended."""
    manager = BlockManager(blocks=16, block_size=4)
    grown(manager, 1, range(6))
    table = manager.table(1)
    assert table.edits == 0
    manager.reserve(1, 12)
    assert table.edits == 0
    manager.truncate(1, 6)
    assert table.edits == 1
    manager.fork(1, 2)
    manager.reserve(1, 7)
    assert (table.edits, manager.table(2).edits) == (2, 0)


def test_rows_know_the_place_of_their_sequences_states():
    manager = BlockManager(blocks=16, block_size=4)
    for sequence in (1, 2):
        manager.begin(sequence, range(6))
    assert [Rows(manager.table(sequence), 0, 6).slot for sequence in (1, 2)] == [0, 1]
    rows = Rows([3, 4], 0, 6)
    assert (rows.slot, rows.stretched, rows.guesses) == (0, False, 0)


def test_the_numbers_of_a_new_manager_are_all_zero():
    assert set(asdict(BlockManager(blocks=4, block_size=4).stats).values()) == {0}


@pytest.mark.parametrize("sizes", [{"blocks": 0}, {"blocks": 4, "block_size": 0}])
def test_a_cache_without_blocks_is_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1 block of 1 token"):
        BlockManager(**sizes)


def test_the_check_finds_broken_books():
    manager = BlockManager(blocks=8, block_size=4)
    grown(manager, 1, range(6))
    manager.fork(1, 2)
    manager._sequences[2].block_table.pop()
    with pytest.raises(AssertionError, match="too few blocks"):
        manager.check()
    manager._sequences[2].block_table.append(manager._sequences[2].block_table[0])
    with pytest.raises(AssertionError, match="a block twice"):
        manager.check()
    manager._sequences[2].block_table[-1] = 7
    with pytest.raises(AssertionError, match="references are not"):
        manager.check()
