"""A plan for a model on a device, from the options of `hasten plan`; times measured where the device is at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from hasten.bench.models import BenchmarkModel
from hasten.bench.weight_bytes import weight_bytes
from hasten.effects import KIND, Facts, Needs, Reads, Unless
from hasten.engine.params import KVCacheDtype
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError
from hasten.machine import available_memory, product_limits, resolve_device, resolve_dtype, training_precision
from hasten.measure.options import check_least
from hasten.model.config import ModelConfig
from hasten.planning.choices import Wanted
from hasten.planning.cost import parameters
from hasten.planning.devices import DEVICES, LINKS, Device, known_device
from hasten.planning.memory import ITEMSIZE, LARGEST_PREFILL, PROCESS_BYTES, InferenceUse, TrainingUse
from hasten.planning.plan import Phase, Plan, inference_phases, training_phase
from hasten.planning.shapes import SHAPES, shape_config
from hasten.training.recipe import Data, Lora, Optimizer, Parallel, Recipe, Run, Techniques

if TYPE_CHECKING:
    from hasten.bench.predict import Generating


TRAINING = ("train", "finetune", "lora")
TRAINS, ANSWERS = Needs("use", *TRAINING), Needs("use", "generate", "serve")
# What of a recipe decides its bytes, FLOPs and time.
TECHNIQUES = ("precision", "attention", "joined_projections", "loss", "layer_drop", "checkpointing", "compile")
BETWEEN_RANKS = ("zero", "tensor", "experts", "replicas")
Weights = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int4-g64", "int4-g128"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Wanted):
    """What is to be done with a model, and where. How it is trained is said as to `hasten train`."""

    use: Literal["train", "finetune", "lora", "generate", "serve"] = "generate"
    """train, finetune: all weights; lora: an adapter beside frozen ones; generate: one batch; serve: an engine."""
    device: str = "auto"
    """auto (this machine, measured) or a known one: h100, h200, a100-80gb, l40s, rtx4090, xeon, epyc."""
    batch_size: int | None = None
    """Rows of a micro-batch (8 by default), or sequences at once (1 to generate, 16 to serve)."""
    length: int | None = None
    """Tokens of a row, or of a prompt and its answer (1024, or the model's positions)."""
    new_tokens: Annotated[int, ANSWERS] = 128
    """How many of these are generated."""
    accumulation: Annotated[int, TRAINS] = 1
    """Micro-batches of a training step."""
    weights: Annotated[Weights, Unless("use", "train", "finetune")] = "auto"
    """Their format where they are only read; auto: the folder's own, else bfloat16."""
    kv_cache_dtype: Annotated[KVCacheDtype, ANSWERS] = "auto"
    """Format of the cache's keys and values."""
    ranks: Annotated[int, TRAINS] = 1
    """Devices that train together, each with rows of its own."""
    tensor_parallel: Annotated[int, ANSWERS] = 1
    """Devices that share every matrix, in generating and serving; of this machine's CPU, ranks that share its cores."""
    gpus: Annotated[int | None, Needs("goal")] = None
    """With --goal: devices that may be used (all of this machine); of this machine's CPU, ranks, at most one a core."""
    memory: float | None = None
    """GB that each device has (as many as it has)."""
    measure: Annotated[bool, Unless("device", *DEVICES)] = True
    """On this machine, measure blocks of the model too (seconds), and not its limits alone."""
    techniques: Annotated[
        Techniques,
        Reads(*TECHNIQUES, "keep_memory", by="a plan"),
        Needs("use", *TRAINING, but=("precision",)),
    ] = field(default_factory=lambda: Techniques(compile=False))
    optimizer: Annotated[Optimizer, Reads("kind", by="a plan"), TRAINS] = field(default_factory=Optimizer)
    lora: Annotated[Lora, Reads("rank", "targets", "base", by="a plan"), Needs("use", "lora")] = field(
        default_factory=lambda: Lora(rank=16)
    )
    parallel: Annotated[
        Parallel,
        Reads(*BETWEEN_RANKS, "offload", "policy", by="a plan"),
        TRAINS,
        Unless("devices", 1, but=("offload", "policy")),
    ] = field(default_factory=Parallel)

    EFFECTS: ClassVar = {name: Needs("goal") for name in ("token_ms", "price")}

    def facts(self) -> Facts:
        """What conditions of options depend on beside other options."""
        return {KIND: lambda: DEVICES[self.device].kind if self.device in DEVICES else resolve_device(self.device).type}

    @property
    def devices(self) -> int:
        """How many are to train together, or may."""
        return max(self.ranks, self.gpus or 1)

    @property
    def training(self) -> bool:
        """Whether weights are trained."""
        return self.use in TRAINING

    def recipe(self) -> Recipe:
        """The same as a recipe."""
        data = Data(context=self.length or 1024, batch_size=self.batch_size or 8, accumulation=self.accumulation)
        rank = 16 if self.lora.rank is None else self.lora.rank
        lora = replace(self.lora, rank=rank) if self.use == "lora" else Lora()
        return Recipe(
            name="plan",
            init=None if self.use == "train" else "MODEL",
            data=data,
            optimizer=self.optimizer,
            techniques=self.techniques,
            lora=lora,
            parallel=self.parallel,
            run=Run(steps=1),
        )


def config_of(model: str) -> tuple[str, ModelConfig, BenchmarkModel | None, str]:
    """A name, the config, the checkpoint where there are weights, and what they are in: of a shape, a config.json, a
    folder or hub id.

    Of a hub id the config is downloaded; the rest too where it is quantized: the headers of its files say how.
    """
    from hasten.checkpoints.hub import names_hub_folder, resolve_folder
    from hasten.machine.regular_files import read_json
    from hasten.model.families import read_config

    if model in SHAPES:
        return model, shape_config(model), None, "bfloat16"
    path = Path(model).expanduser()
    hub = not path.exists() and not model.endswith((".json", ".gguf")) and names_hub_folder(model)
    if hub:
        path = resolve_folder(model, files=["config.json"])
    file = path / "config.json" if path.is_dir() and not any(path.glob("*.safetensors")) else path
    if file.suffix == ".json" and file.is_file():
        values = read_json(file)
        if not hub or not values.keys() & {"quantization_config", "compression_config"}:
            own = values.get("dtype", values.get("torch_dtype"))
            if own not in ITEMSIZE:
                own = "float32" if hub else "bfloat16"
            return model if hub else file.parent.resolve().name, read_config(values, str(file)), None, own
    found = BenchmarkModel(model=model)
    return found.name, found.config(), found, found.weights()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is planned for, with the device and the dtype settled. checkpoint: where there are weights, own: in what."""

    name: str
    config: ModelConfig
    checkpoint: BenchmarkModel | None
    options: PlanOptions
    device: Device
    own: str

    @property
    def weights(self) -> str:
        """The format of the weights that is planned for."""
        return self.options.weights.replace("auto", self.own)

    @property
    def shares_cores(self) -> bool:
        """Whether several ranks on its device are parts of this machine's processor."""
        return self.device.measured and self.device.kind == "cpu"

    def having(self, **options: Any) -> Subject:
        """The same with other options."""
        return replace(self, options=replace(self.options, **options))

    def plan(self, device: Device, use: TrainingUse | InferenceUse, *phases: Phase) -> Plan:
        """The plan on its device, or a part of it."""
        settings = {k: value for k, value in asdict(self.options).items() if k not in ("model", "json", "picture")}
        free = device.memory - PROCESS_BYTES
        return Plan(
            model=self.name, config=self.config, use=use, device=device, free=free, phases=phases, settings=settings
        )


def make_plan(model: str, options: PlanOptions) -> Plan:
    """Raises ConfigError for options that make no sense, CheckpointError for a model that cannot be read."""
    subject = settle(model, options)
    if options.training:
        return training_plan(subject)
    require_degree(subject)
    return inference_plan(subject, cost=measured_cost(subject))


def training_plan(subject: Subject) -> Plan:
    """The plan of a training step. Raises ConfigError for a model that cannot be divided as asked."""
    return subject.plan(subject.device, *_training(subject))


def settle(model: str, options: PlanOptions) -> Subject:
    """The same, but for what follows from the number of devices."""
    for name in ("batch_size", "new_tokens", "accumulation", "ranks", "tensor_parallel", "gpus"):
        check_least(f"--{name.replace('_', '-')}", getattr(options, name))
    return settled(*config_of(model), options)


def settled(
    name: str, config: ModelConfig, checkpoint: BenchmarkModel | None, own: str, options: PlanOptions
) -> Subject:
    """The same for a model of which `config_of` has said this."""
    length = min(1024, config.max_positions) if options.length is None else options.length
    if not 2 <= length <= config.max_positions:
        raise ConfigError(f"--length is {length}; {name} takes from 2 to {config.max_positions}")
    options = replace(options, length=length)
    if not options.training:
        own = _generated_in(config, own, options)
    if own == "float32" and options.techniques.precision == "auto" and not options.training:
        options = replace(options, techniques=replace(options.techniques, precision="float32"))
    device, precision = _device(options, options.weights.replace("auto", own))
    if options.memory is not None:
        if not 0 < options.memory < math.inf:
            raise ConfigError(f"--memory is {options.memory}; give the GB of a device, above 0")
        device = replace(device, memory=int(options.memory * 1e9))
    options = replace(options, techniques=replace(options.techniques, precision=precision))
    options.recipe().check()
    groups, what = groups_of(options.parallel)
    if options.training and options.ranks % groups:
        raise ConfigError(f"--ranks (with --goal: --gpus) is {options.ranks}, which {what} ({groups}) does not divide")
    if not options.training and options.new_tokens >= length:
        raise ConfigError(f"--new-tokens ({options.new_tokens}) must be below --length ({length})")
    return Subject(name=name, config=config, checkpoint=checkpoint, options=options, device=device, own=own)


def groups_of(parallel: Parallel) -> tuple[int, str]:
    """What the number of ranks must be a multiple of, and the fields that say so."""
    if parallel.experts > 1:  # without the others
        return parallel.experts, "parallel.experts"
    return parallel.replicas * parallel.tensor, "parallel.replicas times parallel.tensor"


def _generated_in(config: ModelConfig, own: str, options: PlanOptions) -> str:
    """The format that a command holds the weights of a checkpoint in: as asked for, or as `hasten.load` chooses."""
    if own not in ITEMSIZE:
        return own
    if options.techniques.precision != "auto":
        return options.techniques.precision
    if own == "bfloat16" or not _here(options):
        return own.replace("float32", "bfloat16")
    import torch

    from hasten.model.inference import inference_dtype

    found = inference_dtype(config, getattr(torch, own), resolve_device(options.device))
    return str(found).removeprefix("torch.")


def _here(options: PlanOptions) -> bool:
    """Whether the device is one of this machine's."""
    return options.device.partition(":")[0] in ("auto", "cpu", "cuda")


def _cache_dtype(subject: Subject) -> str:
    """The dtype of keys and values: that of the path which generates, bfloat16 in fused steps."""
    from hasten.model.inference import runs_fused

    options = subject.options
    if (
        not _here(options)
        or subject.weights == "float32"
        or not runs_fused(subject.config, resolve_device(options.device))
    ):
        return options.techniques.precision
    return "bfloat16"


def _integers(options: PlanOptions, weights: str, kind: str, dtype: str) -> bool:
    """Whether weights in this format are multiplied as integers there, by our kernels."""
    quantized = not options.training and weights.startswith(("int8", "int6", "int4"))
    return quantized and kind == "cpu" and dtype != "float16"


def _device(options: PlanOptions, weights: str) -> tuple[Device, Literal["float32", "bfloat16", "float16"]]:
    """Where it runs with weights in this format, and the dtype of its products."""
    dtype = options.techniques.precision
    if options.device != "auto" and options.device.partition(":")[0] not in ("cpu", "cuda"):
        return known_device(options.device), "bfloat16" if dtype == "auto" else dtype
    kind = str(resolve_device(options.device))
    dtype = training_precision(kind).dtype if dtype == "auto" else dtype  # type: ignore[assignment]
    dtypes = (dtype, "int8") if _integers(options, weights, kind, dtype) else (dtype,)
    if options.training and options.optimizer.kind == "muon" and kind == "cpu" and dtype != "float32":
        dtypes = (*dtypes, "float32")
    limits, free, link = product_limits(kind, dtypes, seconds=0.3), available_memory(kind), LINKS["shared-memory"]
    if kind != "cpu":
        import torch

        words = torch.cuda.get_device_name(kind).split()
        link = next((one.link for one in DEVICES.values() if one.name.split()[1] in words), LINKS["pcie-4"])
    name = f"this machine ({kind})"
    return Device(name=name, kind=kind, memory=free, limits=limits, link=link, measured=True), dtype  # type: ignore[return-value]


def _training(subject: Subject) -> tuple[TrainingUse, Phase]:
    import torch

    from hasten.bench.predict import step_seconds
    from hasten.training.layer_drop import keep_probabilities
    from hasten.training.memory import training_use
    from hasten.training.rank_checks import check_shares

    config, options, device, checkpoint = subject.config, subject.options, subject.device, subject.checkpoint
    recipe, theta = options.recipe(), options.techniques.layer_drop
    if options.ranks > 1:
        check_shares(config.padded_to(options.techniques.pad_vocabulary_to), options.parallel)
    base = weight_bytes(config, options.weights) if checkpoint is None else checkpoint.held_bytes()
    use = training_use(config, recipe, torch.device(device.kind), base=base)
    use = replace(use, ranks=options.ranks // use.replicas, tensor=options.parallel.tensor)
    kept = [1.0] if theta is None else keep_probabilities(len(config.layers), theta=theta)
    phase = training_phase(config, use, kept=sum(kept) / len(kept))
    if subject.shares_cores and options.measure:
        seconds = step_seconds(config, recipe)
        phase = replace(phase, measured=None if seconds is None else seconds / use.tensor)
    return use, phase


def require_degree(subject: Subject) -> None:
    """Raise ConfigError for more ranks than the model can be shared by, or than there are cores."""
    from hasten.distributed.communication import require_cores
    from hasten.model.shares import shares, whole_groups
    from hasten.ops.linear.weights import INT4_GROUP, INT8, int4_format

    formats, degree = (
        list(subject.checkpoint.weight_formats() if subject.checkpoint else ()),
        subject.options.tensor_parallel,
    )
    kind, _, group = subject.weights.partition("-g")
    if subject.weights != subject.own and kind in ("int8", "int4"):
        formats = [INT8 if kind == "int8" else int4_format(int(group or INT4_GROUP))]
    together = whole_groups(formats) if formats else 1
    shares(subject.config, degree, output=together, down=together)
    if subject.shares_cores:
        require_cores(degree)


def measured_cost(subject: Subject, batches: Sequence[int] = ()) -> Generating | None:
    """Measure the model's steps with all cores; None where they are not to be measured, or cannot be."""
    if not (subject.shares_cores and subject.options.measure):
        return None
    from hasten.bench.predict import generating_seconds

    use, cache, served = _inference(subject), subject.options.kv_cache_dtype, subject.options.use == "serve"
    batches = batches or [use.batch_size]
    return generating_seconds(subject.config, use, batches, subject.weights, cache=cache, served=served)


def inference_plan(subject: Subject, *, replicas: int = 1, cost: Generating | None = None) -> Plan:
    """Plan for one rank. replicas: how many share this machine's cores. cost: measured, of steps with all cores."""
    use, device = _inference(subject), subject.device
    if subject.shares_cores:
        device = device.part(replicas * use.degree)
        if use.degree > 1:
            from hasten.distributed.communication import link_here

            device = replace(device, link=link_here(use.degree))
    phases = inference_phases(subject.config, use)
    if cost is not None:
        # Ranks do the whole model's work together, on all cores; replicas get their share of these. Of a checkpoint
        # whose layers have several formats blocks in one of them were measured: a token takes as long as its bytes.
        mixed = use.weights / weight_bytes(subject.config, subject.weights) if subject.checkpoint is not None else 1.0
        times = (
            use.batch_size * cost.prompt,
            cost.steps[use.batch_size] * (mixed if subject.options.weights == "auto" else 1.0),
        )
        before, each = (replace(one, measured=replicas * took) for one, took in zip(phases, times, strict=True))
        phases = before, each
    return subject.plan(device, use, *phases)


def _inference(subject: Subject) -> InferenceUse:
    from hasten.engine.cache import row_format

    options, config, settings = subject.options, subject.config, EngineSettings()
    assert options.length is not None
    stored, served = subject.checkpoint if options.weights == "auto" else None, options.use == "serve"
    if stored is not None and stored.weights() != subject.own:  # which is not loaded as it is stored
        stored = None
    batch, dtype = options.batch_size or (16 if served else 1), options.techniques.precision
    prompts = batch * (options.length - options.new_tokens)
    return InferenceUse(
        batch_size=batch,
        length=options.length,
        new_tokens=options.new_tokens,
        step=min(settings.budget if served else LARGEST_PREFILL, prompts),
        weights=weight_bytes(config, subject.weights) if stored is None else stored.held_bytes(),
        dtype=dtype,
        integers=_integers(options, subject.weights, subject.device.kind, dtype),
        row_bytes=row_format(options.kv_cache_dtype).bytes(config.head_dim, resolve_dtype(_cache_dtype(subject))),
        block_size=settings.block_size if served else 1,
        degree=options.tensor_parallel,
        table=(4 if subject.weights == "float32" else 2) * parameters(config).table,
        mapped=subject.device.kind == "cpu" and (subject.weights == subject.own or subject.weights.startswith("int")),
    )
