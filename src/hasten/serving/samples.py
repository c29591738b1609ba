"""One text in the making: tokens in, text out, until something ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from hasten.errors import ConfigError
from hasten.generation.params import SamplingParams
from hasten.generation.stopping import OutputText
from hasten.model.tokenizer import Tokenizer
from hasten.serving.request import Constraint, FinishReason, Request, TokenLogprob
from hasten.serving.sequences import Sequence

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
        """Take one token that was drawn; the text that can be shown now."""
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

    def take(self, tokens: SequenceOf[int], *, failure: str | None = None) -> tuple[str, int]:
        """Take what was drawn until it ends; the text that can be shown now, and how many of the tokens were taken.

        failure: why the constraint allows nothing, if so. A constraint that fails or raises ends this sample alone.
        """
        text, count = "", 0
        try:
            if failure is not None:
                raise ConfigError(failure)
            for token in tokens:
                count += 1
                text += self.push(token)
                if self.finish_reason is not None:
                    break
        except Exception as error:  # a constraint that came with the request: its failure, not the engine's
            self.end("error", str(error))
        return text, count

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
