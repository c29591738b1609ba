"""Plans: the memory and time that a use of a model takes on a device, from bytes, FLOPs and a roofline.

A phase takes as long as its products or its memory traffic, whichever is longer (Williams et al. 2009, "Roofline"),
plus the exchanges with other devices.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hasten.model.config import ModelConfig
from hasten.planning import cost
from hasten.planning.devices import HOST_LINK, HOST_MEMORY, REACHED, Device
from hasten.planning.largest import largest
from hasten.planning.memory import ITEMSIZE, InferenceUse, Memory, TrainingUse, memory_of
from hasten.planning.sharing import exchanged_bytes, held_share, sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One device's part of a training "step", of the "prompt" of every sequence, or of a "token" of every sequence.

    tokens: of all sequences. flops: of matrix products, recomputed ones included. update_flops: of the optimizer's own
    products (Muon), float32 on a CPU, else bfloat16. moved: bytes from and to memory. sent: bytes that each of the
    `ranks` sends, in `exchanges` exchanges. host: seconds for what is offloaded, while the device waits. integers:
    products run at the rate of int8, if that is known. measured: seconds without exchanges; None: expect the share of
    the limit in REACHED.
    """

    name: str
    tokens: int
    flops: float
    moved: float
    dtype: str
    update_flops: float = 0.0
    integers: bool = False
    sent: float = 0.0
    exchanges: int = 0
    ranks: int = 1
    host: float = 0.0
    measured: float | None = None

    def limits(self, device: Device) -> dict[str, float]:
        """Least seconds for the products, the memory traffic and the link."""
        rate = device.limits.rates.get("int8", 0) if self.integers else 0
        update = 0.0
        if self.update_flops:  # only then must that rate be known
            update = self.update_flops / device.rate("float32" if device.kind == "cpu" else "bfloat16")
        return {
            "products": self.flops / (rate or device.rate(self.dtype)) + update,
            "memory": self.moved / device.limits.bandwidth,
            "link": device.link.seconds(exchanges=self.exchanges, received=self.sent, ranks=self.ranks),
            "host": self.host,
        }

    def limit(self, device: Device) -> float:
        """Least seconds of the phase."""
        found = self.limits(device)
        return max(found["products"], found["memory"]) + found["link"] + found["host"]

    def seconds(self, device: Device) -> float:
        """Expected seconds: as measured, or by the usual share of the limit, plus the exchanges."""
        found = self.limits(device)
        if self.measured is not None:
            return self.measured + found["link"] + found["host"]
        reached = REACHED[device.kind][self.name]
        return max(found["products"], found["memory"]) / reached + found["link"] + found["host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A use of a model on a device, with its phases.

    free: available bytes of the device's memory. settings: further settings to show to people.
    """

    model: str
    config: ModelConfig
    use: TrainingUse | InferenceUse
    device: Device
    free: int
    phases: tuple[Phase, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def memory(self) -> Memory:
        """Bytes by part."""
        return memory_of(self.config, self.use)

    @property
    def largest_batch(self) -> int:
        """Largest number of rows (training) or sequences that fits, all else unchanged; 0 if not even one does."""
        return largest(lambda count: self._fits(batch_size=count))

    @property
    def longest(self) -> int:
        """Largest number of tokens in a row (training) or sequence that fits, all else unchanged."""
        return largest(lambda count: self._fits(length=count), most=self.config.max_positions)

    def _fits(self, **changes: int) -> bool:
        return memory_of(self.config, replace(self.use, **changes)).peak <= self.free  # type: ignore[arg-type]

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained by all ranks a second; or generated ones, prompts' time included, at a constant batch."""
        first, *more = (phase.seconds(self.device) for phase in self.phases)
        if isinstance(self.use, TrainingUse):
            return self.use.ranks * self.use.replicas // self.use.tensor * self.phases[0].tokens / first
        return self.use.batch_size * self.use.new_tokens / (first + self.use.new_tokens * more[0])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: bytes, FLOPs, seconds."""
        times = [
            {"limits": one.limits(self.device), "limit_seconds": one.limit(self.device)}
            | {"seconds": one.seconds(self.device)}
            for one in self.phases
        ]
        return {
            "schema": 1,
            "model": self.model,
            "settings": dict(self.settings),
            "device": asdict(self.device),
            "free_bytes": self.free,
            "parts": dict(self.memory.parts),
            "moments": dict(self.memory.moments),
            "peak_bytes": self.memory.peak,
            "fits": self.memory.peak <= self.free,
            "phases": [asdict(one) | more for one, more in zip(self.phases, times, strict=True)],
            "tokens_per_second": self.tokens_per_second,
            "largest_batch": self.largest_batch,
            "longest": self.longest,
        }


def training_phase(config: ModelConfig, use: TrainingUse, *, kept: float = 1.0) -> Phase:
    """The training step of one rank; `tokens` counts all tokens of the rows that its neighbours split.

    kept: mean share of the blocks that run, under layer dropping.
    """
    tokens, layers = use.batch_size * use.length * use.accumulation, len(config.layers)
    around = cost.training_flops_per_token(replace(config, layers=()), use.length)
    blocks = kept * (cost.training_flops_per_token(config, use.length) - around)
    again, recomputed = blocks / 3 if use.recompute in ("full", "offload") else 0, use.recompute != "none"
    frozen = (blocks + around) / 3 if use.adapter is not None else 0  # weights that get no gradient
    parts, count = memory_of(config, use).parts, cost.parameters(config).total
    every = memory_of(config, replace(use, recompute="none")).parts  # what is recomputed is written and read, too
    activations = sum(size for name, size in every.items() if name.startswith(("activations", "logits")))
    states = sum(parts[name] for name in ("gradients", "masters", "optimizer"))
    # A micro-batch writes and reads its activations, and reads all weights twice; the update reads and writes states.
    weights = int(ITEMSIZE[use.dtype] * count * held_share(config, ranks=1, experts=use.experts)) // use.tensor
    moved = use.accumulation * (2 * activations + 2 * weights + parts["gradients"]) + 2 * states
    itemsize = 2 if use.masters else 4
    shards, split = use.ranks // use.tensor, use.tensor
    sent = sent_bytes(
        config,
        stage=use.zero,
        ranks=shards,
        accumulation=use.accumulation,
        itemsize=itemsize,
        replicas=use.replicas,
        experts=use.experts,
    )
    sent /= split
    if use.adapter is not None:  # of frozen weights no gradients are sent, and at stage 3 the weights themselves
        divided = count - (cost.expert_weights(config) if use.experts > 1 else 0)  # of all weights, those that travel
        sent *= use.adapter / divided
        if use.zero == 3:
            root = cost.parameters(replace(config, layers=())).total / divided
            sent += use.accumulation * use.base * divided / count * (2 - root) * (shards - 1) / shards
    # Before attention and MLP of a split block a rank gathers the others' normalized tokens, and afterwards reduces the
    # products' results; the backward pass does the same, and so does recomputation. So do embedding and head.
    passes = 3 if again else 2
    each = passes * layers * 2 * (itemsize + ITEMSIZE[use.dtype]) + 4 * itemsize
    sent += each * (split - 1) / split * tokens * config.hidden_size
    if use.experts > 1:
        size = ITEMSIZE[use.dtype]
        sent += exchanged_bytes(config, tokens=tokens, experts=use.experts, itemsize=size, recomputed=recomputed)
    update = cost.muon_flops(config) if use.optimizer == "muon" and use.adapter is None else 0.0
    if update and use.zero:  # every rank gathers the momentum of whole matrices
        inside = sum(cost.matrices(config, layer)[0] for layer in config.layers)
        inside -= cost.expert_weights(config) if use.experts > 1 else 0
        sent += 4 * inside * (use.ranks - 1) / use.ranks
    trained = count if use.adapter is None else use.adapter
    # Weights that a rank's optimizer updates.
    experts = use.experts if use.adapter is None else 1  # which have no adapters
    own = trained * held_share(config, ranks=use.ranks if use.zero else split, experts=experts)
    # Gradients go to the host and weights come back; AdamW there reads four numbers of each weight and writes three.
    host = 2 * itemsize * own / HOST_LINK + 28 * own * use.ranks * use.replicas / HOST_MEMORY
    exchanges = 2 * layers * (shards * use.replicas > 1) + 4 * (passes * layers + 1) * (split > 1)
    exchanges += 2 * (3 if recomputed else 2) * sum(layer.experts for layer in config.layers) * (use.experts > 1)
    return Phase(
        name="step",
        tokens=tokens,
        flops=tokens * (blocks + around + again - frozen) / split,
        update_flops=update,
        moved=moved,
        dtype=use.dtype,
        sent=sent,
        exchanges=use.accumulation * exchanges,
        ranks=max(shards, split, use.replicas),
        host=host if use.offload else 0.0,
    )


def inference_phases(config: ModelConfig, use: InferenceUse) -> tuple[Phase, Phase]:
    """The phases "prompt", of all sequences, and "token", one for each sequence in the middle of its answer."""
    degree, together, prompt = use.degree, use.batch_size, use.length - use.new_tokens
    row, context = use.row_bytes / config.head_dim, use.length - use.new_tokens // 2
    tokens, steps = together * prompt, -(-together * prompt // use.step)
    prompt_flops = tokens * cost.forward_flops_per_token(config, prompt, scored=1, cached=True)
    prompt_moved = steps * (use.weights - use.table) + tokens * cost.kv_bytes_per_token(config, row)
    count = cost.parameters(config)
    weight = (use.weights - use.table) / (count.total - count.table)
    read = cost.decode_bytes_per_token(config, weight_bytes=weight, kv_bytes=row, context=context, batch=together)
    flops = cost.forward_flops_per_token(config, 2 * context - 1, cached=True)  # whose mean token sees as many keys

    def phase(name: str, tokens: int, flops: float, moved: float, steps: int) -> Phase:
        # Two all-reduces a block and the embedding's, in which a rank receives the others' tensors; and the logits.
        sums, logits = 2 * len(config.layers) + 1, together * config.padded_vocab_size * 4
        return Phase(
            name=name,
            tokens=tokens,
            flops=flops / degree,
            moved=moved / degree,
            dtype=use.dtype,
            integers=use.integers,
            sent=(degree - 1) * (sums * tokens * config.hidden_size * ITEMSIZE[use.dtype] + logits / degree),
            exchanges=(sums + 1) * steps * (degree > 1),
            ranks=degree,
        )

    return (
        phase("prompt", tokens, prompt_flops, prompt_moved, steps),
        phase("token", together, together * flops, together * read, 1),
    )
