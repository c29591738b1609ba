"""A small model that drafts for a large one of the same vocabulary, over a cache and a runner as an engine has them.

It draws as the target will: with the same settings, seed and step, so the same noise. That makes it agree more often
than a draft of its own noise would. What the target did not take is forgotten by the next call, whose tokens tell.

Of a text that is new to it, or that went on for long without it, it reads the last tokens only: the next token hangs
mostly on those, and reading a whole prompt may take longer than drafts for a short answer can win back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.engine.blocks import BlockManager, OutOfBlocks
from hasten.engine.cache import KVCache
from hasten.engine.params import SamplingParams
from hasten.engine.runner import ModelRunner
from hasten.engine.sampler import Sampler, other_seed
from hasten.engine.speculation.proposer import LIMIT, Accept, Chance, Draft, Text
from hasten.errors import ConfigError
from hasten.model.draft import Blocks, Draws, Ending, can_draft_in_one_call, draft_in_one_call
from hasten.model.transformer import Transformer

# Shares of probability that the draft gives to what it draws, from which on it is another kind; and how often those of
# each kind are right, on the pair of docs/results/speculation.md.
_CONFIDENCE = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_PRIORS = (0.25, 0.45, 0.55, 0.7, 0.8, 0.87, 0.95, 0.98, 0.99)
_FEW_TOKENS = 8  # that are read beside others; of longer pieces as many as `read_at_once` in one call
_BLOCK_SIZE = 16  # tokens


@dataclass(slots=True)
class _Known:
    """What the cache holds of a text: its tokens from `start` on, and the last draft's behind them."""

    start: int
    tokens: list[int]


@dataclass(slots=True)
class Drafting:
    """A text of the batch, while it is drafted for. row: its place in the batch."""

    row: int
    text: Text
    known: _Known
    read: list[int]  # tokens that the draft has not seen
    states: Tensor | None = None  # (tokens to read, C) of the tokens before them, for a head that reads these too
    draft: Draft = field(default_factory=Draft)
    likely: float = 1.0


