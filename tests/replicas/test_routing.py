"""Which replica is taken, from what was reported and what was sent."""

import random

import pytest

from hasten.engine.blocks import BlockManager
from hasten.engine.prefixes import prefix_keys
from hasten.replicas.routing import KEY_BYTES, RUNNING, Ask, Board, board_of, publish

SECRET = b"known to the replicas and the ingress"
SIZE = 4


def keys_of(tokens):
    _, *blocks = prefix_keys(tokens[:-1], block_size=SIZE, secret=SECRET)
    return [key[:KEY_BYTES] for key in blocks]


def ask(tokens):
    return Ask(len(tokens), keys_of(tokens), SIZE)


def report(blocks):
    return {"keys": b"".join(key[:KEY_BYTES] for key in blocks.cached)}


def holding(*prompts, blocks=64):
    """A cache in which these were computed."""
    manager = BlockManager(blocks=blocks, block_size=SIZE, secret=SECRET)
    for number, prompt in enumerate(prompts):
        manager.begin(number, prompt)
        manager.reserve(number, len(prompt))
        manager.written(number, prompt)
        manager.computed()
        manager.release(number)
    return manager


@pytest.fixture
def board():
    board = Board(draw=random.Random(0))
    board.replace(["a", "b", "c"])
    return board


PROMPT = list(range(100, 140))


def test_keys_are_those_by_which_the_cache_finds_blocks():
    manager = holding(PROMPT)
    assert manager.begin(7, PROMPT) == len(keys_of(PROMPT)) * SIZE, "as many as the router counts"
    assert set(keys_of(PROMPT)) <= {key[:KEY_BYTES] for key in manager.cached}
    other = BlockManager(blocks=8, block_size=SIZE)
    other.begin(0, PROMPT)
    other.reserve(0, 8)
    other.written(0, PROMPT[:8])
    assert not set(manager.cached) & set(other.cached), "without a common secret nobody can make keys that meet"


def test_the_holder_of_the_beginning_is_taken(board):
    board.report("b", report(holding(PROMPT)))
    board.report("c", report(holding(PROMPT[:8])))
    assert board.rank(ask([*PROMPT, 1, 2, 3])) == ["b", "c", "a"]
    assert {board.rank(ask([9, *PROMPT]))[0] for _ in range(50)} == {"a", "b", "c"}, "equals come in any order"


def test_an_evicted_block_is_no_reason_any_more(board):
    manager = holding(PROMPT, blocks=10)
    board.report("b", report(manager))
    assert board.rank(ask(PROMPT))[0] == "b"
    manager.begin(50, [7] * 40)
    manager.reserve(50, 40)  # takes all blocks
    board.report("b", report(manager))
    assert {board.rank(ask(PROMPT))[0] for _ in range(50)} == {"a", "b", "c"}


def test_until_what_waits_there_costs_more_than_reading_anew(board):
    board.report("b", report(holding(PROMPT)))
    for name in ("a", "c"):
        board.sent(ask([1] * 68), name)
    taken = []
    for number in range(6):
        one = ask([*PROMPT, number])
        taken.append(board.rank(one)[0])
        board.sent(one, taken[-1])
    # There it costs 1 token and, each time, 1 + RUNNING more; elsewhere 41 tokens, behind 68 and one that runs.
    there = [1 + number * (1 + RUNNING) < 41 + 68 + RUNNING for number in range(6)]
    assert [name == "b" for name in taken] == there
    assert taken.count("b") == 5


def test_what_was_sent_is_counted_until_it_ends(board):
    one, state = ask(PROMPT), board.states["a"]
    board.sent(one, "a")
    assert (state.unread, state.running) == (40, 1)
    board.begun(one)
    board.begun(one)
    assert (state.unread, state.running) == (0, 1)
    board.sent(one, "b")  # begun anew elsewhere
    assert (state.unread, state.running, board.states["b"].running) == (0, 0, 1)
    board.ended(one)
    board.ended(one)
    assert (board.states["b"].unread, board.states["b"].running) == (0, 0)
    board.sent(one, "a")  # what was routed in another thread meanwhile
    assert (state.unread, state.running) == (0, 0)


def test_a_replica_that_is_gone_takes_its_counts_along(board):
    one = ask(PROMPT)
    board.sent(one, "a")
    board.replace(["b", "c"])
    assert set(board.rank(ask(PROMPT))) == {"b", "c"}
    board.replace(["a", "b", "c"])  # a new one of that name
    board.ended(one)
    assert (board.states["a"].unread, board.states["a"].running) == (0, 0)
    board.report("gone", {"keys": b""})
    another = ask(PROMPT)
    board.sent(another, "gone")
    board.ended(another)


def test_a_board_is_found_by_its_name_while_it_is_held(board):
    name = publish(board)
    assert board_of(name) is board
    assert not board_of("another").states
