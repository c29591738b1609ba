"""Which parameters are updated how: weight decay on matrices only, and exceptions by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hasten.errors import ConfigError

KEYS = ("rate", "decay")


@dataclass(frozen=True, slots=True)
class Rule:
    """For parameters whose name matches `pattern` (as file names do: *, ?, [abc]).

    rate: the factor on the learning rate. decay: the weight decay; None: as without the rule.
    """

    pattern: str
    rate: float = 1.0
    decay: float | None = None


def parse_rule(text: str) -> Rule:
    """Parse a rule of a recipe: PATTERN:rate=NUMBER,decay=NUMBER, one of the two at least.

    Raises ConfigError for anything else.
    """
    pattern, colon, settings = text.rpartition(":")
    values: dict[str, float] = {}
    try:
        for setting in settings.split(","):
            key, _, number = setting.partition("=")
            if key.strip() not in KEYS or key.strip() in values:
                raise ValueError(key)
            values[key.strip()] = float(number)
            if not 0 <= values[key.strip()] < float("inf"):
                raise ValueError(number)
    except ValueError:
        values = {}
    if not colon or not pattern or not values:
        raise ConfigError(
            f"optimizer.groups has {text!r}; write PATTERN:rate=0.1 (times the learning rate), PATTERN:decay=0, or "
            "both with a comma, for example embedding.*:rate=0.1,decay=0"
        )
    return Rule(pattern, **values)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, rules: Sequence[Rule] = ()
) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices and embeddings (two dimensions or more) decay, norms and biases do not.

    parameters: with their names; those without gradient are left out. The first rule whose pattern matches a name
    changes that. `rate_factor` in a group is its factor on the learning rate. Raises ConfigError for a pattern that
    matches nothing.
    """
    named = [(name, p) for name, p in parameters if p.requires_grad]
    for rule in rules:
        if not any(fnmatchcase(name, rule.pattern) for name, _ in named):
            some = ", ".join(name for name, _ in named[:4])
            raise ConfigError(f"optimizer.groups: no parameter's name matches {rule.pattern!r}; names are {some}, …")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for matrix in (True, False):
        for name, parameter in named:
            if (parameter.dim() >= 2) != matrix:
                continue
            rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern)), Rule("*"))
            usual = weight_decay if matrix else 0.0
            decay = usual if rule.decay is None else rule.decay
            groups.setdefault((decay, rule.rate), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "rate_factor": rate} for (decay, rate), members in groups.items()
    ]
