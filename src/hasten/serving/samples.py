"""One text in the making, and the request it belongs to: tokens in, pieces out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from hasten.generation.params import SamplingParams
from hasten.generation.stopping import OutputText
from hasten.model.tokenizer import Tokenizer
from hasten.serving.beams import BeamSearch
from hasten.serving.request import Constraint, FinishReason, Piece, Request, TokenLogprob
from hasten.serving.scheduler import Sequence

_SEEDS = 2**63


class Sample:
    """One of the texts of a request: its tokens (in the sequence), its text, and why it ended."""

    def __init__(
        self,
        request: Request,
        *,
        index: int,
        sequence: Sequence,
        seed: int,
        tokenizer: Tokenizer | None,
        eos_ids: Collection[int],
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.params: SamplingParams = dataclasses.replace(request.params, seed=(seed + index) % _SEEDS)
        self.constraint: Constraint | None = request.constraint
        if request.constraint is not None and request.samples > 1:
            self.constraint = request.constraint.fork()
        self.prompt_length = len(request.prompt)
        self.output = OutputText(
            self.params,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            context=request.prompt,
            skip_special_tokens=request.skip_special_tokens,
        )
        params = self.params
        # Drawn by an argmax of the logits as they are, unless the minimum is still ahead.
        self.plain = params.greedy and not params.logit_bias and not params.needs_history and request.constraint is None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.text: list[str] = []  # what is held for the end, where the request gives its samples at the end
        self.logprobs: list[TokenLogprob] = []
        self.total_logprob = 0.0

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return self.output.count

    @property
    def generated(self) -> list[int]:
        return self.sequence.tokens[self.prompt_length :]

    def push(self, token: int) -> str:
        """Take the token that was drawn (it is in the sequence already); the text that can be shown now."""
        delta = self.output.push(token)
        text, self.finish_reason = delta.text, delta.finish_reason
        if self.constraint is not None and self.finish_reason is None:
            self.constraint.advance(token)
            if self.constraint.done:
                rest = self.output.finish("stop")
                text, self.finish_reason = text + rest.text, rest.finish_reason
        if self.finish_reason is not None:
            self.stop_reason = self.output.stop_reason
        return text

    def keep(self, text: str, logprobs: SequenceOf[TokenLogprob]) -> None:
        """Hold what was said until the request's samples are ranked."""
        self.text.append(text)
        self.logprobs += logprobs
        self.total_logprob += sum(told.logprob for told in logprobs)

    def end(self, reason: FinishReason, why: str | None) -> None:
        """End it from outside."""
        self.finish_reason, self.stop_reason = reason, why

    @property
    def mean_logprob(self) -> float:
        return self.total_logprob / max(1, self.count)


class Group:
    """A request in flight, with its samples; `held` until all are complete where the best of them are wanted."""

    def __init__(self, request: Request, trunk: Sequence, *, seed: int, deadline: float | None) -> None:
        self.request, self.seed, self.deadline = request, seed, deadline
        self.trunk: Sequence | None = trunk  # the prompt, until the samples are forked from it
        self.number = trunk.request
        self.samples: list[Sample] = []
        self.search: BeamSearch | None = None
        self.held = request.beam_width > 0 or (request.best_of or request.n) > request.n
        self.wants_logprobs = request.logprobs is not None or (self.held and not request.beam_width)
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt)
        self.cached = 0
        self._told_prompt = False

    @property
    def done(self) -> bool:
        return (
            self.trunk is None
            and self.search is None
            and all(sample.finish_reason is not None for sample in self.samples)
        )

    @property
    def sequences(self) -> list[Sequence]:
        """Those that the scheduler still has."""
        if self.search is not None:
            return [beam.sequence for beam in self.search.beams]
        alive = [sample.sequence for sample in self.samples if sample.finish_reason is None]
        return alive if self.trunk is None else [self.trunk, *alive]

    def piece(
        self,
        index: int,
        *,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> Piece:
        prompt = None
        if not self._told_prompt:
            self._told_prompt = True
            prompt = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Piece(
            request_id=self.request.id,
            index=index,
            text=text,
            tokens=tokens,
            logprobs=logprobs if self.request.logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
            prompt_logprobs=prompt,
        )

    def best(self) -> list[Piece]:
        """The `n` best samples by mean log-probability, whole."""
        ranked = sorted(self.samples, key=lambda sample: -sample.mean_logprob)[: self.request.n]
        return [
            self.piece(
                index,
                text="".join(sample.text),
                tokens=tuple(sample.generated),
                logprobs=tuple(sample.logprobs),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
            for index, sample in enumerate(ranked)
        ]
