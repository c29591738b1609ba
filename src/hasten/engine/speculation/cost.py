"""What a step of a model costs by its rows and context, on this machine: measured, and corrected while running.

And what it costs to draft with a model beside a target, measured: proposing, and the weights that it displaces.
"""

import itertools
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from hasten.engine.cache import KVCache
from hasten.engine.decoder import Decoder
from hasten.engine.params import SamplingParams
from hasten.engine.speculation.draft_model import DraftModel
from hasten.engine.speculation.proposer import Text
from hasten.machine.processor import last_level_cache_bytes
from hasten.model.fused import is_fused
from hasten.model.sharded import ShardedTransformer, told_by_first
from hasten.model.transformer import Transformer

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
_SECONDS = 1.5  # for all of them together
MOST_SECONDS = 1.9  # for the first pass over them
_BEND = 0.1  # of a cost, by one step
_DRAFT_ROUNDS = 4
_DRAFT_STEPS = 8  # of the target after each draft
_LATE = 5  # of them, until its weights are back in the processor's cache
SMALL = 1 << 27  # bytes of weights: below that, what is around the blocks matters, and whole steps are soon made


@dataclass(slots=True)
class StepCost:
    """Seconds of a step of R rows whose sequences hold `context` tokens each, on average.

    base: at no context, by the rows of `ROWS`; per_token: what each token of context adds for each row.
    """

    rows: Sequence[int]
    base: Sequence[float]
    per_token: Sequence[float]
    _correction: list[float] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)  # steps of so many rows

    def __post_init__(self) -> None:
        self._correction, self._seen = [1.0] * len(self.rows), [0] * len(self.rows)

    def seconds(self, rows: float, context: float) -> float:
        """Between the measured rows on a line, beyond them in proportion."""
        at = bisect_left(self.rows, rows)
        if at == len(self.rows):
            return self._at(at - 1, context) * rows / self.rows[-1]
        if self.rows[at] == rows or at == 0:
            return self._at(at, context)
        low, high = self.rows[at - 1], self.rows[at]
        share = (rows - low) / (high - low)
        return self._at(at - 1, context) * (1 - share) + self._at(at, context) * share

    def _at(self, index: int, context: float) -> float:
        return self._correction[index] * (self.base[index] + context * self.per_token[index])

    def observe(self, rows: int, context: float, seconds: float) -> None:
        """A step took so long: bend the table towards it. Steps of more rows, which read prompts, say nothing."""
        at = bisect_left(self.rows, rows)
        if at == len(self.rows):
            return
        self._seen[at] += 1
        step = towards(1.0, seconds / self.seconds(rows, context), most=max(_BEND, 0.5 / self._seen[at]))
        # A machine that is slower now is so for all rows; what was seen of other rows says more of them.
        for i, seen in enumerate(self._seen):
            self._correction[i] *= 1 + (step - 1) / 5 if seen and i != at else step


def towards(old: float, new: float, *, most: float) -> float:
    """A running estimate: half the way to a new value, by a share of `most` at most. One that lies far off, as when
    others took the processor, counts no more than one that lies a little off.
    """
    return old * min(1 + most, max(1 / (1 + most), (1 + new / old) / 2))


