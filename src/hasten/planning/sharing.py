"""Bytes that a rank holds and sends under ZeRO, from the config alone: formulas for FSDP2.

FSDP2 shards gradients and optimizer states at every stage. The stages differ in the peak: gathered weights, and
gradients that are not reduced yet. Activations and the buffers of a collective come on top.
"""

from dataclasses import dataclass, replace

from hasten.model.config import ModelConfig
from hasten.planning.cost import parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one rank.

    start: once the weights are created. backward: after a backward pass, with the optimizer's states. peak: of a step.
    """

    start: float
    backward: float
    peak: float


def fsdp_bytes(
    config: ModelConfig,
    *,
    stage: int,
    ranks: int,
    accumulation: int = 1,
    masters: bool = False,
    copies: bool = False,
) -> RankBytes:
    """Bytes that each of `ranks` ranks holds of one model.

    masters: weights are 16-bit, with float32 masters. copies: the optimizer has float32 copies of float32 weights.
    """
    count, root, block, head = _parts(config)
    size, own = (2 if masters else 4), (4 if masters or copies else 0)  # bytes of a weight; of the optimizer's copy
    share = 1 if stage == 0 else ranks
    kept = count * (size + own + 8) / share  # weights and states, all the time
    summed = count * size / ranks if accumulation > 1 else 0  # gradients of earlier micro-batches
    blocks = len(config.layers)
    if stage == 0:
        peak: float = count * size
    elif stage == 1 and accumulation > 1:  # all gathered, nothing reduced
        peak = 2 * count * size
    elif stage < 3:  # all gathered, when the backward pass leaves the last block
        peak = size * (count + head + block) + summed
    else:  # the root and the first block gathered, whose gradients are the last ones to be reduced
        peak = size * (root + head + 2 * block) + (summed or size * (blocks - 1) * block / ranks)
    update = count * (4 if own else size) / share + (count * size if stage == 0 and own else 0)
    start, backward = count * (size + own) / share, kept + count * size / share
    return RankBytes(start=start, backward=backward, peak=max(kept + peak, kept + update))


def gathered_weights(config: ModelConfig) -> float:
    """Number of weights that stage 3 gathers at once of those it does not train: the root's and two blocks'."""
    _, root, block, _ = _parts(config)
    return root + 2 * block


def sent_bytes(
    config: ModelConfig, *, stage: int, ranks: int, accumulation: int = 1, itemsize: int = 4, replicas: int = 1
) -> float:
    """Bytes that a rank sends in a step, with ring collectives. itemsize: bytes of a weight or gradient when sent.

    DDP: one all-reduce, two volumes. Stage 1: one all-gather and one reduce-scatter. 2: one of each for every
    micro-batch. 3: as 2, and the blocks, but not the root, are gathered a second time. ranks: that share one model;
    with `replicas` each reduce-scatter is followed by an all-reduce of the shards.
    """
    count, root, _, _ = _parts(config)
    micro = accumulation if stage > 1 else 1
    volumes = (2 * count + (count - root if stage == 3 else 0)) * (ranks - 1) / ranks
    return micro * itemsize * (volumes + 2 * count / ranks * (replicas - 1) / replicas)


def _parts(config: ModelConfig) -> tuple[int, int, float, int]:
    """Numbers of weights: all; outside the blocks; in a block; in a head that is not tied.

    A tied head's gradient is a temporary of autograd until it is added to the embedding's, and is not counted.
    """
    count, rest = parameters(config), parameters(replace(config, layers=()))
    root = rest.total + count.table
    return count.total, root, (count.total - root) / len(config.layers), count.head
