"""Texts whose tokens the caller gives, over an engine's runner and blocks: what a step says, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.engine.for_texts import engine_for
from hasten.engine.params import KVCacheDtype
from hasten.engine.runner import step_logits
from hasten.engine.sequence import ScheduledTokens, TextSequence
from hasten.errors import ConfigError
from hasten.model.transformer import Transformer


class GivenTexts:
    """B texts in the cache, of `lengths` tokens. Steps are an engine's, without plan, draw and text."""

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        capacity: int,
        compiled: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """capacity: tokens that a text may have. compiled: the model's blocks are (`compile_blocks`)."""
        self.model, self.capacity = model, capacity
        engine = engine_for(model, [capacity] * batch, compiled=compiled, kv_cache_dtype=kv_cache_dtype, bounded=False)
        self.runner, self.cache, self._blocks = engine.runner, engine.runner.cache, engine.blocks
        self._piece = max(1, engine.settings.budget // batch)  # of each prompt that is read at once
        self._texts = [TextSequence(number=number, order=(0, number, number), tokens=[]) for number in range(batch)]
        for text in self._texts:
            self._blocks.begin(text.number, ())
        self._goes_on = False  # whether the last step was a token of each text, and nothing was forgotten since

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text in the cache."""
        return [text.computed for text in self._texts]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Append each text's tokens and return the logits (B, V) after its last one. Lengths may differ."""
        if not all(prompts):
            raise ConfigError("a prompt has no tokens; give at least one (for example the beginning-of-text token)")
        longest = max(map(len, prompts))
        if longest <= self._piece:
            return self._step(prompts)
        found: list[Tensor | None] = [None] * len(prompts)
        for start in range(0, longest, self._piece):
            parts = [prompt[start : start + self._piece] for prompt in prompts]
            logits = iter(self._step(parts))
            found = [next(logits).clone() if part else before for part, before in zip(parts, found, strict=True)]
        return torch.stack([logits for logits in found if logits is not None])

    @torch.inference_mode()
    def decode(self, tokens: Tensor, *, active: Sequence[bool] | None = None) -> Tensor:
        """Append a token to every text, tokens int64 (B,); return the logits (B, V) after it.

        active: False for texts that stay as they are; their logits mean nothing.
        """
        given = tokens.tolist()
        if active is not None and not all(active):
            found = self._step([[token] if on else [] for token, on in zip(given, active, strict=True)])
            logits = found.new_zeros(len(given), found.shape[1])
            logits[torch.tensor(active, device=found.device)] = found
            return logits
        if self._goes_on and (following := self._next(given)) is not None:
            return following
        return self._step([[token] for token in given])

    def verify(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append each text's tokens; return the logits (R, V) after every one of them, text by text."""
        return self._step(tokens, every=True)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget everything behind the first `lengths` tokens of every text, or of each.

        Raises ConfigError for a part of a text where layers keep states.
        """
        wanted = [lengths] * len(self._texts) if isinstance(lengths, int) else lengths
        if self.model.config.keeps_states and any(0 < new < old for new, old in zip(wanted, self.lengths, strict=True)):
            raise ConfigError("this model keeps states, from which no tokens can be taken back: forget all of a text")
        self._goes_on = False
        for text, length in zip(self._texts, wanted, strict=True):
            if length < text.computed:
                self._blocks.truncate(text.number, length)
                del text.tokens[length:]
                text.computed, text.stretched = length, text.stretched and length > 0

    def suppose(self, length: int) -> None:
        """Have texts of this length whose keys and values nobody computed, to time what comes after them."""
        self.truncate(0)
        for text in self._texts:
            self._blocks.reserve(text.number, length)
            text.tokens, text.computed = [0] * length, length
            self._blocks.written(text.number, text.tokens)
        self._blocks.computed()

    @torch.inference_mode()
    def _step(self, news: Sequence[Sequence[int]], *, every: bool = False) -> Tensor:
        """Logits after the last token of each text that gets any, or after `every` token."""
        plan, stretches_at = [], self.model.config.stretches_at
        for text, tokens in zip(self._texts, news, strict=True):
            if not tokens:
                continue
            start, end = text.computed, text.computed + len(tokens)
            self._check_room(end)
            if stretches_at is not None and not text.stretched and end > stretches_at:  # all of it once more
                self._blocks.truncate(text.number, 0)
                text.stretched, start = True, 0
            text.tokens += tokens[:1] if every else tokens
            text.drafts = list(tokens[1:]) if every else []
            self._blocks.reserve(text.number, end)
            table = self._blocks.table(text.number)
            plan.append(ScheduledTokens(table, start, end - start, text.stretched, sequence=text))
        logits, _ = step_logits(self.runner, plan)
        for entry in plan:
            text = entry.sequence
            text.tokens += text.drafts
            text.drafts, text.computed = [], entry.end
            self._blocks.written(text.number, text.tokens)
        self._blocks.computed()
        self._goes_on = not every and [entry.count for entry in plan] == [1] * len(self._texts)
        return logits

    def _next(self, tokens: list[int]) -> Tensor | None:
        """Move the last step on by a token of each text, as an engine does; None where it has to be laid out again."""
        size, entered = self.cache.block_size, []
        if self.runner.decoder is not None or self.model.config.stretches_at is not None:
            return None
        for row, text in enumerate(self._texts):
            self._check_room(text.computed + 1)
            self._blocks.reserve(text.number, text.computed + 1)
            if text.computed % size == 0:
                entered.append((row, self._blocks.table(text.number).block_table[-1]))
        logits = self.runner.next_logits(tokens, entered)
        if logits is None:
            return None
        for text, token in zip(self._texts, tokens, strict=True):
            text.tokens.append(token)
            text.computed += 1
            self._blocks.written(text.number, text.tokens)
        self._blocks.computed()
        return logits

    def _check_room(self, length: int) -> None:
        if length > self.capacity:
            raise ConfigError(f"the cache holds {self.capacity} tokens a text; {length} are needed")
