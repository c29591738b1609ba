"""A request in flight: its prompt, then its samples or beams, and the pieces that it is told."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from hasten.generation.stopping import OutputText, stop_ids
from hasten.model.tokenizer import Tokenizer
from hasten.serving.beams import BeamSearch
from hasten.serving.request import FinishReason, Request, RequestOutput, TokenLogprob
from hasten.serving.samples import Sample
from hasten.serving.scheduler import Scheduler
from hasten.serving.sequences import Sequence


class SequenceGroup:
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

    def sprout(self, books: Scheduler, *, tokenizer: Tokenizer | None, eos_ids: Collection[int]) -> None:
        """The prompt is computed: one sequence becomes the samples, by fork, or the first beam."""
        trunk, request = self.trunk, self.request
        assert trunk is not None
        self.trunk, self.cached = None, trunk.cached
        if request.beam_width:
            self.search = BeamSearch(request, trunk, end_ids=stop_ids(request.params, eos_ids=eos_ids))
            return
        for index in range(request.samples):
            sample = Sample(
                request,
                index=index,
                sequence=trunk if index == 0 else books.fork(trunk),
                seed=self.seed,
                tokenizer=tokenizer,
                eos_ids=eos_ids,
            )
            self.samples.append(sample)

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
    ) -> RequestOutput:
        prompt = None
        if not self._told_prompt:
            self._told_prompt = True
            prompt = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return RequestOutput(
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

    def told(
        self, sample: Sample, *, text: str, tokens: SequenceOf[int], logprobs: SequenceOf[TokenLogprob]
    ) -> list[RequestOutput]:
        """What may be said now that a sample took tokens: that at once, or the best samples when all are complete."""
        if self.held:
            sample.keep(text, logprobs)
            return self.best() if self.done else []
        return [
            self.piece(
                sample.index,
                text=text,
                tokens=tuple(tokens),
                logprobs=tuple(logprobs),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
        ]

    def best(self) -> list[RequestOutput]:
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

    def best_beams(self, *, tokenizer: Tokenizer | None, eos_ids: Collection[int]) -> list[RequestOutput]:
        """The `n` best texts of a search that is done, whole."""
        assert self.search is not None
        assert self.search.done
        pieces = []
        for index, text in enumerate(self.search.complete[: self.request.n]):
            output = OutputText(
                self.request.params,
                tokenizer=tokenizer,
                eos_ids=eos_ids,
                context=self.request.prompt,
                skip_special_tokens=self.request.skip_special_tokens,
            )
            pieces.append(
                self.piece(
                    index,
                    text="".join(output.push(token).text for token in text.tokens),
                    tokens=text.tokens,
                    logprobs=text.logprobs,
                    finish_reason=text.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        return pieces

    def ended(self, reason: FinishReason, why: str | None) -> list[RequestOutput]:
        """A last word for each unfinished text of a request that is stopped from outside."""
        told = set() if self.held else {s.index for s in self.samples if s.finish_reason is not None}
        return [
            self.piece(index, finish_reason=reason, stop_reason=why)
            for index in range(self.request.n)
            if index not in told
        ]
