"""What the constraints of texts allow, while their next tokens are drawn: each is walked along its text's draft."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hasten.engine.sequence import TextSequence


class Guide:
    """The constraints of drawn rows; what is not taken of a draft is forgotten with a fork."""

    def __init__(self, outputs: Sequence[TextSequence]) -> None:
        self._outputs = outputs
        self._failures: dict[int, str] = {}
        self._constraints = [
            one.constraint.fork() if one.drafts and one.constraint is not None else one.constraint for one in outputs
        ]

    def mask(self, row: int, logits: Tensor) -> None:
        """Set the logits (V,) of what may not come to -inf, in place."""
        constraint = self._constraints[row]
        if constraint is None:
            return
        try:
            constraint.mask(logits)
            if logits.amax().item() == -math.inf:
                self._failures[row] = "the constraint on the answer allows no token here"
        except Exception as error:  # of a grammar that came with a request: its own failure, not the engine's
            self._failures[row] = f"the constraint on the answer failed: {error}"

    def took(self, row: int, token: int) -> bool:
        """A token was taken; whether another one may follow."""
        constraint, output = self._constraints[row], self._outputs[row]
        if constraint is None or row in self._failures or not output.drafts or token in output.end_ids:
            return constraint is None
        try:
            constraint.advance(token)
            return not constraint.done
        except Exception:  # it fails again where the token is appended, which says so
            return False

    def fail(self, taken: list[list[int]]) -> dict[int, str]:
        """Why rows take nothing, whose constraint allows no token; those that took tokens before it keep these."""
        failures = {}
        for row, failure in self._failures.items():
            if len(taken[row]) > 1:  # the next step fails at once
                taken[row] = taken[row][:-1]
            else:
                failures[row] = failure
        return failures