class DraftModel:
    """Drafts by a model's own draws.

    read_tokens: of a text, at most. read_at_once: tokens of long pieces that are read in one call.
    """

    read_tokens, read_at_once = 32, 64

    def __init__(self, model: Transformer, *, tokens: int, name: str = "model", accept: Accept = "exact") -> None:
        """tokens: of all sequences together that its cache holds; where it is full, a text begins again with its last
        tokens, and gets no drafts where not even those have room.

        accept: "distribution" draws with noise of its own, and says from what probabilities.
        Raises ConfigError for a model whose layers keep states.
        """
        if model.config.keeps_states:
            raise ConfigError(
                f"the draft model is a {model.config.family}, whose layers keep states, from which rejected tokens "
                "cannot be taken back; draft with another model"
            )
        self.model, self.name, self.accept = model, name, accept
        blocks, dtype, size = -(-tokens // _BLOCK_SIZE), model.compute_dtype, _BLOCK_SIZE
        self.cache = KVCache(model.config, blocks=blocks, block_size=size, dtype=dtype, device=model.device)
        self._runner = ModelRunner(model, self.cache)
        self._blocks = BlockManager(blocks=blocks, block_size=size, prefix_cache=False)
        self._known: dict[int, _Known] = {}
        self._sampler: tuple[list[int], Sampler] | None = None

    def prior(self, kind: int) -> float:
        """See `Proposer`."""
        return _PRIORS[kind]

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], *, floor: float, chance: Chance) -> list[Draft]:
        """See `Proposer`. A kind is the share of probability that the draft gives to the token."""
        drafts, going, room = [Draft() for _ in texts], [], self.read_at_once
        for row, text in enumerate(texts):
            one = self._begin(row, text)
            if one is None or _FEW_TOKENS < len(one.read) > room:
                continue
            going.append(one)
            drafts[row] = one.draft
            room -= len(one.read) if len(one.read) > _FEW_TOKENS else 0
        if not going:
            return drafts
        plain = self.accept == "exact" and all(_is_plain(text.params) for text in texts)
        if plain and self._in_one_call():
            while going:
                going = self._grow(going, floor, chance)
            return drafts
        sampler = self._sampler_of(texts)
        while going:
            going = self._step(sampler, going, floor, chance)
        return drafts

    @property
    def reads(self) -> int:
        """Tokens of a new text that it reads."""
        return min(self.read_tokens, self.model.config.max_positions // 2)

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """Let the sequence's keys and values go."""
        self._sampler = None  # a number may come again, for another text
        if self._known.pop(number, None) is not None:
            self._blocks.release(number)

    def _in_one_call(self) -> bool:
        """Whether a whole draft is one native call."""
        return can_draft_in_one_call(self.model)

    def _readable(self, text: Text) -> int:
        """How many of a text's last tokens can be read."""
        return self.read_tokens

    def _begin(self, row: int, text: Text) -> Drafting | None:
        """What is to be read of a text, after what is wrong in the cache was forgotten; None: no room for a draft."""
        number, length = text.number, len(text.tokens)
        reads = min(self._readable(text), self.model.config.max_positions - text.room)
        if not text.room or reads < 1:
            return None
        known = self._known.get(number)
        if known is not None:
            # Texts only grow: what differs is the last draft's, behind the text as it was then.
            same = min(len(known.tokens), length - known.start - 1)
            places = range(max(0, same - LIMIT), same)
            same = next((at for at in places if known.tokens[at] != text.tokens[known.start + at]), same)
            grown = length - known.start
            most = _BLOCK_SIZE * (self._blocks.free + self._blocks.count(number))
            full = grown + text.room > min(self.model.config.max_positions, most)
            if grown - same > reads or full:  # the end of the text is enough to go on with
                self._blocks.release(number)
                known = None
            else:
                del known.tokens[same:]
                self._blocks.truncate(number, same)
        if known is None:
            start = max(0, length - reads)
            self._blocks.begin(number, ())
            known = self._known[number] = _Known(start, [])
        read = list(text.tokens[known.start + len(known.tokens) :])
        try:
            self._blocks.reserve(number, len(known.tokens) + len(read) + text.room)
        except OutOfBlocks:
            return None
        return Drafting(row, text, known, read)

    def _grow(self, going: list[Drafting], floor: float, chance: Chance) -> list[Drafting]:
        """Draft natively, as many tokens of each text as all have room for; returns those that can have more."""
        params = [one.text.params for one in going]
        tables = [self._blocks.block_table(one.text.number) for one in going]
        draws = Draws(
            temperatures=[own.temperature for own in params],
            seeds=[own.seed or 0 for own in params],
            steps=[one.text.step + len(one.draft.tokens) for one in going],
        )
        chances = [chance(kind) for kind in range(len(_CONFIDENCE) + 1)]
        likely = [one.likely for one in going]
        ending = Ending(likely=likely, thresholds=_CONFIDENCE, chances=chances, floor=floor)
        longest, plan = max(map(len, tables)), self.cache.plan()
        assert plan is not None, "a fused model's cache has one"
        cache = Blocks(
            plan=plan,
            block_table=torch.tensor([table + [0] * (longest - len(table)) for table in tables]),
            block_size=self.cache.block_size,
            lengths=[len(one.known.tokens) for one in going],
        )
        steps = min(one.text.room - len(one.draft.tokens) for one in going)
        read = [one.read for one in going]
        found = draft_in_one_call(self.model, read, steps=steps, cache=cache, draws=draws, ending=ending)
        more = []
        for row, one in enumerate(going):
            drawn = [int(step[row][0]) for step in found]
            one.known.tokens += [*one.read, *drawn[:-1]]
            one.read = drawn[-1:]
            shares = [step[row][1] for step in found]
            if all(self._take(one, *pair, floor, chance) for pair in zip(drawn, shares, strict=True)):
                more.append(one)
        return more

    def _step(self, sampler: Sampler, going: list[Drafting], floor: float, chance: Chance) -> list[Drafting]:
        """One token more of each draft, for any model and any settings, if likely enough; those that can have more."""
        rows = [Rows(self._blocks.block_table(one.text.number), len(one.known.tokens), len(one.read)) for one in going]
        last = [end - 1 for end in accumulate(row.count for row in rows)]
        logits = self._logits(going, rows, last)
        at = {"steps": [one.text.step + len(one.draft.tokens) for one in going], "rows": [one.row for one in going]}
        tokens = sampler.next_tokens(logits, **at)
        own = self.accept == "distribution"
        shares = sampler.probabilities(logits, **at) if own else logits.float().softmax(-1)
        # By the largest share where the draft has noise of its own: what is proposed must not depend on what was drawn.
        top = (shares.amax(-1) if own else shares.gather(1, tokens[:, None])[:, 0]).tolist()
        more = []
        for one, token, share, drawn_from in zip(going, tokens.tolist(), top, shares, strict=True):
            one.known.tokens += one.read
            one.read, before = [token], len(one.draft.tokens)
            if self._take(one, token, share, floor, chance):
                more.append(one)
            if own and not one.text.params.greedy and len(one.draft.tokens) > before:
                one.draft.probabilities.append(drawn_from)
        return more

    def _logits(self, going: Sequence[Drafting], rows: Sequence[Rows], last: Sequence[int]) -> Tensor:
        """Logits (R, V) float32 after what is read of each text."""
        return self._runner.logits([token for one in going for token in one.read], rows, last)

    def _take(self, one: Drafting, token: int, share: float, floor: float, chance: Chance) -> bool:
        """Give a draft its next token, if it is likely enough; whether it can have another one."""
        kind = sum(share >= least for least in _CONFIDENCE)
        one.likely *= chance(kind)
        if one.likely < floor:
            return False
        one.draft.tokens.append(token)
        one.draft.kinds.append(kind)
        return len(one.draft.tokens) < one.text.room

    def _sampler_of(self, texts: Sequence[Text]) -> Sampler:
        """A sampler with the target's settings but for penalties, whose history would have to be kept twice."""
        numbers = [text.number for text in texts]
        if self._sampler is None or self._sampler[0] != numbers:
            plain = [
                replace(
                    text.params,
                    repetition_penalty=1.0,
                    presence_penalty=0.0,
                    frequency_penalty=0.0,
                    min_new_tokens=0,
                    seed=other_seed(text.params.seed) if self.accept == "distribution" else text.params.seed,
                )
                for text in texts
            ]
            vocabulary, device = self.model.config.vocab_size, self.model.device
            sampler = Sampler(plain, [()] * len(plain), eos_ids=(), vocab_size=vocabulary, device=device)
            self._sampler = numbers, sampler
        return self._sampler[1]


def _is_plain(params: SamplingParams) -> bool:
    """Draws by temperature alone; penalties are none of the draft's (see `_sampler_of`)."""
    return params.greedy or not (params.top_k or params.min_p or params.logit_bias or params.top_p < 1)
