"""How many tokens to propose: as many as pay, by what was accepted and what steps took so far.

A step over R rows takes `price.seconds(R)`, making drafts of up to N tokens takes `drafting.seconds(N)`: both are
learnt from the steps that run. Each proposed token is accepted with a chance that is counted while running, by its
kind. In plain steps (of S sequences, S rows), drafts gain

    tokens taken / S - (seconds of the checking step + seconds of drafting) / seconds of a plain step

Each step proposes the tokens that promise the most tokens a second, or none where none is faster than a plain step.
Promises are estimates: where recent drafts lost on average, one is made again only so often that it takes `_SHARE` of
the time. So text on which drafts never help is written about as fast as without them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from hasten.engine.speculation.price import Price
from hasten.engine.speculation.proposer import Chance, Draft, Proposer, ReadsStates, Text

MOST = 16  # tokens of a draft, unless said otherwise
_PRIOR = 3.0  # proposed tokens that a proposer's own belief counts for
_MEMORY = 200.0  # proposed tokens of a kind after which older ones count for less
_PLAIN_STEPS = 4  # that are measured before the first draft
_PLAIN_AGAIN = 128  # every 128th step makes no draft, which keeps the price of a plain step up to date
_LEARN = 8  # every eighth plain step updates the prices: doing so in each would slow a small model
_MARGIN = 1.02  # a draft must promise this many times the speed of none: chances and prices are estimates
_SHARE = 0.004  # of the time, for drafts that promise nothing
_TRY = 32  # steps without a draft after which one is tried that promises nothing: texts change
_TRIED = 2  # tokens of that, and of the first drafts, at most
_RECENT = 32  # drafts whose gain is averaged
_HOPE = (0.25, 6)  # the gain that is believed at first, and the number of drafts that this counts for
_LATEST = 16  # steps over which `active` is averaged


@dataclass(slots=True)
class SpeculationStats:
    """tries: steps before which drafts were made, to be checked or not. drafts: sequences in steps that had one;
    draft_tokens and accepted_tokens of them, accepted also by position.

    tokens: all that were taken, in `steps` of the target, plain ones included; rows: the number of steps by their rows.
    seconds: of proposing; step_seconds: of the steps that read no prompts; plain_seconds: what plain steps would have
    taken for their tokens, by the prices learnt. active: the share of the latest steps that had a draft, near 0 where
    none pays.
    """

    tries: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    step_seconds: float = 0.0
    plain_seconds: float = 0.0
    active: float = 0.0

    def __str__(self) -> str:
        if not self.draft_tokens:
            return f"[drafts were made before {self.tries} of {self.steps} steps; none was worth checking]"
        return (
            f"[{self.accepted_tokens} of {self.draft_tokens} proposed tokens were taken ({self.acceptance:.0%}), "
            f"{self.tokens_per_step:.2f} tokens a pass of the model, about {self.speedup:.2f} times as fast as without]"
        )

    def to_json(self) -> dict[str, Any]:
        """All that was counted, and what follows from it."""
        names = ("tokens_per_step", "acceptance", "speedup")
        return asdict(self) | {name: getattr(self, name) for name in names}

    @property
    def speedup(self) -> float:
        """Over the same tokens without drafts, by what steps cost here; proposing counts."""
        spent = self.step_seconds + self.seconds
        return self.plain_seconds / spent if spent else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a pass of the target."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that was accepted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


class Acceptance:
    """The share of each kind of token that is accepted where all before it were."""

    def __init__(self, prior: Chance) -> None:
        self._prior = prior
        self._counts: dict[int, list[float]] = {}  # accepted, proposed

    def chance(self, kind: int) -> float:
        own = self._counts.get(kind)
        return self._prior(kind) if own is None else own[0] / own[1]

    def count(self, kind: int, accepted: bool) -> None:
        own = self._counts.setdefault(kind, [_PRIOR * self._prior(kind), _PRIOR])
        if own[1] > _MEMORY:
            own[:] = (0.5 * own[0], 0.5 * own[1])
        own[0] += accepted
        own[1] += 1


class Speculator:
    """Asks a proposer for drafts and cuts them to what pays."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        price: Price | None = None,
        drafting: Price | None = None,
        most: int = MOST,
        always: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """price, drafting: what is known of the target's steps and of making drafts; learnt while running.

        most: tokens of a draft. always: propose that many without asking whether they pay (for tests and measuring).
        """
        self.proposer, self.most, self.always = proposer, most, always
        self.price, self.drafting = price or Price(), drafting or Price()
        self.acceptance = Acceptance(proposer.prior)
        self.reader = proposer if isinstance(proposer, ReadsStates) else None
        self.stats = SpeculationStats()
        self._clock = clock
        self._gain, self._averaged = _HOPE  # what recent drafts gained, and how many those are
        self._cost = 0.0  # in plain steps, of this step with its drafts; 0 where nothing was hoped from them
        self._next_try = _TRY  # the step from which on a draft is tried that promises nothing
        self._reach = _TRIED  # tokens of a draft: twice as many as were accepted at once
        self._drafts: dict[int, Draft] = {}  # of this step
        self._sequences = self._taken = self._checked = 0  # of this step: the latter two are tokens

    @property
    def head_states(self) -> int:
        """Positions of each text whose states are kept for the proposer; 0: it reads none."""
        return 0 if self.reader is None else self.reader.read_tokens

    @property
    def asks(self) -> bool:
        """Whether the next step may have drafts; where not, `propose` need not be called."""
        if self.always:
            return True
        steps = self.stats.steps
        if self.price.measured < _PLAIN_STEPS or steps % _PLAIN_AGAIN == _PLAIN_AGAIN - 1:
            return False
        return self._gain > -_SHARE or steps >= self._next_try

    def propose(self, texts: Sequence[Text]) -> list[list[int]]:
        """Drafts for the next step of these sequences."""
        self._drafts.clear()
        if not texts or not self.asks:
            return [[] for _ in texts]
        trying = self.stats.steps >= self._next_try and not self.always
        started = self._clock()
        plain = self.price.seconds(len(texts))
        floor = 0.0 if self.always or trying else self._floor(len(texts), plain)
        if floor >= 1:  # a row costs as much as a step
            return [[] for _ in texts]
        for text in texts:
            text.room = min(text.room, self.most if self.always else _TRIED if trying else self._reach)
        self.stats.tries += 1
        drafts = self.proposer.propose(texts, floor=floor, chance=self.acceptance.chance)
        longest = max(1, *(len(draft.tokens) for draft in drafts))
        self.drafting.learn(longest, self._clock() - started)
        if not self.always:
            drafts = self._paying(drafts, plain, self.drafting.seconds(longest), trying)
        self._drafts = {text.number: draft for text, draft in zip(texts, drafts, strict=True)}
        self.stats.seconds += self._clock() - started
        return [draft.tokens for draft in drafts]

    def probabilities(self, number: int) -> list[Tensor]:
        """The distributions that a sequence's draft was drawn from, if the proposer gave any."""
        draft = self._drafts.get(number)
        return [] if draft is None else draft.probabilities

    def take_states(self, rows: Sequence[tuple[int, int, int]], states: Tensor | None) -> None:
        """Give the states of a step's tokens to a proposer that reads them; see `ReadsStates`."""
        if self.reader is not None and states is not None:
            self.reader.take_states(rows, states)

    def observe(self, number: int, taken: int, *, checked: int) -> None:
        """Count the tokens that a sequence took in this step: those of its draft that were right, and one more.

        checked: the tokens of its draft that were checked.
        """
        stats, draft = self.stats, self._drafts.get(number)
        stats.tokens += taken
        self._sequences += 1
        self._taken += taken
        self._checked += checked
        if draft is None or not checked or not taken:  # none was taken: its constraint failed
            return
        stats.drafts += 1
        stats.draft_tokens += checked
        stats.accepted_tokens += taken - 1
        self._reach = min(self.most, max(self._reach, 2 * taken))
        stats.accepted_by_position += [0] * (checked - len(stats.accepted_by_position))
        for place, kind in enumerate(draft.kinds[: min(taken, checked)]):
            accepted = place < taken - 1
            stats.accepted_by_position[place] += accepted
            self.acceptance.count(kind, accepted)

    def stepped(self, rows: int, seconds: float) -> None:
        """Record that a step of the target over `rows` rows took `seconds`. Comes after `observe` for its sequences."""
        stats, checked, price = self.stats, self._checked, self.price
        stats.steps += 1
        stats.rows[rows] = stats.rows.get(rows, 0) + 1
        stats.active += (bool(checked) - stats.active) / _LATEST
        without = price.seconds(rows - checked) / price.seconds(rows) if checked else 1.0
        if rows == self._sequences + checked:  # no prompts were read
            stats.step_seconds += seconds
            stats.plain_seconds += seconds * without * (self._taken / self._sequences if self._sequences else 1.0)
            if self._cost and self._sequences:
                self._averaged = min(self._averaged + 1, _RECENT)
                self._gain += (self._taken / self._sequences - self._cost - self._gain) / self._averaged
            if checked or price.measured < _LEARN or stats.steps % _LEARN == 0:
                price.learn(rows, seconds)
        self._drafts.clear()
        self._sequences = self._taken = self._checked = 0
        self._cost = 0.0

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """Forget a sequence that has ended, with this answer."""
        self._drafts.pop(number, None)
        self.proposer.end(number, answer, salt=salt)

    def _floor(self, sequences: int, plain: float) -> float:
        """The chance below which no further token can pay: what it adds to a step, over a plain step's price of one."""
        row = min((self.price.seconds(sequences + n) - plain) / n for n in (1, 2, 4, 8))
        token = (self.drafting.seconds(5) - self.drafting.seconds(1)) / 4 if self.drafting.measured else 0.0
        return _MARGIN * (sequences * row + token) / plain

    def _paying(self, drafts: list[Draft], plain: float, drafting: float, trying: bool) -> list[Draft]:
        """Cut the drafts to the tokens that together promise the most tokens a second. trying: keep one at least."""
        kept, expected = self._best(drafts, plain, drafting)
        cost = (self.price.seconds(len(drafts) + sum(kept)) + drafting) / plain
        if trying and expected / len(drafts) <= cost:
            first = next((index for index, draft in enumerate(drafts) if draft.tokens), 0)
            kept[first] = max(kept[first], min(1, len(drafts[first].tokens)))
            cost = (self.price.seconds(len(drafts) + sum(kept)) + drafting) / plain
            self._next_try = self.stats.steps + max(_TRY, int((cost - 1) / _SHARE))
        else:
            self._cost = cost
            if any(kept) and self._gain > -_SHARE:
                self._next_try = self.stats.steps + _TRY
        return [draft.first(count) for draft, count in zip(drafts, kept, strict=True)]

    def _best(self, drafts: list[Draft], plain: float, drafting: float) -> tuple[list[int], float]:
        """How many tokens of each draft to keep, and the tokens that all sequences are expected to take with those."""
        expected = float(len(drafts))
        likely: list[tuple[float, int]] = []
        for index, draft in enumerate(drafts):
            chance = 1.0
            for kind in draft.kinds:
                chance *= self.acceptance.chance(kind)
                likely.append((chance, index))
        if any(draft.probabilities for draft in drafts):
            # Whether a token is checked must not depend on what was drawn behind it.
            return [len(draft.tokens) for draft in drafts], expected + sum(chance for chance, _ in likely)
        likely.sort(key=lambda one: -one[0])
        best, most, kept = expected, _MARGIN * expected / (plain + drafting), 0
        for count, (chance, _) in enumerate(likely, start=1):
            expected += chance
            rate = expected / (self.price.seconds(len(drafts) + count) + drafting)
            if rate > most:
                best, most, kept = expected, rate, count
        lengths = [0] * len(drafts)
        for _, index in likely[:kept]:
            lengths[index] += 1
        return lengths, best
