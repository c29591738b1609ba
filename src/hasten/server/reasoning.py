"""Reasoning of a template's answers: where an answer's structure begins behind it, and its budget of tokens."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hasten.server.structured import Grammar
from hasten.text.answer_format import AnswerFormat
from hasten.text.answer_reader import ends_in_reasoning
from hasten.text.markers import MAYBE, NO, Pattern, find, match, pattern_of, squash

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.text.tokenizer import Tokenizer

_WINDOW = 24  # tokens among which a marker is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGate:
    """How the reasoning of one answer begins and ends, in text and tokens.

    inside: the prompt has begun it. stops: what ends it without its closing. opening_id: its opening, if that is one
    token. closing_ids: what ends it when the budget is used. head_ids: what the template writes between reasoning and
    answer.
    """

    opening: str
    closing: str
    stops: tuple[Pattern, ...]
    inside: bool
    opening_id: int | None
    closing_ids: tuple[int, ...]
    head_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    budget: int | None


def gate_of(
    form: AnswerFormat, tokenizer: Tokenizer, *, prompt: str, budget: int | None, stops: tuple[Pattern, ...] = ()
) -> ReasoningGate | None:
    """The gate of an answer to this prompt; None where its template writes no reasoning, or the prompt ended it."""
    if form.reasoning is None or squash(prompt).endswith(form.reasoning.closing):
        return None
    closing = tokenizer.encode(form.reasoning.closing_text, add_special_tokens=False)
    head = tokenizer.encode(form.head_text, add_special_tokens=False) if form.head_text else []
    return ReasoningGate(
        opening=form.reasoning.opening,
        closing=form.reasoning.closing,
        stops=stops,
        inside=ends_in_reasoning(form.reasoning, prompt),
        opening_id=tokenizer.backend.token_to_id(form.reasoning.opening),
        closing_ids=tuple(closing),
        head_ids=tuple(head),
        eos_ids=tuple(tokenizer.eos_ids),
        budget=budget,
    )


class AfterReasoning:
    """A constraint (`hasten.engine.request.Constraint`) that leaves reasoning free and holds what follows to a grammar.

    grammar: None where only the budget counts. A reasoning that has as many tokens as the budget is closed by force.
    An answer may do without reasoning, where the prompt has not begun it.
    """

    def __init__(self, gate: ReasoningGate, tokenizer: Tokenizer, grammar: Grammar | None) -> None:
        self.gate, self.grammar = gate, grammar
        self._tokenizer = tokenizer
        self._state = "reasoning" if gate.inside else "start"  # then "answer"
        self._ids: list[int] = []  # the latest tokens of the state
        self._count = 0
        self._forced: deque[int] = deque()
        if gate.inside and gate.budget == 0:
            self._close()
        elif not gate.inside and grammar is not None and gate.opening_id is None:
            self._state = "answer"

    @property
    def done(self) -> bool:
        """Whether the text is complete and no token may follow."""
        return self._state == "answer" and not self._forced and self.grammar is not None and self.grammar.done

    def mask(self, row: Tensor) -> None:
        """Set the logits (V,) of tokens that are not allowed to -inf, in place."""
        if self._forced:
            kept = row[self._forced[0]].clone()
            row.fill_(-float("inf"))
            row[self._forced[0]] = kept.nan_to_num(neginf=0.0)
        elif self._state == "reasoning":
            if self.grammar is not None:  # the answer is still to come
                row[[i for i in self.gate.eos_ids if i < row.shape[0]]] = -float("inf")
        elif self.grammar is not None:
            opening = self.gate.opening_id if self._state == "start" else None
            before = row[opening or 0].clone()
            self.grammar.mask(row)
            if opening is not None:
                row[opening] = before

    def advance(self, token: int) -> None:
        """Advance by the sampled token."""
        if self._forced:
            self._forced.popleft()
        elif self._state == "answer":
            if self.grammar is not None:
                self.grammar.advance(token)
        else:
            self._ids = [*self._ids[1 - _WINDOW :], token]
            if self._state == "start":
                self._start(token)
            else:
                self._reason()

    def fork(self) -> AfterReasoning:
        """An independent copy in the same state."""
        fork = copy.copy(self)
        fork._ids, fork._forced = list(self._ids), deque(self._forced)
        fork.grammar = None if self.grammar is None else self.grammar.fork()
        return fork

    def _start(self, token: int) -> None:
        if self.grammar is not None:
            if token == self.gate.opening_id:
                self._begin()
            else:
                self._state = "answer"
                self.grammar.advance(token)
            return
        end = match(self.gate.opening, self._text())
        if end == NO:
            self._state = "answer"
        elif end != MAYBE:
            self._begin()

    def _begin(self) -> None:
        self._state, self._ids = "reasoning", []
        if self.gate.budget == 0:
            self._close()

    def _reason(self) -> None:
        self._count += 1
        text = self._text()
        _, end, which = find((pattern_of(self.gate.closing), *self.gate.stops), text)
        if end >= 0 and which > 0:
            self._state = "answer"
        elif end >= 0:
            self._answer()
            if self.grammar is not None and text[end:].strip():  # of the token that ended the reasoning
                for token in self._tokenizer.encode(text[end:].strip(), add_special_tokens=False):
                    self.grammar.advance(token)
        elif self.gate.budget is not None and self._count >= self.gate.budget:
            self._close()

    def _close(self) -> None:
        self._answer()
        self._forced.extendleft(reversed(self.gate.closing_ids))

    def _answer(self) -> None:
        """Go on to the answer; one that is held to a grammar begins behind what the template writes first."""
        self._state = "answer"
        if self.grammar is not None:
            self._forced.extend(self.gate.head_ids)

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)
