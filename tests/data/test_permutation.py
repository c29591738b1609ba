"""The keyed permutation is a bijection, and keys matter."""

from hypothesis import given
from hypothesis import strategies as st

from hasten.data.batches import Permutation, mix


@given(st.integers(1, 600), st.integers(0, 2**64 - 1))
def test_every_number_comes_exactly_once(size, key):
    permutation = Permutation(size, key)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_keys_give_different_orders_and_the_same_key_the_same():
    orders = [[Permutation(200, key)[i] for i in range(200)] for key in (1, 2, 1)]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_small_sizes_reach_every_order():
    assert len({tuple(Permutation(3, key)[i] for i in range(3)) for key in range(200)}) == 6


def test_the_hash_is_pinned():
    # A changed hash would change what an interrupted training sees after it is resumed with a newer version.
    assert mix(0) == 0xE220A8397B1DCDAF  # splitmix64's first output for the seed 0
    assert [Permutation(10, 7)[i] for i in range(10)] == [0, 7, 4, 1, 9, 2, 3, 6, 5, 8]
