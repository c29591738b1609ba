"""Parameters of tests: all combinations of two lists, of which most are slow."""

from collections.abc import Sequence
from typing import Any

import pytest


def combinations(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs, for `parametrize`. `make test` runs as many as give each value a turn; the others are slow."""
    assert len(first) >= len(second), "else some of the second would never have a turn"
    return [
        pytest.param(one, other, marks=() if i % len(second) == j else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
