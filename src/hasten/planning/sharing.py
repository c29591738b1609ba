"""What a rank holds and sends under ZeRO, from the config alone: the formulas of FSDP2.

FSDP2 shares out gradients and states at every stage. What its stages differ in is the peak: weights that are gathered,
and gradients that are not reduced yet. Activations and the buffers of a collective come on top.
"""

from dataclasses import dataclass, replace

from hasten.model.config import ModelConfig
from hasten.planning.cost import parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes: after the weights are there; after a backward pass, with the optimizer's states; at the peak of a step."""

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
    """Of one rank of so many that share a model. masters: 16-bit weights. copies: the optimizer has its own weights."""
    count, root, block, head = _parts(config)
    size, own = (2 if masters else 4), (4 if masters or copies else 0)  # of a weight; of the optimizer's
    share = 1 if stage == 0 else ranks
    kept = count * (size + own + 8) / share  # weights and states, all the time
    summed = count * size / ranks if accumulation > 1 else 0  # of the micro-batches before
    blocks = len(config.layers)
    if stage == 0:
        peak: float = count * size
    elif stage == 1 and accumulation > 1:  # all gathered, nothing reduced
        peak = 2 * count * size
    elif stage < 3:  # all gathered, as the backward pass comes out of the last block
        peak = size * (count + head + block) + summed
    else:  # the root and the first block gathered, its gradients the last ones to be reduced
        peak = size * (root + head + 2 * block) + (summed or size * (blocks - 1) * block / ranks)
    update = count * (4 if own else size) / share + (count * size if stage == 0 and own else 0)
    start, backward = count * (size + own) / share, kept + count * size / share
    return RankBytes(start=start, backward=backward, peak=max(kept + peak, kept + update))


def sent_bytes(
    config: ModelConfig, *, stage: int, ranks: int, accumulation: int = 1, itemsize: int = 4, replicas: int = 1
) -> float:
    """Bytes a rank sends in a step, by rings. itemsize: of a weight and of a gradient as they travel.

    DDP: one all-reduce, two volumes. Stage 1: one gathering and one reduction. 2: one of each for every micro-batch.
    3: as 2, and the blocks are gathered a second time; the root is not. ranks: that share one model; between replicas
    each reduction is followed by an all-reduce of the shares.
    """
    count, root, _, _ = _parts(config)
    micro = accumulation if stage > 1 else 1
    volumes = (2 * count + (count - root if stage == 3 else 0)) * (ranks - 1) / ranks
    return micro * itemsize * (volumes + 2 * count / ranks * (replicas - 1) / replicas)


def _parts(config: ModelConfig) -> tuple[int, int, float, int]:
    """Weights: all; outside the blocks; of a block; of a head that is not tied.

    A tied one's gradient is autograd's own, and counted nowhere, until the embedding's is added.
    """
    count, rest = parameters(config), parameters(replace(config, layers=()))
    return count.total, rest.total, (count.total - rest.total) / len(config.layers), count.head