@torch.inference_mode()
def measure_step_cost(
    model: Transformer,
    *,
    row_counts: Sequence[int] = ROWS,
    seconds: float = _SECONDS,
    most_seconds: float = math.inf,
    layers: int | None = None,
    prompts: Collection[int] = (),
    longest: int = CONTEXTS[-1],
    fastest: float = 0.5,
) -> StepCost:
    """Time whole steps of a small model; of others single blocks, times the layers, and the head. Rows of one sequence
    over a cache of its own.

    most_seconds: no more row counts are begun that would end after it; of a large model on a slow machine the table
    then ends at fewer rows.
    layers: of the model that this one is a piece of, where it is: then it is timed by blocks.
    prompts: row counts, timed by blocks, that are prompts: their last row only is scored.
    longest: the context that the costs of context are found from.
    fastest: the share of the steps whose median counts: half of them, as what other programs take makes none faster; 1
    to say what steps take now, others included.
    """
    config = model.config
    # Learned positions end somewhere.
    most = [count for count in row_counts if count <= max(1, config.max_positions // 2)]
    longest = max(2, min(longest, config.max_positions - most[-1]))
    contexts = (min(CONTEXTS[0], longest // 2), longest)
    small = layers is None and sum(t.nbytes for t in model.state_dict().values()) <= SMALL
    whole = told_by_first(model, [[small]]) == [[1]]
    groups = _whole_steps(model, most, contexts) if whole else _blocks_and_head(model, most, contexts, prompts)
    times = _in_turn(groups, model, seconds=seconds, most_seconds=most_seconds, fastest=fastest)
    if not whole:
        count = layers or len(config.layers)
        times = [[low * count + head, high * count + head] for low, high, head in times]
    most = most[: len(times)]
    base, per_token = [0.0], [0.0]
    for rows, (low, high) in zip(most, times, strict=True):
        # The short context is at most half of its step; what says otherwise is noise.
        slope = min(max(0.0, high - low) / (contexts[1] - contexts[0]), low / (2 * contexts[0]))
        # More rows never cost less, nor more than so many steps of the fewest: what says so is noise.
        base.append(max(low - slope * contexts[0], base[-1]))
        base[-1] = min(base[-1], base[1] * rows / most[0])
        per_token.append(max(slope, per_token[-1]))
    return StepCost(most, base[1:], per_token[1:])


Calls = list[list[Callable[[], object]]]  # by the number of rows


def _whole_steps(model: Transformer, most: Sequence[int], contexts: tuple[int, int]) -> Calls:
    """At both contexts, with all that Python does around them, up to the tokens themselves."""
    decoder, token = Decoder(model, batch=1, capacity=contexts[1] + most[-1]), torch.tensor([1], device=model.device)

    def step(rows: int, context: int) -> Callable[[], object]:
        def call() -> object:
            decoder.lengths = [context]
            logits = decoder.decode(token) if rows == 1 else decoder.verify([[1] * rows])
            return logits.argmax(-1).tolist()

        return call

    return [[step(rows, context) for context in contexts] for rows in most]


def _blocks_and_head(
    model: Transformer, most: Sequence[int], contexts: tuple[int, int], prompts: Collection[int]
) -> Calls:
    """A block at both contexts, and the head. Each call takes the next block: one that is called again and again would
    lie in the processor's cache, where in a real step it does not.
    """
    config, device = model.config, model.device
    longest = contexts[1]
    one = replace(config, layers=config.layers[:1])
    dtype, capacity = model.compute_dtype, longest + most[-1]
    bounded = config.reach is not None  # as the whole model's, whatever its first layer sees
    cache = KVCache.of_texts(one, batch=1, capacity=capacity, dtype=dtype, device=device, bounded=bounded)
    numbers = itertools.cycle(range(len(config.layers)))

    def block_call(rows: int, context: int) -> Callable[[], object]:
        x = torch.randn(1, rows, config.hidden_size, device=device, dtype=model.compute_dtype)
        positions = torch.arange(context, context + rows, device=device)[None]
        ropes = [table(positions) for table in model.ropes]
        step = cache.step_of_texts(positions, read=context + rows, masks=not is_fused(model)).layers[0]

        def call() -> object:
            number = next(numbers)
            return model.blocks[number](x, ropes[config.layers[number].rope] if ropes else None, step)

        return call

    def head_call(rows: int) -> Callable[[], object]:
        x = torch.randn(rows, config.hidden_size, device=device, dtype=model.compute_dtype)
        return lambda: model.scores(x)

    heads = {rows: head_call(1 if rows in prompts else rows) for rows in most}
    return [[*(block_call(rows, context) for context in contexts), heads[rows]] for rows in most]


def _in_turn(
    groups: Calls, model: Transformer, *, seconds: float, most_seconds: float = math.inf, fastest: float = 0.5
) -> list[list[float]]:
    """The time of each call, all groups one after the other for so many seconds, once at least: the median of this
    share of them, the fastest. Groups that would begin or end after `most_seconds` are left out.

    Of three calls that follow each other the last counts: steps come after others of their size, and find in the
    processor's caches what those left there. Where there is no time for that, of a large model on a slow machine, each
    is one. Ranks make as many as the first one has time for.
    """
    for call in groups[0]:
        call()  # what a first call waits for is not what the others take
    start = time.perf_counter()
    times: list[list[list[float]]] = []

    def before(end: float) -> bool:
        return told_by_first(model, [[time.perf_counter() - start < end]]) == [[1]]

    def measure(calls: Sequence[Callable[[], object]], end: float) -> list[float]:
        often = 3 if before(end) else 1
        return [[timed(call, model.device) for _ in range(often)][-1] for call in calls]

    for calls in groups:
        if times and not before(most_seconds - 2 * sum(own[-1] for own in times[-1])):  # the next ones take longer
            break
        times.append([[took] for took in measure(calls, seconds / 3)])
    while before(seconds):
        for calls, found in zip(groups, times, strict=False):
            for own, took in zip(found, measure(calls, seconds), strict=True):
                own.append(took)
    return [[statistics.median(sorted(own)[: math.ceil(fastest * len(own))]) for own in found] for found in times]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, with what it left a GPU to do."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds: of a draft of one token; of each further one; and by how much the target's next steps are slower, those
    after the one that checks the draft.
    """

    first: float = 0.0
    more: float = 0.0
    after: float = 0.0


@torch.inference_mode()
def measure_price(drafter: DraftModel, model: Transformer) -> Price:
    """Draft for a text of no meaning, each time after steps of the target: the processor's caches then hold what they
    hold in earnest. A large target's steps are imitated by reading as much memory. What it waits after a draft is
    little beside a step, so it is not measured; nor is that of ranks, which would have to step together, or of a GPU.
    """
    weights = sum(t.nbytes for name, t in model.state_dict().items() if not name.startswith("embedding."))
    small = weights <= SMALL and not isinstance(model, ShardedTransformer) and model.device.type == "cpu"
    step = _whole_steps(model, [1], (1, 1))[0][0] if small else _sweep(min(weights, 2 * last_level_cache_bytes()))
    warm_up(drafter)
    _rehearse(drafter, 1)  # reads the text, as the timed ones do not
    step()
    drafts: dict[int, list[float]] = {1: [], 5: []}
    steps: list[list[float]] = []
    for room in (*drafts,) * _DRAFT_ROUNDS:
        drafts[room].append(_rehearse(drafter, room))
        steps.append([timed(step, model.device) for _ in range(_DRAFT_STEPS if small else 1)])
    drafter.end(-1, ())
    by_place = [statistics.median(own) for own in zip(*steps, strict=True)]
    after = sum(by_place[1:_LATE]) - (_LATE - 1) * statistics.median(by_place[_LATE:]) if small else 0.0
    first = min(drafts[1])
    return Price(first, max(min(drafts[5]) - first, 0.0) / 4, max(after, 0.0))


def _rehearse(drafter: DraftModel, room: int) -> float:
    """Seconds of a draft of so many tokens for a text of no meaning, which the draft model knows from the second on."""
    text = Text(number=-1, tokens=[1] * drafter.reads, step=0, params=SamplingParams(temperature=0), room=room)
    return timed(lambda: drafter.propose([text], floor=0.0, chance=lambda kind: 1.0), drafter.model.device)


def warm_up(drafter: DraftModel) -> None:
    """So that the first real draft finds its memory there."""
    _rehearse(drafter, 1)
    drafter.end(-1, ())


def _sweep(size: int) -> Callable[[], object]:
    memory = torch.zeros(size, dtype=torch.int8)
    return lambda: memory.add_(1)
