"""Counts the bytes that a use of a model takes, part by part, before any are allocated. Nothing else counts them.

Covers training, generating and serving, and quantizing with calibration text. Counts the tensors that PyTorch and our
kernels keep (as arXiv 2205.05198 does), not the scratch memory of single operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hasten.errors import ResourceError
from hasten.model.config import LayerConfig, ModelConfig
from hasten.planning.cost import (
    expert_weights,
    keeping_layers,
    kept_numbers,
    key_numbers,
    matrices,
    parameters,
    state_bytes,
)
from hasten.planning.sharing import fsdp_bytes, gathered_weights, held_share

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES = 400 << 20  # what a process keeps besides the model: libraries, the compiler's graphs
LARGEST_PREFILL = 4096  # prompt tokens computed in one step
# Memory that the allocator holds unused, as a share of a step's temporary tensors (benchmarks/plan.py measures it): an
# allocator that returns freed blocks; a heap that keeps them; a heap fragmented by gradients, an adapter's factors, or
# the weights that ranks gather and free.
FREED, KEPT, KEPT_BROKEN = 0.05, 0.43, 0.8
KEPT_COMPILED = 0.25  # compiled blocks allocate each buffer once
SCRATCH = 16 << 20  # scratch memory of the native steps, for any model
MUON_STACKS = 112 << 20  # matrices orthogonalized together, and the temporaries of the iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a use of a model.

    parts: bytes by what needs them. moments: the parts that exist at the same time; the largest sum is the peak.
    """

    parts: Mapping[str, int]
    moments: Mapping[str, tuple[str, ...]]

    @property
    def moment(self) -> str:
        """Name of the moment at which memory peaks."""
        return max(self.moments, key=lambda name: sum(self.parts[part] for part in self.moments[name]))

    @property
    def at_peak(self) -> dict[str, int]:
        """Parts that exist at the peak, with their bytes."""
        return {part: self.parts[part] for part in self.moments[self.moment] if self.parts[part]}

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.at_peak.values())

    def beside(self, **more: int) -> "Memory":
        """The same memory with further parts, in bytes, that exist all the time."""
        moments = {name: (*parts, *more) for name, parts in self.moments.items()}
        return Memory(parts={**self.parts, **more}, moments=moments)

    def require(self, what: str, free: int, device: object, *, remedy: str) -> None:
        """Raise ResourceError, with the parts and the remedy, if the peak is more than `free` bytes."""
        if self.peak > free:
            digits = 1 if self.peak >= 1e9 else 2
            counted = {part: size for part, size in self.at_peak.items() if size >= 10**-digits * 5e8}
            listed = ", ".join(f"{size / 1e9:.{digits}f} GB {part}" for part, size in counted.items())
            raise ResourceError(
                f"{what} needs about {self.peak / 1e9:.{digits}f} GB on {device} ({listed}) and "
                f"{free / 1e9:.{digits}f} GB are free; {remedy}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingUse:
    """A training step of one rank: `accumulation` micro-batches of `batch_size` rows of `length` tokens.

    dtype: of the matrix products. masters: weights and gradients have that dtype too, and the optimizer has float32
    masters. joined: one product for queries, keys and values. explicit_attention: score matrices are kept. loss: name
    of its kernel. recompute: none, selective, full, or offload (as full, with the kept inputs on the host). zero: ZeRO
    stage; ranks: processes that share one model; replicas: groups of that size; tensor: neighbours among the ranks that
    split every block and row; experts: those that divide the experts. copies: the optimizer has float32 copies of
    float32 weights. offload: these (or its masters) and its states are on the host, which is another device. adapter:
    number of LoRA weights, the only ones that are trained; base: bytes of the model they adapt, which zero 3 divides.
    rounded: number of weights that are rounded while they train (QAT). keeps_freed: the allocator keeps freed blocks,
    as in training on a CPU.
    """

    batch_size: int
    length: int
    accumulation: int = 1
    dtype: str = "bfloat16"
    masters: bool = False
    optimizer: str = "adamw"
    recompute: str = "none"
    compiled: bool = True
    joined: bool = True
    explicit_attention: bool = False
    loss: str = "chunked"
    zero: int = 0
    ranks: int = 1
    replicas: int = 1
    tensor: int = 1
    experts: int = 1
    copies: bool = False
    offload: bool = False
    adapter: int | None = None
    base: int = 0
    rounded: int = 0
    keeps_freed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceUse:
    """Generation: `batch_size` sequences of `length` tokens, of which `new_tokens` are generated.

    step: tokens computed at once. weights: bytes of all weights. dtype: of the matrix products. integers: products
    multiply integers. row_bytes: bytes of one token's key or value in one head. block_size: tokens in a block of a
    paged cache. degree: devices that share the model (tensor parallelism). table: bytes of per-layer embeddings among
    the weights; mapped: these stay in their file, of which a step reads a few rows. head_states: positions of each
    sequence whose states are kept for a multi-token head that drafts.
    """

    batch_size: int = 1
    length: int
    new_tokens: int = 1
    step: int
    weights: int
    dtype: str = "bfloat16"
    integers: bool = False
    row_bytes: int
    block_size: int = 1
    degree: int = 1
    table: int = 0
    mapped: bool = False
    head_states: int = 0


def memory_of(config: ModelConfig, use: TrainingUse | InferenceUse) -> Memory:
    """Memory that a use of a model takes."""
    return training_memory(config, use) if isinstance(use, TrainingUse) else inference_memory(config, use)


def training_memory(config: ModelConfig, use: TrainingUse) -> Memory:
    """Memory of a training step: in the loss, when all activations are kept, and when the gradients are complete."""
    count, size = parameters(config), ITEMSIZE[use.dtype]
    trained = use.adapter is None
    narrow = size if size < 4 and not (use.masters and trained) else 0  # bytes of a weight's copy beside a float32 one
    parts = _states(config, use) | _activations(config, use, narrow)
    copied = int(count.total * held_share(config, ranks=1, experts=use.experts))
    copied -= count.table + (count.embedding if count.head else 0)  # all but what is only looked up
    if use.zero == 3 and use.recompute != "none":  # of a block that is being recomputed, and the root's
        apart = expert_weights(config) / use.experts if use.experts > 1 else 0
        copied = int(min(copied, gathered_weights(config, use.experts) + 2 * apart / len(config.layers)))
    copied //= use.tensor
    parts[f"weights in {use.dtype}"] = narrow * copied if trained or use.base >= 4 * count.total else 0
    # A weight divided by its scale and the rounded one, both in float32; and the one that is multiplied.
    rounded = (8 + size) * use.rounded // (1 if use.recompute == "none" else len(config.layers))
    parts["weights while rounded"] = int(rounded * held_share(config, ranks=1, experts=use.experts))
    parts["logits and loss"] = _loss(config, use, size, head=trained * count.embedding // use.tensor, narrow=narrow)
    held = ("weights", "masters", "optimizer", "gathered")
    kept = tuple(name for name in parts if name.startswith(("activations", "weights in", "weights while", "logits")))
    early = ("gradients",) if use.accumulation > 1 else ()
    whole = KEPT_COMPILED if use.compiled else KEPT
    divided = ("gathered", "gradients") if use.zero and use.ranks > 1 and use.keeps_freed else ()
    slack = (KEPT_BROKEN if early or divided or not trained else whole) if use.keeps_freed else FREED
    parts["allocator, loss"] = int(slack * sum(parts[name] for name in (*kept, *divided)))
    parts["allocator, update"] = int(slack * (parts["gradients"] + parts["update"]))
    moments = {
        "in the loss": (*held, *early, *kept, "allocator, loss"),
        "in the update": (*held, "gradients", "update", "allocator, update"),
    }
    if use.recompute != "none" and use.keeps_freed:  # float32 gradients find no place in what 16-bit weights had
        late = ("gradients", f"weights in {use.dtype}", "activations computed again")
        parts["allocator, backward"] = int(slack * sum(parts[name] for name in late))
        moments["in the backward pass"] = (*held, *late, "allocator, backward")
    if use.rounded and (use.zero or use.experts > 1):  # each rank begins with all weights, and the first exports them
        parts["whole model"] = 2 * 4 * count.total
        moments["at the export"] = (*held, "whole model")
    elif use.experts > 1 and (not use.zero or (not trained and (use.zero < 3 or use.base < 2 * count.total))):
        parts["whole model"] = 4 * count.total if trained else use.base  # before ranks divide its experts
        moments["at the start"] = ("whole model",)
    return Memory(parts=parts, moments=moments)


def _states(config: ModelConfig, use: TrainingUse) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer: 2 + 2 + 12 a weight with masters, else 4 + 4 + 8 (AdamW)."""
    count = parameters(config).total if use.adapter is None else use.adapter
    size = ITEMSIZE[use.dtype] if use.masters else 4
    own = 4 if use.masters or use.copies else 0
    states = 8 * count
    if use.optimizer == "muon" and use.adapter is None:  # one mean of a matrix, not two
        states -= 4 * sum(matrices(config, layer)[0] for layer in config.layers)
    if use.optimizer.startswith("onebit"):
        states += 4 * count + 4 * count // use.ranks  # compression errors of the own tensor and of the own piece

    # A rank's share of what is trained, without ZeRO and with it. Experts have no adapters.
    experts = use.experts if use.adapter is None else 1
    whole, shard = (held_share(config, ranks=ranks, experts=experts) for ranks in (1, use.ranks))
    parts = {"weights": size * count, "gradients": size * count, "masters": own * count, "optimizer": states}
    parts = {name: int(size * (shard if use.zero else whole)) for name, size in parts.items()}
    parts |= {"gathered": 0, "update": 0}
    if use.zero and use.ranks > 1:
        shared = fsdp_bytes(
            config,
            stage=use.zero,
            ranks=use.ranks,
            accumulation=use.accumulation,
            masters=use.masters,
            copies=use.copies,
            experts=use.experts,
        )
        parts["gathered"] = max(0, int(shared.peak) - sum(parts.values()) + parts["gradients"]) // use.tensor
        if use.adapter is not None:
            parts["gathered"] = size * count
            if use.zero == 3:  # the root and two blocks are gathered
                part = gathered_weights(config, use.experts) / parameters(config).total
                parts["gathered"] += int(use.base * part)
    elif use.optimizer.endswith("lamb"):
        parts["update"] = int(12 * count * whole)  # steps and their divisors, of all tensors of a group at once
    elif use.optimizer == "muon":
        parts["update"] = MUON_STACKS
    of_base = held_share(config, ranks=use.ranks if use.zero == 3 else 1, experts=use.experts)
    parts["weights"] += int(use.base * of_base)
    if use.masters and not use.offload and not parts["gathered"]:
        # The masters' gradients are float32. A heap that keeps freed blocks has no place for them in those of 16 bits.
        parts["update"] += int((4 if use.keeps_freed else 2) * count * whole)
    if use.offload:
        parts |= {"masters": 0, "optimizer": 0}
    return parts


def _activations(config: ModelConfig, use: TrainingUse, narrow: int) -> dict[str, int]:
    """Bytes that the forward pass keeps for the backward pass, by the kind of module."""
    size, tokens, layers = ITEMSIZE[use.dtype], use.batch_size * use.length // use.tensor, len(config.layers)
    hidden, q, kv, inner = _widths(config)
    own = 0  # numbers of latents, and of the keys and values before they are put together
    if (sizes := config.latent) is not None:
        q = kv = config.heads * max(sizes.query_dim, sizes.value_dim)
        own = 2 * (sizes.query_rank or 0) + 2 * sizes.kept + config.heads * (sizes.key_dim + sizes.value_dim) + q
    stream = tokens * 4 * hidden
    # Inputs of the matrix products and of attention, for one token and layer: norm, q, k, v, attended; norm, MLP.
    # Tensor-parallel neighbours keep the products' inputs of all tokens.
    attention = size * (hidden * use.tensor + 2 * (q + kv) + own)
    if use.joined and config.ropes:
        attention += size * (q + kv)  # v is a view of the joined result, which is kept beside the rotated q and k
    mlp = size * (hidden * use.tensor + inner * (3 if config.gated else 2))
    norms = [4 * hidden * (1 if config.norm == "layernorm" else 2) * config.norms_of(layer) for layer in config.layers]
    if not use.compiled:
        mlp += narrow * hidden * config.gated  # gate and up have an input each
        mlp += size * inner * (config.gated and config.activation != "silu")  # SiLU and gate are one function
        mlp += inner * (13 if size == 4 else 17) * (config.activation == "xielu")  # in float32, and where x is positive
        mlp += 4 * size * config.expert_width * config.experts_per_token  # in and out of each expert, twice
        attention += 2 * 4 * (q + kv) * (config.qk_norm is not None)
        attention += 2 * size * hidden * (use.adapter is not None)  # q, k and v have an input each
    if use.compiled:  # the compiler recomputes the rest: the residual stream, and the results of the norms
        norms = [size * hidden + 4 * hidden] * layers
    if use.explicit_attention:  # the probabilities
        attention += config.heads * use.length * (4 + narrow)
    state = 4 * _mixer_numbers(config, kept=True)
    mixing = [state if layer.keeps_state else layer.mixes * attention for layer in config.layers]
    mlps = [layer.mlp * mlp for layer in config.layers]
    each = {"attention": mixing, "MLP": mlps, "norms and residual stream": norms}  # of each layer
    kinds = {name: tokens * sum(kept) for name, kept in each.items()}
    again = 0
    if use.recompute != "none":
        block = tokens * max(map(sum, zip(*each.values(), strict=True)))
        first, second = sum(layer.mixes for layer in config.layers), sum(layer.mlp for layer in config.layers)
        kinds = {"norms and residual stream": layers * stream * (use.recompute != "offload")}
        if use.recompute == "selective":
            products = first * (hidden + 2 * (q + kv)) + second * (hidden + inner * (2 if config.gated else 1))
            kinds["products"] = tokens * size * products
        # The last block is recomputed after the logits are freed; in a heap that keeps freed blocks their place is
        # split.
        gone = 0 if use.keeps_freed else _logits(config, use, size) + parameters(config).embedding * (4 + narrow)
        again = max(0, block - sum(kinds.values()) // layers - gone)
    found = {f"activations: {name}": kept for name, kept in kinds.items()}
    found["activations: norms and residual stream"] += 2 * stream  # of the embedding and the last norm
    return found | {"activations computed again": again}


def _mixer_numbers(config: ModelConfig, *, kept: bool) -> int:
    """`MixerConfig.working_numbers`, or 0 where no layer keeps a state."""
    return 0 if config.mixer is None else config.mixer.working_numbers(kept=kept)


def _widths(config: ModelConfig) -> tuple[int, int, int, int]:
    inner = max((_inner(config, layer) for layer in config.layers), default=config.intermediate_size)
    q = max((config.heads * config.head_dim_of(layer) for layer in config.layers), default=config.hidden_size)
    kv = max((key_numbers(config, layer) for layer in config.layers), default=config.hidden_size)
    return config.hidden_size, q, kv, inner


def _inner(config: ModelConfig, layer: LayerConfig) -> int:
    """Inner features that a token passes in a layer; 0: it has no MLP."""
    if not layer.experts:
        return config.inner_of(layer)
    return config.expert_size * config.experts_per_token + config.shared_size


def _loss(config: ModelConfig, use: TrainingUse, size: int, *, head: int, narrow: int) -> int:
    """Bytes of logits, their gradient and that of the `head` weights, in float32 and in the dtype of the products."""
    logits, gradient = _logits(config, use, size), head * (4 + narrow)
    if use.loss != "chunked":
        return logits + gradient
    from hasten.ops.loss import rows_of_a_chunk

    tokens, most = use.batch_size * use.length, rows_of_a_chunk(config.padded_vocab_size)
    if use.keeps_freed:  # the freed float32 logits leave no place for anything larger
        return logits + min(tokens, most) * config.padded_vocab_size * (size if size < 4 else 0) + gradient
    earlier = 4 * head if tokens > most else 0  # the gradient summed over earlier chunks
    read = min(tokens, most) * config.padded_vocab_size * size  # the logits that are left when the product begins
    return max(logits + earlier, read + gradient)


def _logits(config: ModelConfig, use: TrainingUse, size: int) -> int:
    """Bytes of the logits that exist at once, with their gradient."""
    vocab, tokens = config.padded_vocab_size, use.batch_size * use.length
    if use.loss == "torch":  # as many logits at a time as the input has elements
        return 4 * tokens * config.hidden_size
    if use.loss == "reference":  # logits, their logarithms and gradients, in float32
        return 12 * tokens * vocab
    from hasten.ops.loss import TRITON_CHUNK_ELEMENTS, rows_of_a_chunk

    if use.loss == "chunked-triton":  # the gradient overwrites the logits
        return min(tokens, rows_of_a_chunk(vocab, elements=TRITON_CHUNK_ELEMENTS)) * vocab * size
    # The gradient in float32, which is freed before a product reads the one in the dtype of the products.
    return min(tokens, rows_of_a_chunk(vocab)) * vocab * (4 + (size if size < 4 else 0))


def inference_memory(config: ModelConfig, use: InferenceUse) -> Memory:
    """Memory of generating or serving: weights, the cache, and the activations of the largest step.

    Per-layer embeddings that stay in their file are a part that exists at no moment.
    """
    hidden, q, _, inner = _widths(config)
    parts = {
        "weights": (use.weights - use.table) // use.degree,
        "per-layer embeddings": use.table,
        "cache": use.batch_size * cache_bytes(config, use),
        "states for drafts": use.batch_size * use.head_states * hidden * 4,
        "activations": use.step * (6 * hidden + 3 * inner + max(4 * q, _mixer_numbers(config, kept=False))) * 4,
        "logits": 2 * use.batch_size * config.padded_vocab_size * 4,
        "kernels' scratch": SCRATCH,
    }
    held = tuple(name for name in parts if name != "per-layer embeddings" or not use.mapped)
    return Memory(parts=parts, moments={"in a step": held})


def cache_bytes(config: ModelConfig, use: InferenceUse) -> int:
    """Bytes of one sequence's keys and values in all layers, in whole blocks of a paged cache, and of layers' states.

    A model whose every layer has a window or a local pattern keeps no more than its reach.
    """
    kept = use.length
    if config.reach is not None:
        kept = min(kept, config.reach + (use.step if use.block_size > 1 else config.reach))
    tokens = -(-kept // use.block_size) * use.block_size
    rows = (
        kept_numbers(config, layer) / config.kv_heads_of(layer) * max(1, config.kv_heads_of(layer) // use.degree)
        for layer in keeping_layers(config)
    )
    return int(sum(rows) / config.head_dim * use.row_bytes * tokens) + state_bytes(config, ITEMSIZE[use.dtype])


def calibration_memory(
    config: ModelConfig,
    *,
    states: int,
    walks: int,
    step: int,
    squares: float,
    spill: bool,
    moved: bool = False,
) -> Memory:
    """Memory of quantizing with calibration text, beside the checkpoint, whose pages are mapped.

    states: bytes of all samples' hidden states, kept for each of `walks` passes through the model. spill: they are on
    the disk instead. step: bytes of one number for each token of the passes at work. squares: number of float32
    matrices, squares of the widest input. moved: each block is copied to a device, in 16 bits.
    """
    block = max(matrices(config, layer)[0] for layer in config.layers)
    experts = max(config.expert_size, config.shared_size)
    inner = max(experts if layer.experts else config.inner_of(layer) for layer in config.layers)
    q = _widths(config)[1]
    widest = max(config.hidden_size, q, inner, config.state_mixer.values if config.keeps_states else 0)
    lent = sum(2 * config.kv_heads_of(layer) * config.head_dim_of(layer) for layer in config.layers if layer.lends_keys)
    chosen = config.experts_per_token * max(layer.experts for layer in config.layers)
    parts = {
        "rounded blocks": (4 if moved else 2) * max(block, parameters(config).embedding),
        "sums over the samples": int(4 * squares * widest**2),
        "passes": step * (6 * config.hidden_size + 3 * inner + max(4 * q, _mixer_numbers(config, kept=False))),
        "states": walks * states * ((not spill) + (config.token_features > 0)),  # and the embeddings of the tokens
        "lent keys and values": walks * states * lent // config.hidden_size,
        "inputs of experts": chosen * states,
    }
    return Memory(parts=parts, moments={"in a block": tuple(parts)})
