"""A small model that drafts for a large one of the same vocabulary, with a paged cache of its own.

It draws as the target will: with the same settings, seed and step, so the same noise. That makes it agree more often
than a draft of its own noise would. What the target did not take is forgotten by the next call, whose tokens tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.generation.batch_sampler import BatchSampler, other_seed
from hasten.generation.blocks import BlockManager, OutOfBlocks
from hasten.generation.paged import PagedCache, Rows
from hasten.generation.speculation.proposer import LIMIT, Accept, Chance, Draft, Text
from hasten.model.tokenizer import Tokenizer
from hasten.model.transformer import Transformer

# Shares of probability that the draft gives to what it draws, from which on it is another kind.
_CONFIDENCE = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_PREFILL_TOKENS = 2048  # of a text that are taken in at once
_STEP_TOKENS = 32  # of a text that are taken in beside others


@dataclass(slots=True)
class _Drafting:
    """A text of the batch, while it is drafted for."""

    text: Text
    draft: Draft
    likely: float
    feed: list[int]  # tokens that the draft has not seen


class DraftModel:
    """Drafts by a model's own draws."""

    def __init__(
        self, model: Transformer, *, tokens: int, name: str = "model", accept: Accept = "exact", block_size: int = 16
    ) -> None:
        """tokens: of all sequences together that its cache holds; texts for which there is no room get no drafts.

        accept: "distribution" draws with noise of its own, and says from what probabilities.
        """
        self.model, self.name, self.accept = model, name, accept
        self._cache = PagedCache(
            model.config,
            blocks=-(-tokens // block_size),
            block_size=block_size,
            dtype=model.compute_dtype,
            device=model.device,
        )
        self._blocks = BlockManager(blocks=self._cache.blocks, block_size=block_size)
        self._seen: dict[int, list[int]] = {}  # the tokens of each sequence that are in the cache
        self._sampler: tuple[list[int], BatchSampler] | None = None

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], *, floor: float, chance: Chance) -> list[Draft]:
        """See `Proposer`. A kind is the share of probability that the draft gives to the token."""
        drafts = [Draft() for _ in texts]
        going = [
            _Drafting(text, draft, 1.0, self._missing(text))
            for text, draft in zip(texts, drafts, strict=True)
            if text.room > 0 and len(text.tokens) + text.room <= self.model.config.max_positions
        ]
        going = [one for one in going if self._catch_up(one)]
        while going := [one for one in going if len(one.draft.tokens) < one.text.room and self._fits(one, one.feed)]:
            going = self._draw(self._run(going, [one.feed for one in going]), going, floor, chance)
        return drafts

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """Let the sequence's keys and values go."""
        self._sampler = None  # a number may come again, for another text
        if self._seen.pop(number, None) is not None:
            self._blocks.release(number)

    def _missing(self, text: Text) -> list[int]:
        """The text's tokens that are not in the cache yet, after what is wrong there was forgotten."""
        seen = self._seen.get(text.number)
        if seen is None:
            held = self._blocks.begin(text.number, text.tokens, salt=text.salt)
            self._seen[text.number] = list(text.tokens[:held])
            return list(text.tokens[held:])
        # Texts only grow: what differs is the last draft's, behind the text as it was then.
        same = min(len(seen), len(text.tokens) - 1)
        start = next((at for at in range(max(0, same - LIMIT), same) if seen[at] != text.tokens[at]), same)
        del seen[start:]
        self._blocks.truncate(text.number, start)
        return list(text.tokens[start:])

    def _catch_up(self, one: _Drafting) -> bool:
        """Take in a long text, but for its last tokens, which the first step feeds for all together; False: no room."""
        while len(one.feed) > _STEP_TOKENS:
            part = one.feed[: min(len(one.feed) - 1, _PREFILL_TOKENS)]
            if not self._fits(one, part):
                return False
            self._run([one], [part])
            del one.feed[: len(part)]
        return True

    def _fits(self, one: _Drafting, tokens: Sequence[int]) -> bool:
        """Reserve room for further tokens of a text; False where there is none."""
        number = one.text.number
        try:
            copies = self._blocks.reserve(number, len(self._seen[number]) + len(tokens))
        except OutOfBlocks:
            return False
        self._cache.copy(copies)
        return True

    def _run(self, going: Sequence[_Drafting], parts: Sequence[list[int]]) -> Tensor:
        """Logits (R, V) after each text's part, for which there is room; its keys are in the cache then."""
        rows = []
        for one, tokens in zip(going, parts, strict=True):
            number, seen = one.text.number, self._seen[one.text.number]
            rows.append(Rows(self._blocks.block_table(number), len(seen), len(tokens)))
            seen.extend(tokens)
            self._blocks.written(number, seen if len(seen) <= len(one.text.tokens) else seen[: len(one.text.tokens)])
        step = self._cache.step(rows)
        ids = torch.tensor([[token for tokens in parts for token in tokens]], device=self.model.device)
        logits = self.model(ids, step.positions, step, rows=step.last)
        self._blocks.computed()
        return logits

    def _draw(self, logits: Tensor, going: list[_Drafting], floor: float, chance: Chance) -> list[_Drafting]:
        steps = [one.text.step + len(one.draft.tokens) for one in going]
        sampler = self._sampler_of(going)
        tokens = sampler.next_tokens(logits, steps=steps)
        own = self.accept == "distribution"
        shares = sampler.probabilities(logits, steps=steps) if own else logits.float().softmax(-1)
        # By the largest share where the draft has noise of its own: what is proposed must not depend on what was drawn.
        top = (shares.amax(-1) if own else shares.gather(1, tokens[:, None])[:, 0]).tolist()
        more = []
        for one, token, share, drawn_from in zip(going, tokens.tolist(), top, shares, strict=True):
            kind = sum(share >= least for least in _CONFIDENCE)
            one.likely *= chance(kind)
            if one.likely < floor:
                continue
            one.draft.tokens.append(token)
            one.draft.kinds.append(kind)
            if own and not one.text.params.greedy:
                one.draft.probabilities.append(drawn_from)
            one.feed = [token]
            more.append(one)
        return more

    def _sampler_of(self, going: list[_Drafting]) -> BatchSampler:
        """Of the target's settings but for penalties, whose history would have to be kept twice."""
        numbers = [one.text.number for one in going]
        if self._sampler is None or self._sampler[0] != numbers:
            plain = [
                replace(
                    one.text.params,
                    repetition_penalty=1.0,
                    presence_penalty=0.0,
                    frequency_penalty=0.0,
                    min_new_tokens=0,
                    seed=other_seed(one.text.params.seed) if self.accept == "distribution" else one.text.params.seed,
                )
                for one in going
            ]
            vocabulary, device = self.model.config.vocab_size, self.model.device
            sampler = BatchSampler(plain, [()] * len(plain), eos_ids=(), vocab_size=vocabulary, device=device)
            self._sampler = numbers, sampler
        return self._sampler[1]


def check_vocabulary(draft: Transformer, target: Transformer, *, name: str) -> None:
    """Raise ConfigError unless both models have the same tokens under the same ids."""
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"the draft {name} has {theirs:,} tokens, the model {ours:,}; a draft needs the same vocabulary"
        )
    if target.tokenizer is None or draft.tokenizer is None:
        return
    known, other = _tokens_of(target.tokenizer), _tokens_of(draft.tokenizer)
    for token in range(ours):
        if known.get(token) != other.get(token):
            raise ConfigError(
                f"the draft {name} has another vocabulary: token {token} is {other.get(token)!r:.40} there and "
                f"{known.get(token)!r:.40} in the model; take one that was trained with the same tokenizer"
            )


def _tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
