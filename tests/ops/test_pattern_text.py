"""Patterns as a word of the command line and as JSON."""

import json

import pytest

from hasten.errors import ConfigError
from hasten.ops.attention.pattern_text import parse_pattern, pattern_of, pattern_values
from hasten.ops.attention.patterns import PATTERNS, BigBird, BSLongformer, Local, Variable


def test_a_text_names_a_pattern_and_its_fields():
    assert parse_pattern("bigbird") == BigBird()
    assert parse_pattern("bigbird:window=5,random-blocks=2,per-head=true") == BigBird(
        window=5, random_blocks=2, per_head=True
    )
    assert parse_pattern("variable:windows=1+2,global_indices=0") == Variable(windows=(1, 2), global_indices=(0,))
    assert parse_pattern("bslongformer:global-indices=0,global-ends=2") == BSLongformer(global_ends=(2,))


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"dense"}))
def test_json_and_back(name):
    pattern = parse_pattern(f"{name}:block=32,seed=3")
    values = json.loads(json.dumps(pattern_values(pattern)))
    assert values["name"] == name
    assert pattern_of(values) == pattern
    assert type(pattern_of(values)) is PATTERNS[name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bigbrid", "known: causal, local"),
        ("dense", "for a causal model"),
        ("local:radius", "field=value"),
        ("local:width=3", "it has block, seed, per_head, radius"),
        ("local:causal=false", "no field 'causal'"),
        ("local:radius=much", "local: radius is .much.; it must be a number"),
        ("local:radius=-1", "at least 0"),
        ("local:radius=99999999999", "up to 1048576"),
        ("local:per-head=3", "true or false"),
        ("local:radius=true", "integers"),
        ("local:radius=1+2", "one integer"),
        ("fixed:local-blocks=1,global-blocks=2", "do not fit"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_pattern(text)


def test_a_list_without_end_is_refused():
    with pytest.raises(ConfigError, match="integers up to"):
        pattern_of({"name": "variable", "windows": [1] * 5000})
    assert pattern_of({"name": "local", "radius": 2}) == Local(radius=2)
