"""What a caller gave is taken or refused by its annotation, and the sentence says what it must be."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import torch

from hasten.checks import (
    ABOVE_0,
    AT_LEAST_0,
    BELOW_1,
    LARGEST_SEED,
    SHARE,
    SHARE_ABOVE_0,
    mistakes,
    real,
    require,
    unmet,
    whole,
)
from hasten.errors import ConfigError


@pytest.mark.parametrize(
    ("bound", "allowed", "refused"),
    [
        (ABOVE_0, [1e-9, 3], [0, -1]),
        (AT_LEAST_0, [0, 0.5], [-1e-9]),
        (SHARE_ABOVE_0, [1e-9, 0.5, 1], [0, 1.01]),
        (BELOW_1, [0, 0.5, 0.999], [-1e-9, 1]),
        (SHARE, [0, 0.5, 1], [-1e-9, 1.01]),
    ],
)
def test_bounds_hold_at_their_edges(bound: Any, allowed: list[float], refused: list[float]) -> None:
    assert [unmet(value, Annotated[float, bound]) for value in allowed] == [None] * len(allowed)
    assert [unmet(value, Annotated[float, bound]) for value in refused] == [bound.be] * len(refused)


@pytest.mark.parametrize(
    ("hint", "allowed", "refused", "wanted"),
    [
        (int, [3, -1], [3.0, True, "3", None], "a whole number"),
        (float, [3, 2.5], [True, "3", None], "a number"),
        (bool, [True, False], [0, 1, None], "True or False"),
        (str, ["", "a"], [1, None], "text"),
        (dict, [{}], [[]], "a dict"),
        (int | None, [3, None], ["3", True], "a whole number or None"),
        (Annotated[int, ABOVE_0] | None, [3, None], [0], "more than 0 or None"),
        (Annotated[int | None, ABOVE_0], [3, None], [0], "more than 0"),
        (Annotated[int, ABOVE_0], [3], ["3", True], "a whole number"),
        (Annotated[int, "a remark", ABOVE_0], [3], [0], "more than 0"),
        (Literal["a", "b"], ["a", "b"], ["c", None], "one of a, b"),
        (Literal[1], [1], [True, 1.0, 2], "1"),
        (list[int], [[], [1], (1, 2)], [1, "12", ["1"], [1, None]], "a list of a whole number"),
        (tuple[int, ...], [(), (1,), [1, 2]], [1, ("1",), (1, None)], "a list of a whole number"),
        (tuple[int, str], [(1, "a"), [1, "a"]], [(1,), (1, "a", 2), ("a", 1)], "a list of a whole number and text"),
        (
            tuple[Annotated[float, SHARE], ...],
            [(), (0.5, 1)],
            [(2,), (0.5, -1)],
            "a list of a number (from 0 to 1)",
        ),
        (Callable[[], None], [print, 3], [], None),
    ],
)
def test_a_value_is_taken_or_refused_by_its_annotation(
    hint: Any, allowed: list[Any], refused: list[Any], wanted: str | None
) -> None:
    assert [unmet(value, hint) for value in allowed] == [None] * len(allowed)
    assert [unmet(value, hint) for value in refused] == [wanted] * len(refused)


def test_annotated_words_without_bounds_name_the_kind_alone() -> None:
    assert unmet(3, list[Annotated[int, "a remark"]]) == "a list of a whole number"
    assert unmet(3, list[Annotated[int, ABOVE_0, SHARE]]) == "a list of a whole number (more than 0, from 0 to 1)"


@dataclass
class Nested:
    share: Annotated[float, SHARE] = 0.5


@dataclass
class Around:
    count: Annotated[int, ABOVE_0] = 1
    limit: float = math.inf
    nested: Nested = field(default_factory=Nested)
    other: Nested | None = None


def test_each_mistake_is_named_with_the_fields_around_it() -> None:
    assert list(mistakes(Around())) == []
    wrong = Around(count=0, limit=math.nan, nested=Nested(share=2.0), other=3)  # type: ignore[arg-type]
    assert list(mistakes(wrong)) == [
        "count is 0; it must be more than 0",
        "limit is nan; it must be a finite number",
        "nested.share is 2.0; it must be from 0 to 1",
        "other is 3; it must be a Nested or None",
    ]
    with pytest.raises(ConfigError, match=r"^count is 0"):
        require(wrong)
    require(Around(count=2, limit=3))


def test_a_default_is_taken_though_its_annotation_refuses_it() -> None:
    assert list(mistakes(Around(limit=Around.limit))) == []
    assert list(mistakes(Around(limit=-math.inf))) == ["limit is -inf; it must be a finite number"]


def test_a_long_value_is_cut_in_the_sentence() -> None:
    (sentence,) = mistakes(Around(count="1" * 1000))  # type: ignore[arg-type]
    assert len(sentence) < 150


def test_a_number_is_returned_as_a_float_within_its_bounds() -> None:
    for value in (0, 1, 0.5):
        found = real("share", value, low=0, high=1)
        assert (found, type(found)) == (value, float)
    assert real("limit", math.inf, finite=False) == math.inf
    assert real("limit", 10**400, finite=False) == math.inf
    assert real("any", -1e300) == -1e300
    for wrong in (-0.1, 1.1, math.nan, math.inf, 10**400):
        with pytest.raises(ConfigError, match=r"share is .*; it must be between 0 and 1"):
            real("share", wrong, low=0, high=1)
    with pytest.raises(ConfigError, match="share is -1; it must be at least 0 and finite"):
        real("share", -1, low=0)
    for wrong in (True, "1", None):
        with pytest.raises(ConfigError, match="share must be a number, found"):
            real("share", wrong)  # type: ignore[arg-type]


def test_a_whole_number_is_returned_within_its_bounds() -> None:
    assert whole("count", 1) == 1
    assert [whole("count", value, low=0, high=2) for value in (0, 1, 2)] == [0, 1, 2]
    assert whole("count", 10**30) == 10**30
    with pytest.raises(ConfigError, match="count must be a whole number, at least 1; found 0"):
        whole("count", 0)
    for wrong in (-1, 3, 1.0, "1", None, True):
        with pytest.raises(ConfigError, match=f"count must be a whole number, at least 0, at most 2; found {wrong!r}"):
            whole("count", wrong, low=0, high=2)


def test_every_seed_up_to_the_largest_that_a_tensor_holds_is_taken() -> None:
    largest = torch.iinfo(torch.int64).max
    assert whole("seed", largest, low=0, high=LARGEST_SEED) == largest
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        whole("seed", largest + 1, low=0, high=LARGEST_SEED)
