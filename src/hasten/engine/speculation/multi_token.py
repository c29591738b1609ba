"""The model's own multi-token head as a draft model: beside each token it reads the model's state before that token.

The engine gives it the states of every step (`take_states`), of which it keeps the last ones of each text until it
reads them. Keys and values of its block are in a cache of its own, which holds what was computed from the model's
states alone: what it computed behind a text, from its own, is forgotten after each draft.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.engine.layout import RaggedLayout, to_device
from hasten.engine.speculation.draft_model import Drafting, DraftModel
from hasten.engine.speculation.proposer import Accept, Chance, Draft, Text
from hasten.model.multi_token import MultiTokenHead

_ABSENT = 64  # texts beside twice those of a step whose states are kept: others may never come back


class _States:
    """The last states of a text, at the positions from `first` on, in pieces."""

    def __init__(self) -> None:
        self.first = self.end = 0
        self._pieces: deque[Tensor] = deque()

    def take(self, start: int, states: Tensor, *, most: int) -> None:
        """Put the states of the positions from `start` on in the place of those there and behind. most: to keep."""
        if not self.first <= start <= self.end:
            self._pieces.clear()
            self.first = self.end = start
        while self.end > start:
            last = self._pieces.pop()
            self.end -= len(last)
            if self.end < start:
                self._pieces.append(last[: start - self.end])
                self.end = start
        self.end += len(states)
        if len(states) > 1:  # not the whole step's; a single one may be a view of a step of single ones
            states = states[-most:].clone()
        if len(states) == most:
            self._pieces.clear()
            self.first = self.end - most
        self._pieces.append(states)
        while self.end - self.first - len(self._pieces[0]) >= most:
            self.first += len(self._pieces.popleft())

    def between(self, start: int, end: int) -> Tensor:
        """The states (end - start, C) at some positions."""
        found, at = [], self.end
        for piece in reversed(self._pieces):
            found.append(piece)
            at -= len(piece)
            if at <= start:
                break
        return torch.cat(found[::-1])[start - at : end - at]


class MultiTokenDraft(DraftModel):
    """Drafts with a model's multi-token head, one token after the other."""

    read_tokens, read_at_once = 128, 256

    def __init__(self, head: MultiTokenHead, *, tokens: int, accept: Accept = "exact") -> None:
        """tokens, accept: as of `DraftModel`."""
        super().__init__(head, tokens=tokens, name="mtp", accept=accept)
        self.head = head
        self._states: dict[int, _States] = {}  # the text of the latest step last

    def take_states(self, rows: Sequence[tuple[int, int, int]], states: Tensor) -> None:
        """See `ReadsStates`."""
        at = 0
        for number, start, tokens in rows:
            own = self._states.pop(number, None) or _States()
            piece = states[at : at + tokens]
            if tokens == 1 < len(states) / len(rows):  # it would keep the states of prompts beside it
                piece = piece.clone()
            own.take(start, piece, most=self.read_tokens)
            self._states[number] = own
            at += tokens
        while len(self._states) > 2 * len(rows) + _ABSENT:
            del self._states[next(iter(self._states))]

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], *, floor: float, chance: Chance) -> list[Draft]:
        """See `Proposer`."""
        drafts = super().propose(texts, floor=floor, chance=chance)
        for text in texts:  # keys of drafted tokens are of the head's own states
            known = self._known.get(text.number)
            if known is not None and len(known.tokens) > (read := len(text.tokens) - known.start):
                del known.tokens[read:]
                self._blocks.truncate(text.number, read)
        return drafts

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """Let the sequence's states, keys and values go."""
        self._states.pop(number, None)
        super().end(number, answer, salt=salt)

    def _in_one_call(self) -> bool:
        return False

    def _readable(self, text: Text) -> int:
        """Tokens behind states without a gap, the text's last token behind the last of them."""
        own, end = self._states.get(text.number), len(text.tokens) - 1
        return 0 if own is None or own.end < end else max(0, min(self.read_tokens, end - own.first))

    def _begin(self, row: int, text: Text) -> Drafting | None:
        one = super()._begin(row, text)
        if one is not None:
            first = one.known.start + len(one.known.tokens)  # the place of the first token that is read
            states = self._states[text.number].between(first - 1, len(text.tokens) - 1)
            one.states = self.head.last_norm(states)
        return one

    def _logits(self, going: Sequence[Drafting], rows: Sequence[Rows], last: Sequence[int]) -> Tensor:
        head, device = self.head, self.head.device
        states = [one.states for one in going if one.states is not None]
        tokens = [token for one in going for token in one.read]
        step = self.cache.step_over(RaggedLayout(rows, self.cache.block_size))
        x = head.after(to_device([tokens], device), torch.cat(states), step.positions, step)[0]  # (N, C)
        x = x[to_device(list(last), device)]
        for one, own in zip(going, head.norm(x).split(1), strict=True):
            one.states = own  # of the token that comes next
        return head.scores(x)
