"""A text of the engine, from its prompt to its last token, and what a step computes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hasten.engine.block_table import Rows, SequenceBlocks
from hasten.engine.params import SamplingParams
from hasten.engine.request import Constraint, FinishReason, TokenLogprob
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.engine.request_state import RequestState
    from hasten.engine.stopping import OutputText

_SEEDS = 2**63


@dataclass(slots=True, eq=False, kw_only=True)
class TextSequence:
    """One text in the making: a prompt, then one of its samples, or a beam.

    What the scheduler knows: order: (priority, arrival of the request, number within it): smaller is served first and
    preempted last. slots: how many sequences it will become (samples that still share their prompt). drafts: guessed
    tokens behind `tokens`, to be verified in the next step. scored: of its first tokens, those whose logits are wanted
    too. stretched: as in `Rows`; the keys in the cache are those of such a sequence. private: no other sequence has its
    salt. sought: blocks of its beginning were looked for outside of the cache.

    Of a sample, from `begin` on: its request's state, which of the samples it is, how its tokens are drawn, its text
    and why it ended.
    """

    number: int
    order: tuple[int, int, int]
    tokens: list[int]
    salt: str = ""
    adapter: int = -1  # which of the model's, -1 for none
    slots: int = 1
    drafts: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens found in the prefix cache when it was first begun
    running: bool = False
    begun: bool = False
    scored: int = 0
    stretched: bool = False
    private: bool = False
    sought: bool = False

    state: RequestState = field(init=False)
    index: int = field(init=False)
    params: SamplingParams = field(init=False)
    constraint: Constraint | None = field(init=False)
    failure: str | None = field(init=False)  # why the constraint allows no token
    packed: bytes | None = field(init=False)  # how its tokens are drawn, as `DeviceSampler` has it
    gathers: bool = field(init=False)  # given out at its end
    end_ids: frozenset[int] = field(init=False)  # ids that end it
    full: int = field(init=False)  # the most tokens of prompt and answer
    finish_reason: FinishReason | None = field(init=False)
    stop_reason: str | int | None = field(init=False)
    text: list[str] = field(init=False)  # of all steps, where it is given out at the end
    logprobs: list[TokenLogprob] = field(init=False)
    output_text: OutputText = field(init=False)
    prompt_length: int = field(init=False)

    def begin(self, state: RequestState, index: int) -> None:
        """Become a sample of a request whose prompt is computed."""
        request = state.request
        self.state, self.index = state, index
        self.params = params = request.params.with_seed((state.seed + index) % _SEEDS)
        self.constraint = request.constraint
        if request.constraint is not None and request.samples > 1:
            self.constraint = request.constraint.fork()
        self.finish_reason = self.stop_reason = self.failure = self.packed = None
        self.text, self.logprobs = [], []
        self.output_text, self.prompt_length = state.output_text(), len(request.prompt)
        self.gathers, self.end_ids = request.gathered, self.output_text.stop_ids
        self.full = self.prompt_length + params.max_new_tokens

    @property
    def request(self) -> int:
        """Its request's number, by arrival."""
        return self.order[1]

    @property
    def block_salt(self) -> str:
        """The salt of its blocks: a stretched sequence has other keys and values."""
        return f"{self.salt}\0stretched" if self.stretched else self.salt

    @property
    def target(self) -> int:
        return len(self.tokens) + len(self.drafts)

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def only_ids_end_it(self) -> bool:
        """Whether nothing but `end_ids` and its length ends it, and it gives out nothing but tokens and text."""
        state = self.state
        if state.ranked or state.wants_logprobs or self.constraint is not None or self.params.stop:
            return False
        return self.gathers or state.has_begun

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs) / max(1, self.count)

    def append(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Take sampled tokens until one ends the text; the text that can be shown now, and how many were taken.

        A constraint that allows nothing (`failure`) or raises ends this text alone.
        """
        self.catch_up()
        text, count = "", 0
        try:
            if self.failure is not None:
                raise ConfigError(self.failure)
            for token in tokens:
                count += 1
                text += self._append(token)
                if self.finish_reason is not None:
                    break
        except Exception as error:  # a constraint that came with the request: its failure, not the engine's
            self.finish_reason, self.stop_reason = "error", str(error)
        return text, count

    def goes_on(self, token: int) -> bool:
        """Whether this token does not end it, and nothing but text comes of it."""
        return self.only_ids_end_it and token not in self.end_ids and len(self.tokens) + 1 < self.full

    def catch_up(self) -> None:
        """Decode the tokens that were taken and not given out."""
        known = self.prompt_length + self.output_text.count
        if known < len(self.tokens):
            self.text += [self.output_text.go_on(token) for token in self.tokens[known:]]

    def _append(self, token: int) -> str:
        output = self.output_text
        text = output.push(token)
        if self.constraint is not None and output.finish_reason is None:
            self.constraint.advance(token)
            if self.constraint.done:
                text += output.finish("stop")
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return text


@dataclass(slots=True, eq=False)
class ScheduledTokens(Rows):
    """What a step computes of one sequence. copies: (source, target) blocks to be copied before, in this order."""

    block_table: SequenceBlocks
    sequence: TextSequence = field(kw_only=True)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute; 0 for the next one of a sequence where only the device knows it yet."""
        sequence, start = self.sequence, self.start
        if self.count == 1 and not sequence.drafts:
            return [sequence.tokens[start] if start < len(sequence.tokens) else 0]
        return (sequence.tokens + sequence.drafts if sequence.drafts else sequence.tokens)[start : self.end]

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def complete(self) -> bool:
        """Whether it gets to its last token, so that the next can be drawn."""
        return self.end == self.sequence.target

    @property
    def scored(self) -> int:
        """How many of its logits are wanted beside those of its last token."""
        return max(0, min(self.end, self.sequence.scored) - self.start)
