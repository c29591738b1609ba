"""The merges that follow from a vocabulary and its scores are those of trying every way to divide every token."""

import random

import pytest

from hasten.checkpoints.gguf import merges
from hasten.checkpoints.gguf.merges import MAX_TOKEN, merges_of


def by_trying(vocabulary, scores):
    """As transformers' conversion orders them."""
    names = {place: token for token, place in vocabulary.items()}
    found = []
    for token, place in vocabulary.items():
        for i in range(1, len(token) if len(token) <= MAX_TOKEN else 0):
            left, right = vocabulary.get(token[:i]), vocabulary.get(token[i:])
            if left is not None and right is not None:
                found.append((scores[place], left, right))
    found.sort(key=lambda one: (one[0], len(names[one[1]]), len(names[one[2]])), reverse=True)
    return [(names[left], names[right]) for _, left, right in found]


@pytest.mark.parametrize(("chunk", "alike"), [(1, 64), (50, 64), (merges.CHUNK, 64), (merges.CHUNK, 0)])
def test_merges_are_those_of_every_way_to_divide_a_token(chunk, alike, monkeypatch):
    monkeypatch.setattr(merges, "CHUNK", chunk)
    monkeypatch.setattr(merges, "MOST_ALIKE", alike)  # 0: by halves, as in a file whose hashes begin alike
    draw = random.Random(0)
    words = {"".join(draw.choices("ab é🙂", k=draw.randint(1, 6))) for _ in range(600)}
    words |= {"a" * MAX_TOKEN, "a" * (MAX_TOKEN + 1), ""}
    places = list(range(len(words)))
    draw.shuffle(places)
    vocabulary = dict(zip(sorted(words), places, strict=True))
    scores = [float(draw.randint(-9, 0)) for _ in vocabulary]  # many are equal
    found = merges_of(vocabulary, scores)
    assert found == by_trying(vocabulary, scores)
    assert len(found) > 500


def test_a_vocabulary_without_merges_has_none():
    assert merges_of({}, []) == merges_of({"": 0}, [0.0]) == merges_of({"a": 0, "b": 1}, [0.0, 0.0]) == []
