"""Bytes that a rank holds and sends under ZeRO, from the config alone: formulas for FSDP2.

FSDP2 shards gradients and optimizer states at every stage. The stages differ in the peak: gathered weights, and
gradients that are not reduced yet. Activations and the buffers of a collective come on top. Experts that ranks divide
(expert parallelism) are neither sharded nor gathered: a rank has some of them whole, at every stage.
"""

from dataclasses import dataclass, replace

from hasten.model.config import ModelConfig
from hasten.planning.cost import expert_weights, parameters


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
    experts: int = 1,
) -> RankBytes:
    """Bytes that each of `ranks` ranks holds of one model.

    masters: weights are 16-bit, with float32 masters. copies: the optimizer has float32 copies of float32 weights.
    experts: ranks that divide the experts.
    """
    count, root, block, head = _parts(config, experts)
    apart = expert_weights(config) / experts if experts > 1 else 0  # of a rank
    size, own = (2 if masters else 4), (4 if masters or copies else 0)  # bytes of a weight; of the optimizer's copy
    share = 1 if stage == 0 else ranks
    kept = (count / share + apart) * (size + own + 8)  # weights and states, all the time
    summed = count * size / ranks if accumulation > 1 else 0  # gradients of earlier micro-batches
    blocks = len(config.layers)
    # The root and the first block gathered, whose gradients are the last ones to be reduced.
    peak: float = size * (root + head + 2 * block) + (summed or size * (blocks - 1) * block / ranks) + apart * size
    if stage == 0:
        peak = (count + apart) * size
    elif stage == 1 and accumulation > 1:  # all gathered, nothing reduced
        peak = (2 * count + apart) * size
    elif stage < 3:  # all gathered, when the backward pass leaves the last block
        last = apart if accumulation > 1 else apart / blocks
        peak = max(peak, size * (count + head + block + last) + summed)
    held = count / share + apart
    update = held * (4 if own else size) + (count * size if stage == 0 and own else 0)
    start, backward = held * (size + own), kept + held * size
    return RankBytes(start=start, backward=backward, peak=max(kept + peak, kept + update))


def held_share(config: ModelConfig, *, ranks: int, experts: int = 1) -> float:
    """Share of all weights that one of `ranks` ranks has: of experts that ranks divide those that are its own."""
    if experts == 1:
        return 1 / ranks
    apart = expert_weights(config) / parameters(config).total
    return (1 - apart) / ranks + apart / experts


def gathered_weights(config: ModelConfig, experts: int = 1) -> float:
    """Number of weights that stage 3 gathers at once of those it does not train: the root's and two blocks'."""
    _, root, block, _ = _parts(config, experts)
    return root + 2 * block


def sent_bytes(
    config: ModelConfig,
    *,
    stage: int,
    ranks: int,
    accumulation: int = 1,
    itemsize: int = 4,
    replicas: int = 1,
    experts: int = 1,
) -> float:
    """Bytes that a rank sends in a step, with ring collectives. itemsize: bytes of a weight or gradient when sent.

    DDP: one all-reduce, two volumes. Stage 1: one all-gather and one reduce-scatter. 2: one of each for every
    micro-batch. 3: as 2, and the blocks, but not the root, are gathered a second time. ranks: that share one model;
    with `replicas` each reduce-scatter is followed by an all-reduce of the shards. experts: ranks that divide the
    experts, whose gradients one all-reduce averages over those that have the same ones (`exchanged_bytes`: tokens).
    """
    count, root, _, _ = _parts(config, experts)
    apart = expert_weights(config) / experts if experts > 1 else 0
    same = 2 * itemsize * apart * (ranks - experts) / ranks
    micro = accumulation if stage > 1 else 1
    volumes = (2 * count + (count - root if stage == 3 else 0)) * (ranks - 1) / ranks
    return micro * itemsize * (volumes + 2 * count / ranks * (replicas - 1) / replicas) + same


def exchanged_bytes(
    config: ModelConfig, *, tokens: int, experts: int, itemsize: int, recomputed: bool = False
) -> float:
    """Bytes that a rank sends with `tokens` tokens of its own in a step, to the `experts` ranks that divide experts.

    Every layer with experts sends its inputs there and results back, gradients of both, and when its activations are
    recomputed both a second time. Supposes that all experts are chosen equally often. itemsize: bytes of a number.
    """
    layers = sum(layer.experts for layer in config.layers)
    each = config.experts_per_token * config.expert_width * itemsize * (experts - 1) / experts
    return tokens * layers * each * (6 if recomputed else 4)


def _parts(config: ModelConfig, experts: int = 1) -> tuple[int, int, float, int]:
    """Numbers of weights: all; outside the blocks; in a block; in a head that is not tied.

    Without those in experts, if several ranks divide them. A tied head's gradient is a temporary of autograd until it
    is added to the embedding's, and is not counted.
    """
    count, rest = parameters(config), parameters(replace(config, layers=()))
    root = rest.total + count.table
    total = count.total - (expert_weights(config) if experts > 1 else 0)
    return total, root, (total - root) / len(config.layers), count.head
