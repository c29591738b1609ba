"""What it costs to draft with a model beside a target, measured: proposing, and the weights that it displaces."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hasten.generation.decoder import Decoder
from hasten.generation.params import SamplingParams
from hasten.generation.speculation.cost import SMALL, timed
from hasten.generation.speculation.draft_model import DraftModel
from hasten.generation.speculation.proposer import Text
from hasten.machine.processor import last_level_cache_bytes
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

_ROUNDS = 4
_STEPS = 8  # of the target after each draft
_LATE = 5  # of them, until its weights are back in the processor's cache


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
    step = _target(model) if small else _sweep(min(weights, 2 * last_level_cache_bytes()))
    warm_up(drafter)
    _rehearse(drafter, 1)  # reads the text, as the timed ones do not
    step()
    drafts: dict[int, list[float]] = {1: [], 5: []}
    steps: list[list[float]] = []
    for room in (*drafts,) * _ROUNDS:
        drafts[room].append(_rehearse(drafter, room))
        steps.append([timed(step, model.device) for _ in range(_STEPS if small else 1)])
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


def _target(model: Transformer) -> Callable[[], object]:
    decoder, token = Decoder(model, batch=1, capacity=2), torch.tensor([1], device=model.device)

    def step() -> object:
        decoder.lengths = [1]
        return decoder.decode(token).argmax(-1).tolist()

    return step


def _sweep(size: int) -> Callable[[], object]:
    memory = torch.zeros(size, dtype=torch.int8)
    return lambda: memory.add_(1)
