"""How many tokens to propose: as many as pay, by what was accepted so far and by what a step costs here.

A step over R rows takes `cost(R)`. Of the proposed tokens each is accepted with a chance that is counted while running,
by its kind. A batch gets the tokens that are most likely accepted, as many as give the most tokens a second; where none
does, nothing is proposed, and the step is a plain one. Chances and costs are estimates, so what drafts gained or lost
is measured too: a small credit, in plain steps, pays for losses and grows by gains, and a little with each step. Where
it is used up, drafts rest for as many steps as it takes to grow again. So drafts that never help cost `_CREDIT` steps
and `_INTEREST` of all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from hasten.engine.speculation.cost import Price, StepCost, towards
from hasten.engine.speculation.proposer import Chance, Draft, Proposer, Text

MOST = 16  # tokens of a draft, unless said otherwise
_PRIOR = 3.0  # proposed tokens that a proposer's own belief counts for
_MEMORY = 200.0  # proposed tokens of a kind after which older ones count for less
_PROBE = 32  # of so many steps without a draft, one has a draft all the same: texts change
PLAIN_STEPS = 4  # steps without drafts at first: they say what plain ones take
_PLAIN_AGAIN = 64  # and one of so many later, as after each rest
_SEEN = 8  # of so many plain steps one bends the table of costs: a small model's step is short
_CREDIT = 1.0  # plain steps that drafts may lose at first
_MOST_CREDIT = 4.0  # that they may have by what they gained, in one text; a batch's steps tell more, and cost more
_INTEREST = 0.006  # of a plain step that they may lose more, with each step
_FAR = 2.0  # times as long as usual: others had the processor
_LATEST = 16  # steps, by which `active` counts
_GAIN = 1.02  # a draft must promise so much more than none, because chances and costs are only estimates


@dataclass(slots=True)
class SpeculationStats:
    """drafts: sequences in steps that had one; draft_tokens and accepted_tokens of them, accepted also by position.

    tokens: all that were taken, in `steps` of the target, plain ones included; rows: how many steps had so many rows.
    seconds: of proposing; step_seconds: of the steps; plain_seconds: what plain steps would have taken for these
    tokens, by the table of costs. active: the share of the latest steps that had a draft, near 0 where none pays.
    """

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
        """Of the proposed tokens, the share that was taken."""
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
        cost: StepCost,
        *,
        most: int = MOST,
        always: bool = False,
        price: Price | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """most: tokens of a draft. always: propose so many without asking whether they pay (for measuring).

        price: of proposing, as far as it is known; what is 0 is found while running.
        """
        self.proposer, self.cost, self.most, self.always = proposer, cost, most, always
        price = price or Price()
        self.seconds, self.more_seconds, self._displaced = price.first, price.more, price.after
        self._clock = clock
        self.acceptance = Acceptance(proposer.prior)
        self.stats = SpeculationStats()
        self._drafts: dict[int, Draft] = {}  # of this step
        self._more: dict[int, float] = {}  # seconds that a further row costs beside so many, by the table as it is
        self._plain_steps = 0
        self._asked_at = 0  # the step in which the proposer was asked last
        self._credit = _CREDIT
        self._rest = 0  # steps that go by without a word
        self._rested = False  # the step before was one of those
        self._context = 0.0  # of the latest step that was told
        # Seconds: proposing in this step, a plain one; and whether what the step itself takes tells of the drafts.
        self._asked: tuple[float, float, bool] | None = None
        self._texts = 0  # for which drafts were asked in this step
        self._taken = 0  # tokens of this step, of sequences that might have had a draft
        self._all = (0, 0, 0)  # of this step: sequences, tokens that they took, proposed ones that were checked

    def rests(self) -> bool:
        """Whether this step is one of a rest: `rested` ends it, and nothing else is asked or told of it."""
        if not self._rest and self._credit < 0 and not self.always:
            self._rest = int(-self._credit / _INTEREST)
            self._credit += self._rest * _INTEREST
        return self._rest > 0

    def rested(self, tokens: int) -> None:
        """A step of a rest took so many tokens, one of each sequence; as long as usual, it is supposed."""
        stats, usual = self.stats, self.cost.seconds(tokens, self._context)
        self._rest -= 1
        self._rested = True
        stats.steps += 1
        stats.tokens += tokens
        stats.rows[tokens] = stats.rows.get(tokens, 0) + 1
        stats.active -= stats.active / _LATEST
        stats.step_seconds += usual
        stats.plain_seconds += usual

    def propose(self, texts: Sequence[Text], *, other_rows: int = 0) -> list[list[int]]:
        """Drafts for the next step of these sequences. other_rows: of the same step, prompts that are read."""
        started = asked = self._clock()
        self._drafts.clear()
        self._asked, self._taken, self._all = None, 0, (0, 0, 0)
        self._credit = max(self._credit, min(_CREDIT, self._credit + _INTEREST))
        steps, rested = self.stats.steps, self._rested
        self._rested = False
        quiet = rested or self._credit < 0 or steps < PLAIN_STEPS or steps % _PLAIN_AGAIN == 0
        if not texts or (quiet and not self.always):
            return [[] for _ in texts]
        self._texts = len(texts)
        self._credit = min(self._credit, _MOST_CREDIT / len(texts) ** 0.5)
        context = sum(len(text.tokens) for text in texts) / len(texts)
        rows = len(texts) + other_rows
        plain = self.cost.seconds(rows, context)
        probing = self._plain_steps >= _PROBE or not self.seconds  # as little is known of it
        most = 1 if probing and not self.always else self.most
        for text in texts:
            text.room = min(text.room, most)
        floor = 0.0 if self.always or probing else self._floor(rows, context, plain)
        usual = displaced = 0.0
        if floor >= 1:
            drafts = [Draft() for _ in texts]
        else:
            drafts = self.proposer.propose(texts, floor=floor, chance=self.acceptance.chance)
            longest = max(len(draft.tokens) for draft in drafts)
            # After a rest a model first reads what was written meanwhile: that is not what its next drafts cost.
            rested = self.seconds > 0 and self.stats.steps > self._asked_at + 1
            usual = self._proposing(longest) if rested else self._took(self._clock() - asked, longest)
            self._asked_at = self.stats.steps
            displaced = self._displaced if rested else 0.0  # of drafts in a row it shows in what rows cost
            if not self.always and any(draft.tokens for draft in drafts):
                drafts = self._paying(drafts, rows, context, probing)
        self._drafts = {text.number: draft for text, draft in zip(texts, drafts, strict=True)}
        self._plain_steps = 0 if any(draft.tokens for draft in drafts) or probing else self._plain_steps + 1
        took = self._clock() - started
        self.stats.seconds += took
        self.stats.plain_seconds -= displaced  # by which the next plain steps are too long
        # All that a plain run does not do. More than twice as long is not ours: others had the processor.
        self._asked = min(took, _FAR * usual + plain) + displaced, plain, floor < 1 and not other_rows
        return [draft.tokens for draft in drafts]

    def probabilities(self, number: int) -> list[Tensor]:
        """Those that a sequence's draft was drawn from, where it has such."""
        draft = self._drafts.get(number)
        return [] if draft is None else draft.probabilities

    def observe(self, number: int, taken: int, *, checked: int) -> None:
        """A sequence took so many tokens in this step: what was right of its draft, of which so many tokens were
        checked, and one more.
        """
        stats, draft = self.stats, self._drafts.get(number)
        stats.tokens += taken
        self._all = self._all[0] + 1, self._all[1] + taken, self._all[2] + checked
        self._taken += 0 if draft is None else taken
        if draft is None or not checked or not taken:  # none: its constraint failed
            return
        stats.drafts += 1
        stats.draft_tokens += checked
        stats.accepted_tokens += taken - 1
        stats.accepted_by_position += [0] * (checked - len(stats.accepted_by_position))
        for place, kind in enumerate(draft.kinds[: min(taken, checked)]):
            accepted = place < taken - 1
            stats.accepted_by_position[place] += accepted
            self.acceptance.count(kind, accepted)

    def stepped(self, rows: int, context: float, seconds: float) -> None:
        """The target's step over so many rows took so long."""
        stats, (sequences, taken, checked) = self.stats, self._all
        self._context = context
        stats.steps += 1
        stats.rows[rows] = stats.rows.get(rows, 0) + 1
        stats.active += (bool(checked) - stats.active) / _LATEST
        without = self.cost.seconds(rows - checked, context) / self.cost.seconds(rows, context) if checked else 1.0
        stats.step_seconds += seconds
        stats.plain_seconds += seconds * without * (taken / sequences if sequences else 1.0)
        if checked or stats.steps <= _SEEN or stats.steps % _SEEN == 0:
            self.cost.observe(rows, context, seconds)
            self._more.clear()
        if self._asked is not None:
            proposing, plain, tells = self._asked
            spent = self.cost.seconds(rows, context)
            if tells and rows <= self.cost.rows[-1]:
                spent = min(max(seconds, spent / _FAR), spent * _FAR)
            self._credit += self._taken / self._texts - (spent + proposing) / plain

    def end(self, number: int, answer: Sequence[int], *, salt: str = "") -> None:
        """A sequence has ended."""
        self._drafts.pop(number, None)
        self.proposer.end(number, answer, salt=salt)

    def _took(self, seconds: float, longest: int) -> float:
        """What drafts whose longest has so many tokens cost, after these took so long."""
        if not self.seconds:
            self.seconds = max(seconds, 1e-9)
        elif longest > 1 and not self.more_seconds:
            self.more_seconds = max(seconds - self.seconds, 0.0) / (longest - 1)
        bend = towards(1.0, seconds / self._proposing(longest), most=0.3)
        self.seconds *= bend
        if longest > 1:
            self.more_seconds *= bend
        return self._proposing(longest)

    def _proposing(self, longest: int) -> float:
        """Seconds that it takes to propose; nothing is known to be found at once."""
        return self.seconds + self.more_seconds * max(0, longest - 1)

    def _floor(self, rows: int, context: float, plain: float) -> float:
        """The chance below which no further token can pay: of what a plain step costs a token, what one more adds."""
        more = self._more.get(rows)
        if more is None:
            more = min((self.cost.seconds(rows + n, context) - plain) / n for n in (1, 2, 4, 8))
            self._more[rows] = more
        return _GAIN * (more * rows + self.more_seconds) / plain if plain else 0.0

    def _paying(self, drafts: list[Draft], rows: int, context: float, probing: bool) -> list[Draft]:
        """The drafts cut to those tokens that together give the most tokens a second.

        Not those with probabilities: whether a token is checked must not depend on what was drawn behind it.
        """
        if any(draft.probabilities for draft in drafts):
            return drafts
        likely: list[tuple[float, int]] = []
        for index, draft in enumerate(drafts):
            chance = 1.0
            for kind in draft.kinds:
                chance *= self.acceptance.chance(kind)
                likely.append((chance, index))
        likely.sort(key=lambda one: -one[0])
        spent = self._proposing(max(len(draft.tokens) for draft in drafts))  # whatever is kept of them
        expected = float(len(drafts))
        best = expected / (self.cost.seconds(rows, context) + spent) * _GAIN
        kept = 1 if probing and likely else 0
        for count, (chance, _) in enumerate(likely, start=1):
            expected += chance
            rate = expected / (self.cost.seconds(rows + count, context) + spent)
            if rate > best:
                best, kept = rate, count
        lengths = [0] * len(drafts)
        for _, index in likely[:kept]:
            lengths[index] += 1
        return [draft.first(length) for draft, length in zip(drafts, lengths, strict=True)]
