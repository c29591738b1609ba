"""Recipes: frozen dataclasses with everything that decides a training run. Importing this does not import torch.

Every field is an option on the command line (`hasten train demo --optimizer.learning-rate 1e-3`), and the text below it
is that option's help.
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
StageName = Literal[0, 1, 2, 3]
PolicyName = Literal["float32-weights", "float32-masters"]

TEXT_SOURCES, TEXT_FILES = ("stdlib", "packages"), (".txt", ".py", ".md")  # which have no fields (hasten.data)

# Fields that do not change what is computed: a run may be resumed with other values of them.
FREE_FIELDS = frozenset(
    {
        "data.workers",
        "parallel.experts",
        "parallel.offload",
        "parallel.prefetch",
        "parallel.replicas",
        "parallel.tensor",
        "parallel.zero",
        "run.background_checkpoints",
        "run.checkpoint_every",
        "run.export",
        "run.export_dtype",
        "run.fit",
        "run.folder",
        "run.tensorboard",
        "run.threads",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model trained from scratch; with `init` the folder's own shape is used."""

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
    """Width inside the MLP (none: 4 x hidden size for gpt2, about 8/3 of it, a multiple of 64, for llama)."""
    tie_embeddings: Annotated[bool, SCRATCH] = True
    """Use one matrix for embedding and head."""
    rope_theta: Annotated[float, ABOVE_0, SCRATCH, LLAMA] = 10_000.0
    """Base of the rotary frequencies (llama)."""
    max_positions: Annotated[int | None, ABOVE_0, SCRATCH] = None
    """Longest context that the model declares (none: the training context)."""
    attention_pattern: str | None = None
    """Sparse attention, for example bigbird, local:radius=4 or bigbird:window=5,random-blocks=2 (none: dense, or with
    --init the folder's). Pretrained models support it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The text, and how it is divided into batches."""

    source: str = "stdlib"
    """stdlib (Python's standard library), packages (all installed ones), a file, folder, glob, or hf:owner/name."""
    tokenizer: str | None = None
    """A folder with a tokenizer (none: train one on the text; with --init: the folder's)."""
    tokenizer_kind: Annotated[Literal["bpe", "character"], SCRATCH, TOKENIZER_TRAINED] = "bpe"
    """Kind of tokenizer to train if no folder is given."""
    vocab_size: Annotated[int, ABOVE_0, SCRATCH, TOKENIZER_TRAINED, Needs("data.tokenizer_kind", "bpe")] = 4096
    """Maximum number of tokens of a trained BPE tokenizer."""
    validation_fraction: Annotated[float, BELOW_1] = 0.05
    """Fraction of the documents held out for validation (0: no validation)."""
    text_field: Annotated[
        str, Holds("data.has_fields", "with a source of plain text; give --data.source FILE.jsonl or another one")
    ] = "text"
    """Field of .jsonl and .parquet rows that holds the text."""
    limit_bytes: Annotated[int | None, ABOVE_0] = None
    """Maximum bytes of text; only the first documents are read."""
    context: Annotated[int, ABOVE_0] = 256
    """Tokens in a row of a batch (T)."""
    fit_context: bool = False
    """Shorten rows to what the longest conversation needs, at most to the context."""
    batch_size: Annotated[int, ABOVE_0] = 8
    """Rows in a micro-batch (B), which are in memory at once; of all processes together."""
    accumulation: Annotated[int, ABOVE_0] = 1
    """Micro-batches in a step, whose gradients are summed."""
    separate_documents: bool = False
    """Keep attention inside each of the documents that are packed into a row."""
    workers: Annotated[int, AT_LEAST_0] = 0
    """Threads that prepare batches ahead (0: prepare each when it is needed)."""

    @property
    def has_fields(self) -> bool:
        """Whether the source may hold records with fields, by its name."""
        return self.source not in TEXT_SOURCES and not self.source.lower().endswith(TEXT_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer, and its settings."""

    kind: OptimizerName = "adamw"
    """adamw (arXiv 1711.05101), lamb (arXiv 1904.00962), muon for the blocks' matrices and adamw for the rest; for
    several processes onebit-adam (arXiv 2102.02888) and onebit-lamb (arXiv 2104.06069)."""
    learning_rate: Annotated[float, ABOVE_0] = 6e-4
    """Peak learning rate."""
    beta1: Annotated[float, BELOW_1] = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Annotated[float, BELOW_1] = 0.95
    """Decay of the running mean of the squared gradient."""
    epsilon: Annotated[float, ABOVE_0] = 1e-8
    """Added to the root of the running mean square."""
    weight_decay: Annotated[float, AT_LEAST_0] = 0.1
    """Weight decay of matrices: parameters with two dimensions or more."""
    momentum: Annotated[float, BELOW_1, MUON] = 0.95
    """Momentum of the matrices that muon updates."""
    groups: tuple[str, ...] = ()
    """Exceptions by parameter name: PATTERN:rate=0.1,decay=0 (rate: times the learning rate); the first match wins."""
    clip: Annotated[float | None, ABOVE_0] = 1.0
    """Maximum gradient norm (none: no clipping); after a one-bit warm-up it applies to each process's gradient."""
    freeze_after: Annotated[int | None, ABOVE_0, ONEBIT] = None
    """Warm-up steps of a one-bit optimizer (none: until the variance is steady, at least 2/(1-beta2) steps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the steps: a linear warm-up, then the decay of `kind`."""

    kind: ScheduleName = "cosine"
    """cosine (arXiv 1608.03983), wsd (warm-up, stable, linear decay; arXiv 2404.06395) or constant."""
    warmup_steps: Annotated[int, AT_LEAST_0] = 100
    """Steps in which the learning rate rises to its peak."""
    warmup_share: Annotated[float, SHARE_ABOVE_0, Needs("schedule.warmup_steps")] = 1.0
    """Maximum warm-up as a fraction of the run's steps, if their number is known from the start."""
    final_fraction: Annotated[float, SHARE, Needs("schedule.kind", "cosine", "wsd")] = 0.1
    """Learning rate of the last step, as a fraction of the peak (cosine and wsd)."""
    decay_fraction: Annotated[float, SHARE, WSD] = 0.2
    """Fraction of all steps in which wsd decays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    """Techniques that make training fast or small, in the order they are applied."""

    pad_vocabulary_to: Annotated[int, ABOVE_0, Unless("lora.rank")] = 64
    """Round the rows of embedding and head up to a multiple of this; exporting cuts them off (1: do not round)."""
    precision: Annotated[PrecisionName, arg(aliases=["--dtype"])] = "auto"
    """Dtype of matrix products; weights and loss stay float32. auto: bfloat16 if it is fast here, else float32."""
    attention: str | None = None
    """Force an attention kernel, for example reference or sdpa (none: the fastest that fits)."""
    fused_activation: Annotated[bool, ON_CPU] = True
    """On a CPU, compute bias and GELU (or SiLU and gate) in one native pass, forward and backward."""
    joined_projections: Annotated[bool, ON_CPU] = True
    """On a CPU, use one product for queries, keys and values."""
    loss: str | None = None
    """Force a loss kernel: torch, chunked or reference (none: the first that fits; no full logits in memory)."""
    layer_drop: Annotated[float | None, SHARE_ABOVE_0] = None
    """Progressive layer dropping: final probability of keeping the deepest block, 0.5 in the paper (none: keep all)."""
    layer_drop_decay: Annotated[float, ABOVE_0, DROPPED] = 100.0
    """Speed at which dropping sets in: the exponent over the whole run."""
    checkpointing: CheckpointingName = "none"
    """Activations to recompute in the backward pass: those that cost little time (selective), all in a block (full), or
    all, with the blocks' inputs kept on the host (offload)."""
    compile: bool = True
    """Compile block by block (torch.compile); on CUDA only if the model cannot be one function."""
    whole_model: Annotated[bool, ON_CUDA, Neutral(False)] = True
    """On CUDA, run forward pass and loss as one function, with fused norms and activations and joined projections."""
    compile_whole: Annotated[bool, ON_CUDA, Needs("techniques.whole_model"), Needs("techniques.compile")] = False
    """Also compile that function as one graph: minutes of compiling before the first step, for no measured gain."""
    capture: Annotated[bool, ON_CUDA, Needs("techniques.whole_model"), Neutral(False)] = True
    """On CUDA, capture the whole step as CUDA graphs if its shapes are fixed, so that it never waits for the host."""
    fp8: bool = False
    """On CUDA, use FP8 products in blocks and head, except for the gradient of the head's weight (Ada and later)."""
    fused_optimizer: bool = True
    """Update many tensors with one kernel."""
    keep_memory: Annotated[bool, ON_CPU, Neutral(False)] = True
    """On a CPU, keep freed memory in the process instead of mapping it again in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Finetune with LoRA: the model stays frozen, low-rank matrices beside its layers are trained (docs/lora.md)."""

    rank: Annotated[int | None, ABOVE_0] = None
    """Rank of the adapter, for example 16 (none: train all weights)."""
    alpha: Annotated[float | None, ABOVE_0, WITH_LORA] = None
    """Scale of the adapter's result, as alpha/rank (none: twice the rank)."""
    targets: Annotated[tuple[str, ...], WITH_LORA] = ("all-linear",)
    """Layers to adapt, by their names in the checkpoint (q_proj,v_proj); all-linear: all in the blocks."""
    dropout: Annotated[float, BELOW_1, WITH_LORA] = 0.0
    """Probability of dropping an input of the adapter while training."""
    rslora: Annotated[bool, WITH_LORA] = False
    """Scale by alpha/sqrt(rank) (arXiv 2312.03732)."""
    base: Annotated[Literal["auto", "float32", "bfloat16", "float16"], WITH_LORA] = "auto"
    """Dtype of the frozen weights; auto: as stored. Quantized layers stay quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qat:
    """Quantization-aware training: layers multiply with their weights rounded as they will be stored."""

    bits: Literal[8, 4, 3, 2] | None = None
    """Bits of the blocks' weights, in training and in the exported folder (none: do not round)."""
    group_size: Annotated[Literal[32, 64, 128, 0], ROUNDED, Unless("qat.bits", 8)] = 32
    """Weights that share a scale (0: a row, as always with 8 bits)."""
    init: Annotated[str | None, ROUNDED] = None
    """Start from the integers and scales of this folder, made from --init by `hasten quantize`, for example with gptq,
    with the same bits and group size (none: round to nearest)."""
    head: Annotated[Literal["none", "int8", "same"], ROUNDED] = "none"
    """Format of the stored head (none: not quantized; transformers cannot read a quantized one tied to embeddings)."""
    activations: Annotated[Literal["int8", "float"], ROUNDED] = "int8"
    """int8: also round each layer's input as the kernel that will run it does; float: do not."""
    learned_scales: Annotated[bool, ROUNDED] = True
    """Train the scales (LSQ); otherwise they follow the largest weight of their group."""
    start_bits: Annotated[int | None, ROUNDED] = None
    """Bits at the start; one less after period, 2 period, 4 period, … steps (MoQ; none: --qat.bits from the start)."""
    period: Annotated[int, ABOVE_0, ROUNDED, FALLING] = 100
    """Steps until the bits are first lowered."""
    mixing_steps: Annotated[int, AT_LEAST_0, ROUNDED, FALLING] = 0
    """Steps after each lowering in which the exact weights fade out."""
    eigenvalue_steps: Annotated[int, AT_LEAST_0, ROUNDED, FALLING] = 0
    """Power iterations that find the loss's curvature in each block, by which its periods are stretched (0: none)."""
    stochastic: Annotated[bool, ROUNDED] = False
    """Round up or down at random, with probabilities that keep the mean (without learned scales)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How several processes (torchrun, or --processes) divide work and memory. Only `policy` changes the numbers."""

    zero: StageName = 0
    """ZeRO stage. 0: the whole model on every process (DDP); 1-3: weights, gradients and states sharded (FSDP2)."""
    tensor: Annotated[int, ABOVE_0, SHARED] = 1
    """Neighbouring processes that split every block and every row of tokens (tensor and sequence parallelism)."""
    experts: Annotated[int, ABOVE_0] = 1
    """Neighbouring processes that divide each layer's experts, to which tokens travel (expert parallelism)."""
    replicas: Annotated[int, ABOVE_0, SHARED] = 1
    """Groups of processes that each hold the whole model in shards (HSDP); for several machines."""
    offload: OffloadName = "none"
    """Keep on the host: nothing, the optimizer (its weights, states and step), or all that no block uses (zero 1-3)."""
    policy: PolicyName = "float32-weights"
    """float32 weights under autocast, or 16-bit weights and gradients with float32 masters in the optimizer."""
    prefetch: Annotated[int, AT_LEAST_0, SHARED] = 0
    """Blocks whose weights are gathered ahead of the one that runs (zero 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Length of the run, device and output. The run ends at the first of steps, epochs and minutes."""

    steps: Annotated[int | None, ABOVE_0, arg(aliases=["--steps"])] = None
    """Optimizer steps."""
    epochs: Annotated[float | None, ABOVE_0] = None
    """Passes over the training split."""
    minutes: Annotated[float | None, ABOVE_0, arg(aliases=["--minutes"])] = None
    """Approximate duration: the speed of the first steps decides the number of steps, lowered if they get slower."""
    folder: str = "runs"
    """Folder in which the run's folder NAME is created."""
    validate_every: Annotated[int, ABOVE_0, VALIDATED] = 200
    """Steps between two measurements of the validation loss."""
    validation_batches: Annotated[int, ABOVE_0, VALIDATED] = 20
    """Maximum number of batches that the validation loss is measured on, always the same ones."""
    checkpoint_every: Annotated[int, ABOVE_0] = 200
    """Steps between two checkpoints; one is also written at each new best validation loss and at the end."""
    background_checkpoints: bool = False
    """Write checkpoints while training continues, from a copy in memory."""
    export: Annotated[Literal["best", "last"], VALIDATED, Unless("qat.start_bits")] = "best"
    """Weights to write to runs/NAME/model: those with the best validation loss, or the last ones."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights (auto: bfloat16 if trained in bfloat16, else float32; an adapter's: float32)."""
    device: Annotated[str, arg(aliases=["--device"])] = "auto"
    """auto, cpu, cuda or cuda:<index>."""
    threads: Annotated[Threads | None, arg(aliases=["--threads"])] = None
    """CPU threads (auto or none: one for each physical core that this process may use, and fewer while other programs
    need them; the last bits depend on the number)."""
    seed: Annotated[int, arg(aliases=["--seed"])] = 0
    """Seed of initial weights, data order and dropout."""
    fit: Annotated[bool, arg(aliases=["--fit"])] = False
    """Divide a step's rows into as few micro-batches as fit in memory; a resumed run keeps its micro-batches."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the package tensorboard)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings of a training run."""

    name: str
    """Name of the run: its folder is runs/NAME."""
    init: str | None = None
    """Model to finetune: a folder, GGUF file or hub id (none: train the shape in `model` from scratch)."""
    teacher: str | None = None
    """Model to distill, a folder or hub id with the same tokens: learn its probabilities instead of the next tokens."""
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
        """The fields as nested JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # turns tuples into lists
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Recipe":
        """Read what `to_json` returned. Raises ConfigError for unknown fields and wrong values."""
        sections: dict[str, Any] = {one.name: one.type for one in fields(cls) if is_dataclass(one.type)}
        if not isinstance(values, Mapping):
            raise ConfigError(f"a recipe is an object with fields; found {values!r:.60}")
        try:
            if values.get("diloco", {}).get("sync_every", 0) is None:  # of an earlier version, switched off
                values = {name: value for name, value in values.items() if name != "diloco"}
            return cls(**{name: _made(sections[name], v) if name in sections else v for name, v in values.items()})
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"this is not a recipe of this version of hasten: {error}") from None

    def check(self) -> None:
        """Raise ConfigError, naming the field, for invalid values, before anything is read or allocated."""
        values, usual = flat(self), flat(Recipe(name=self.name))
        changed = [path for path in options_of(Recipe) if values[path] != usual[path]]
        unused = ignored(self, changed, counts=lambda condition: condition in KEPT_BY_RECIPES)
        for wrong in chain(mistakes(self), unused, wrong_together(self)):
            raise ConfigError(f"recipe {self.name!r}: {wrong}")


def _made(section: Any, values: Mapping[str, Any]) -> Any:
    """Create a section of a recipe from its JSON values, where tuples are lists."""
    return section(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def flat(recipe: Recipe) -> dict[str, Any]:
    """The fields by dotted name ("optimizer.learning_rate"), as JSON values."""
    values: dict[str, Any] = {}
    for name, value in recipe.to_json().items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Differences between two recipes that change the run, as lines "field: old -> new".

    A resumed run keeps its precision (`auto` is no difference), its micro-batches (`fit`) and the context that was
    fitted to the data.
    """
    before, after = flat(old), flat(new)
    kept = ["techniques.precision"] if new.techniques.precision == "auto" else []
    kept += ["data.context"] if old.data.fit_context and new.data.fit_context else []
    if new.run.fit and old.data.batch_size * old.data.accumulation == new.data.batch_size * new.data.accumulation:
        kept += ["data.batch_size", "data.accumulation"]
    after |= {name: before[name] for name in kept}
    return [f"{n}: {before[n]} -> {after[n]}" for n in after if n not in FREE_FIELDS and before[n] != after[n]]
