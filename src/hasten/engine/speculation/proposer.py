"""What proposes tokens for the target model to check: the interface, and what a proposal is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from hasten.engine.params import SamplingParams


@dataclass(slots=True, kw_only=True)  # not frozen, which takes longer to make: there is one for each step
class Text:
    """A sequence that is about to get its next token, as a proposer sees it.

    number: its name in all calls. tokens: prompt and answer so far. step: tokens of the answer. params: how the target
    draws, with a seed. room: the most tokens that can be checked. salt: texts of different salts (tenants) learn
    nothing from each other.
    """

    number: int
    tokens: Sequence[int]
    step: int
    params: SamplingParams
    room: int
    salt: str = ""


@dataclass(slots=True)
class Draft:
    """Proposed tokens, and for each a `kind`: tokens of one kind are accepted about equally often.

    The shares of each kind are counted while running; a proposer need know them but roughly. probabilities: for each
    token those (V,) it was drawn from, where it was drawn with noise of its own.
    """

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)

    def first(self, count: int) -> "Draft":
        """Its first tokens."""
        return Draft(self.tokens[:count], self.kinds[:count], self.probabilities[:count])


LIMIT = 64  # tokens of a draft, at most
# How a proposed token is accepted: if it is what the target draws there ("exact": the text is that without drafts), or
# with min(1, p/q) ("distribution": another text of the same distribution; more are taken at high temperatures).
Accept = Literal["exact", "distribution"]
# The share of a kind's tokens that are accepted where all tokens before them were.
Chance = Callable[[int], float]


class Proposer(Protocol):
    """Proposes tokens for a batch of sequences.

    It sees what was accepted by the tokens of the next call.
    """

    name: str

    def prior(self, kind: int) -> float:
        """The share of a kind's tokens that are accepted, before any was counted."""

    def propose(self, texts: Sequence[Text], *, floor: float, chance: Chance) -> list[Draft]:
        """A draft for each text; it ends where the chance that all of it is accepted falls below `floor`."""

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """A sequence has ended, with this answer."""


@runtime_checkable
class ReadsStates(Protocol):
    """A proposer that also reads what the model computed of each token.

    read_tokens: of a text, whose states it keeps at most.
    """

    read_tokens: int

    def take_states(self, rows: Sequence[tuple[int, int, int]], states: Tensor) -> None:
        """Take the states (N, C) of a step's tokens, after the last block and before the last norm.

        rows: of each sequence its number, the position of its first token in the step, and how many follow, end to end.
        A position that was taken before is computed again, or was that of a rejected token.
        """
