import math
from itertools import pairwise

import numpy as np
import pytest

from hasten.data.bigram import DISCOUNT, bigram_loss

GENERATOR = np.random.default_rng(0)


def probability(training, h, w, vocab):
    """The formula, counted by hand."""
    pairs = list(pairwise(training))
    places = [len({a for a, b in pairs if b == token}) + 0.5 for token in range(vocab)]
    anywhere = places[w] / sum(places)
    follow = [b for a, b in pairs if a == h]
    if not follow:
        return anywhere
    return (max(follow.count(w) - DISCOUNT, 0) + DISCOUNT * len(set(follow)) * anywhere) / len(follow)


def test_it_is_the_formula_and_its_probabilities_add_up_to_one():
    vocab = 7
    training = GENERATOR.integers(0, 6, 40).tolist()  # token 6 was never seen
    for h in range(vocab):
        found = [math.exp(-bigram_loss(training, [[h, w]], vocab_size=vocab)) for w in range(vocab)]
        assert found == pytest.approx([probability(training, h, w, vocab) for w in range(vocab)])
        assert sum(found) == pytest.approx(1)


def test_documents_are_apart_and_their_first_token_is_not_predicted():
    training = GENERATOR.integers(0, 9, 500)
    one, two = [1, 2, 3], [4, 5]
    loss = bigram_loss(training, [one, two, [6], []], vocab_size=9)
    parts = [bigram_loss(training, [document], vocab_size=9) for document in (one, two)]
    assert loss == pytest.approx((2 * parts[0] + parts[1]) / 3)
    assert math.isnan(bigram_loss(training, [[1]], vocab_size=9))


def test_what_follows_its_neighbour_is_predicted_and_noise_costs_the_logarithm_of_the_vocabulary():
    cycle = np.tile(np.arange(50), 100)
    assert bigram_loss(cycle, [cycle], vocab_size=50) < 0.1
    noise = GENERATOR.integers(0, 50, 100_000)
    assert bigram_loss(noise, [noise], vocab_size=50) == pytest.approx(math.log(50), rel=0.01)
