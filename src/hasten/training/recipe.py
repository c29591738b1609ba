"""A recipe: everything that decides a training run, as one frozen dataclass. Importing this does not import torch.

Every field can be overridden on the command line (`hasten train demo --optimizer.learning-rate 1e-3`); the text below a
field is its help there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Annotated, Any, Literal

from tyro.conf import arg

from hasten.checks import ABOVE_0, AT_LEAST_0, BELOW_1, SHARE, SHARE_ABOVE_0, mistakes
from hasten.effects import ON_CPU, ON_CUDA, Holds, Needs, Neutral, Unless, ignored, options_of
from hasten.errors import ConfigError
from hasten.machine.threads import Threads
from hasten.training.conditions import (
    DROPPED,
    FALLING,
    KEPT_BY_RECIPES,
    LLAMA,
    MUON,
    ONEBIT,
    ROUNDED,
    SCRATCH,
    SHARED,
    TOKENIZER_TRAINED,
    VALIDATED,
    WITH_LORA,
    WSD,
)
from hasten.training.recipe_checks import wrong_together

PrecisionName = Literal["auto", "float32", "bfloat16", "float16"]
ScheduleName = Literal["cosine", "wsd", "constant"]
OptimizerName = Literal["adamw", "lamb", "muon", "onebit-adam", "onebit-lamb"]
CheckpointingName = Literal["none", "selective", "full", "offload"]
OffloadName = Literal["none", "optimizer", "all"]
PolicyName = Literal["float32-weights", "float32-masters"]

TEXT_SOURCES, TEXT_FILES = ("stdlib", "packages"), (".txt", ".py", ".md")  # without fields, as hasten.data reads them

# Fields that change nothing that is computed: a run may be continued with other values of them.
FREE_FIELDS = frozenset(
    {"run.folder", "run.checkpoint_every", "run.tensorboard", "run.threads", "data.workers", "run.export", "run.fit"}
    | {"run.export_dtype"}
    | {"run.background_checkpoints", "parallel.zero", "parallel.offload", "parallel.replicas", "parallel.prefetch"}
    | {"parallel.tensor"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model's shape, where it is trained from scratch; with `init` the folder's own shape counts."""

    family: Annotated[Literal["llama", "gpt2"], SCRATCH] = "llama"
    """llama: RMSNorm, rotary positions, gated SiLU, no biases; gpt2: LayerNorm, learned positions, GELU, biases."""
    layers: Annotated[int, ABOVE_0, SCRATCH] = 12
    """Decoder blocks."""
    hidden_size: Annotated[int, ABOVE_0, SCRATCH] = 768
    """Width of the residual stream."""
    heads: Annotated[int, ABOVE_0, SCRATCH] = 12
    """Query heads."""
    kv_heads: Annotated[int | None, ABOVE_0, SCRATCH, LLAMA] = None
    """Key/value heads: fewer than heads is grouped-query attention, 1 multi-query (none: as many as heads; llama)."""
    feed_forward: Annotated[int | None, ABOVE_0, SCRATCH] = None
    """Width inside the MLP (none: 4 x hidden size for gpt2, about 8/3 of it in steps of 64 for llama)."""
    tie_embeddings: Annotated[bool, SCRATCH] = True
    """One matrix for embedding and head."""
    rope_theta: Annotated[float, ABOVE_0, SCRATCH, LLAMA] = 10_000.0
    """Base of the rotary frequencies (llama)."""
    max_positions: Annotated[int | None, ABOVE_0, SCRATCH] = None
    """Longest context the model declares (none: the training context)."""
    attention_pattern: str | None = None
    """Sparse attention, for example bigbird, local:radius=4 or bigbird:window=5,random-blocks=2 (none: dense, or with
    --init as the folder has it). A pretrained model takes it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Where the text comes from, and how it is cut into batches."""

    source: str = "stdlib"
    """stdlib (this Python's own library), packages (all installed), a file, a folder, a glob, or hf:owner/name."""
    tokenizer: str | None = None
    """A folder with a tokenizer (none: one is trained on the text, or with --init the folder's)."""
    tokenizer_kind: Annotated[Literal["bpe", "character"], SCRATCH, TOKENIZER_TRAINED] = "bpe"
    """Which kind is trained where no folder is given."""
    vocab_size: Annotated[int, ABOVE_0, SCRATCH, TOKENIZER_TRAINED, Needs("data.tokenizer_kind", "bpe")] = 4096
    """Tokens of a trained BPE tokenizer, at most."""
    validation_fraction: Annotated[float, BELOW_1] = 0.05
    """Share of the documents that is held out (0: no validation)."""
    text_field: Annotated[
        str, Holds("data.has_fields", "with a source of plain text; give --data.source FILE.jsonl or another one")
    ] = "text"
    """The field of .jsonl and .parquet rows that holds the text."""
    limit_bytes: Annotated[int | None, ABOVE_0] = None
    """Maximum bytes of text; only the first documents are taken."""
    context: Annotated[int, ABOVE_0] = 256
    """Tokens in a row of a batch (T)."""
    fit_context: bool = False
    """Shorten rows to what the longest conversation needs, at most to the context."""
    batch_size: Annotated[int, ABOVE_0] = 8
    """Rows in a micro-batch (B): what is in memory at once."""
    accumulation: Annotated[int, ABOVE_0] = 1
    """Micro-batches whose gradients make one step."""
    separate_documents: bool = False
    """Attention stays inside a document where several are packed into one row."""
    workers: Annotated[int, AT_LEAST_0] = 0
    """Threads that prepare batches ahead (0: made when they are needed)."""

    @property
    def has_fields(self) -> bool:
        """Whether the source's name leaves it possible that it holds records with fields."""
        return self.source not in TEXT_SOURCES and not self.source.lower().endswith(TEXT_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """How the weights are updated."""

    kind: OptimizerName = "adamw"
    """adamw (arXiv 1711.05101), lamb (arXiv 1904.00962), muon for the blocks' matrices and adamw for the rest; for
    several processes onebit-adam (arXiv 2102.02888) and onebit-lamb (arXiv 2104.06069)."""
    learning_rate: Annotated[float, ABOVE_0] = 6e-4
    """Peak of the schedule."""
    beta1: Annotated[float, BELOW_1] = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Annotated[float, BELOW_1] = 0.95
    """Decay of the running mean of its square."""
    epsilon: Annotated[float, ABOVE_0] = 1e-8
    """Added to the root of the running square."""
    weight_decay: Annotated[float, AT_LEAST_0] = 0.1
    """On matrices only: parameters with two dimensions or more."""
    momentum: Annotated[float, BELOW_1, MUON] = 0.95
    """Momentum of muon's matrices."""
    groups: tuple[str, ...] = ()
    """Exceptions by name, the first that matches counts: PATTERN:rate=0.1,decay=0 (rate: times the learning rate)."""
    clip: Annotated[float | None, ABOVE_0] = 1.0
    """Largest norm of the gradient (none: not clipped, still reported); after a one-bit warm-up, of each process's."""
    freeze_after: Annotated[int | None, ABOVE_0, ONEBIT] = None
    """Steps of a one-bit optimizer's warm-up (none: until the variance is steady, 2/(1-beta2) steps at least)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the steps: linear warm-up, then as `kind` says."""

    kind: ScheduleName = "cosine"
    """cosine (arXiv 1608.03983), wsd (warm-up, stable, linear decay; arXiv 2404.06395) or constant."""
    warmup_steps: Annotated[int, AT_LEAST_0] = 100
    """Steps in which the rate rises to its peak."""
    warmup_share: Annotated[float, SHARE_ABOVE_0, Needs("schedule.warmup_steps")] = 1.0
    """The largest share of a run's steps that the warm-up takes, where their number is known from the start."""
    final_fraction: Annotated[float, SHARE, Needs("schedule.kind", "cosine", "wsd")] = 0.1
    """The last step's rate, as a share of the peak (cosine and wsd)."""
    decay_fraction: Annotated[float, SHARE, WSD] = 0.2
    """The share of all steps in which wsd decays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    """What makes it fast, in the order it is applied."""

    pad_vocabulary_to: Annotated[int, ABOVE_0, Unless("lora.rank")] = 64
    """Round the rows of embedding and head up to a multiple of this; an exported model has them cut off (1: do not)."""
    precision: Annotated[PrecisionName, arg(aliases=["--dtype"])] = "auto"
    """Dtype of matrix products; weights and loss stay float32. auto: bfloat16 where it is fast here, else float32."""
    attention: str | None = None
    """Force an attention kernel, for example reference or sdpa (none: the fastest that fits)."""
    fused_activation: Annotated[bool, ON_CPU] = True
    """On a CPU, bias and GELU (or SiLU and gate) in one native pass, forward and backward."""
    joined_projections: Annotated[bool, ON_CPU] = True
    """On a CPU, one product for queries, keys and values."""
    loss: str | None = None
    """Force a loss kernel: torch, chunked or reference (none: the first that fits; no full logits in memory)."""
    layer_drop: Annotated[float | None, SHARE_ABOVE_0] = None
    """Progressive layer dropping: how often the deepest block is kept in the end, 0.5 in the paper (none: always)."""
    layer_drop_decay: Annotated[float, ABOVE_0, DROPPED] = 100.0
    """How fast dropping sets in: the exponent over the whole run."""
    checkpointing: CheckpointingName = "none"
    """Activations computed again in the backward pass: what costs little time (selective), all of a block (full), or
    all, with the blocks' inputs on the host (offload)."""
    compile: bool = True
    """torch.compile, block by block; on CUDA only where the model cannot be one function."""
    whole_model: Annotated[bool, ON_CUDA, Neutral(False)] = True
    """On CUDA, forward pass and loss as one function: fused norms and activations, joined projections."""
    compile_whole: Annotated[bool, ON_CUDA, Needs("techniques.whole_model"), Needs("techniques.compile")] = False
    """Compile that function as one graph too: minutes of compiling before the first step, for no gain seen so far."""
    capture: Annotated[bool, ON_CUDA, Needs("techniques.whole_model"), Neutral(False)] = True
    """On CUDA, the whole step as CUDA graphs where its shapes are fixed; nothing in it waits for the host."""
    fp8: bool = False
    """On CUDA, products of blocks and head in FP8, but for the gradient of the head's weight (Ada and later)."""
    fused_optimizer: bool = True
    """Update many tensors with one kernel."""
    keep_memory: Annotated[bool, ON_CPU, Neutral(False)] = True
    """On the CPU, keep freed memory in the process instead of mapping it again in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Finetune with LoRA: the model stays as it is, narrow matrices beside its layers are trained (docs/lora.md)."""

    rank: Annotated[int | None, ABOVE_0] = None
    """Rows of A and columns of B in each adapted layer, for example 16 (none: all weights are trained)."""
    alpha: Annotated[float | None, ABOVE_0, WITH_LORA] = None
    """What is added is scaled by alpha/rank (none: twice the rank)."""
    targets: Annotated[tuple[str, ...], WITH_LORA] = ("all-linear",)
    """The adapted layers, by the names that the checkpoint gives them (q_proj,v_proj); all-linear: all in blocks."""
    dropout: Annotated[float, BELOW_1, WITH_LORA] = 0.0
    """Probability of dropping an input of A while training."""
    rslora: Annotated[bool, WITH_LORA] = False
    """Scale by alpha/sqrt(rank) (arXiv 2312.03732)."""
    base: Annotated[Literal["auto", "float32", "bfloat16", "float16"], WITH_LORA] = "auto"
    """How the frozen weights are held; auto as the folder has them, quantized layers always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qat:
    """Quantization-aware training: the weights are multiplied as they will be stored."""

    bits: Literal[8, 4, 3, 2] | None = None
    """Bits of the blocks' weights, in training and in the exported folder (none: not rounded)."""
    group_size: Annotated[Literal[32, 64, 128, 0], ROUNDED, Unless("qat.bits", 8)] = 32
    """Weights with one scale (0: a row, as 8 bits always have)."""
    init: Annotated[str | None, ROUNDED] = None
    """Begin with the integers and scales of this folder, which `hasten quantize` made of --init in the same bits and
    groups, say by gptq (none: with rounding to nearest)."""
    head: Annotated[Literal["none", "int8", "same"], ROUNDED] = "none"
    """How the head is stored (none: as it is; transformers reads no quantized head that is one with the embedding)."""
    activations: Annotated[Literal["int8", "float"], ROUNDED, Unless("qat.bits", 3)] = "int8"
    """int8 also rounds what comes into a layer if the kernel that will serve it does: not that of 3 bits (plain)."""
    learned_scales: Annotated[bool, ROUNDED] = True
    """Train the scales (LSQ); else they follow the largest weight of their group."""
    start_bits: Annotated[int | None, ROUNDED] = None
    """Bits to begin with; one less after period, 2 period, 4 period, … steps (MoQ; none: at once)."""
    period: Annotated[int, ABOVE_0, ROUNDED, FALLING] = 100
    """Steps to the first bit less."""
    mixing_steps: Annotated[int, AT_LEAST_0, ROUNDED, FALLING] = 0
    """Steps after each bit less in which the exact weights fade out."""
    eigenvalue_steps: Annotated[int, AT_LEAST_0, ROUNDED, FALLING] = 0
    """Stretch each block's periods by the curvature of the loss in it, found in this many steps (0: do not)."""
    stochastic: Annotated[bool, ROUNDED] = False
    """Round up or down with the chance that keeps the mean (without learned scales)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """What several processes share (torchrun, or --processes), and where it is kept. Nothing here changes the loss."""

    zero: Literal[0, 1, 2, 3] = 0
    """0: everything on every process (DDP). ZeRO 1-3: shares of weights, gradients and states (FSDP2)."""
    tensor: Annotated[int, ABOVE_0, SHARED] = 1
    """Neighbouring processes that split every block and every row of tokens (tensor and sequence parallelism)."""
    replicas: Annotated[int, ABOVE_0, SHARED] = 1
    """Groups of processes that each hold the whole model in shards (HSDP); for several machines."""
    offload: OffloadName = "none"
    """On the host: nothing, the optimizer (its weights, states and step), or all that no block is using (zero 1-3)."""
    policy: PolicyName = "float32-weights"
    """float32 weights under autocast, or weights and gradients in 16 bits with float32 masters in the optimizer."""
    prefetch: Annotated[int, AT_LEAST_0, SHARED] = 0
    """Blocks whose weights are gathered ahead of the one that runs (zero 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How long, where, and what is written. The run ends at the first of steps, epochs and minutes."""

    steps: Annotated[int | None, ABOVE_0, arg(aliases=["--steps"])] = None
    """Optimizer steps."""
    epochs: Annotated[float | None, ABOVE_0] = None
    """Passes over the training split."""
    minutes: Annotated[float | None, ABOVE_0, arg(aliases=["--minutes"])] = None
    """About how long training lasts: the speed of the first steps decides their number, lowered if they get slower."""
    folder: str = "runs"
    """Where runs/NAME is made."""
    validate_every: Annotated[int, ABOVE_0, VALIDATED] = 200
    """Steps from one measurement of the validation loss to the next."""
    validation_batches: Annotated[int, ABOVE_0, VALIDATED] = 20
    """Batches it is measured on, always the same ones."""
    checkpoint_every: Annotated[int, ABOVE_0] = 200
    """Steps from one checkpoint to the next; one is also written with every validation and at the end."""
    background_checkpoints: bool = False
    """Write checkpoints while training goes on, from one copy in memory."""
    export: Annotated[Literal["best", "last"], VALIDATED, Unless("qat.start_bits")] = "best"
    """Which weights become runs/NAME/model: those with the best validation loss, or the last ones."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights in runs/NAME/model (auto: bfloat16 if it trained in bfloat16, else float32), or of an
    adapter's (auto: float32)."""
    device: Annotated[str, arg(aliases=["--device"])] = "auto"
    """auto, cpu, cuda or cuda:<index>."""
    threads: Annotated[Threads | None, arg(aliases=["--threads"])] = None
    """CPU threads (auto or none: one for each physical core that this process may use)."""
    seed: Annotated[int, arg(aliases=["--seed"])] = 0
    """Decides weights, order of the data, and dropout."""
    fit: Annotated[bool, arg(aliases=["--fit"])] = False
    """Cut a step's rows into as few micro-batches as fit the memory; a run that goes on keeps what it began with."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the package tensorboard)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides a training run."""

    name: str
    """Name of the run: its folder is runs/NAME."""
    init: str | None = None
    """Finetune: a model folder, GGUF file or hub id to start from (none: random weights of the shape under `model`)."""
    teacher: str | None = None
    """Distill: learn this model's probabilities (folder or hub id, same tokens) instead of the text's next tokens."""
    dropout: Annotated[float, BELOW_1] = 0.0
    """Probability of dropping an activation while training."""
    model: Shape = field(default_factory=Shape)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    techniques: Techniques = field(default_factory=Techniques)
    lora: Lora = field(default_factory=Lora)
    qat: Qat = field(default_factory=Qat)
    parallel: Parallel = field(default_factory=Parallel)
    run: Run = field(default_factory=Run)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, nested."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # which has lists for tuples
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Recipe":
        """The recipe that `to_json` wrote. Raises ConfigError for a field that does not exist or a wrong value."""
        sections: dict[str, Any] = {one.name: one.type for one in fields(cls) if is_dataclass(one.type)}
        if not isinstance(values, Mapping):
            raise ConfigError(f"a recipe is an object with fields; found {values!r:.60}")
        try:
            if values.get("diloco", {}).get("sync_every", 0) is None:  # an earlier version's, switched off
                values = {name: value for name, value in values.items() if name != "diloco"}
            return cls(**{name: _made(sections[name], v) if name in sections else v for name, v in values.items()})
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"this is not a recipe of this version of hasten: {error}") from None

    def check(self) -> None:
        """Raise ConfigError for values that cannot work, naming the field, before anything is read or allocated."""
        values, usual = flat(self), flat(Recipe(name=self.name))
        changed = [path for path in options_of(Recipe) if values[path] != usual[path]]
        unused = ignored(self, changed, counts=lambda condition: condition in KEPT_BY_RECIPES)
        for wrong in chain(mistakes(self), unused, wrong_together(self)):
            raise ConfigError(f"recipe {self.name!r}: {wrong}")


def _made(section: Any, values: Mapping[str, Any]) -> Any:
    """A section of its JSON values, which has lists for tuples."""
    return section(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def flat(recipe: Recipe) -> dict[str, Any]:
    """The fields by dotted name, as on the command line ("optimizer.learning_rate")."""
    values: dict[str, Any] = {}
    for name, value in recipe.to_json().items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


def differences(old: Recipe, new: Recipe) -> list[str]:
    """What differs between two recipes in a way that changes the run, as lines "field: old -> new".

    A run goes on in the precision that it began with (`auto` is no difference), in the micro-batches (`fit`), and with
    the context that follows from the data.
    """
    before, after = flat(old), flat(new)
    kept = ["techniques.precision"] if new.techniques.precision == "auto" else []
    kept += ["data.context"] if old.data.fit_context and new.data.fit_context else []
    if new.run.fit and old.data.batch_size * old.data.accumulation == new.data.batch_size * new.data.accumulation:
        kept += ["data.batch_size", "data.accumulation"]
    after |= {name: before[name] for name in kept}
    return [f"{n}: {before[n]} -> {after[n]}" for n in after if n not in FREE_FIELDS and before[n] != after[n]]
