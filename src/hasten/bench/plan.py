"""A plan for a model on a device, from the options of `hasten plan`; times measured where the device is at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from hasten.bench.models import BenchmarkModel, check_least
from hasten.errors import ConfigError
from hasten.generation.params import KVCacheDtype
from hasten.machine import available_memory, measure_limits, resolve_device, resolve_dtype, training_precision
from hasten.model.config import ModelConfig
from hasten.planning.cost import matrices, parameters
from hasten.planning.devices import Device, known_device
from hasten.planning.memory import LARGEST_PREFILL, PROCESS_BYTES, InferenceUse, TrainingUse
from hasten.planning.plan import Phase, Plan, inference_phases, training_phase
from hasten.planning.shapes import SHAPES, shape_config
from hasten.serving.settings import EngineSettings
from hasten.training.recipe import Data, Lora, Optimizer, Parallel, Recipe, Run, Techniques


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is to be done with a model, and where. How it is trained is said as to `hasten train`."""

    use: Literal["train", "finetune", "lora", "generate", "serve"] = "generate"
    """train, finetune: all weights; lora: an adapter beside frozen ones; generate: one batch; serve: an engine."""
    device: str = "auto"
    """auto (this machine, measured) or a known one: h100, h200, a100-80gb, l40s, rtx4090, xeon, epyc."""
    batch_size: int | None = None
    """Rows of a micro-batch (8 by default), or sequences at once (1 to generate, 16 to serve)."""
    length: int | None = None
    """Tokens of a row, or of a prompt and its answer (1024, or the model's positions)."""
    new_tokens: int = 128
    """How many of these are generated."""
    accumulation: int = 1
    """Micro-batches of a training step."""
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int4-g64"] = "auto"
    """Their format where they are only read; auto: the folder's own, else bfloat16."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of the cache's keys and values."""
    ranks: int = 1
    """Devices that train together, each with rows of its own."""
    tensor_parallel: int = 1
    """Devices that share every matrix, in generating and serving."""
    measure: bool = True
    """On this machine, measure blocks of the model too (seconds), and not its limits alone."""
    techniques: Techniques = field(default_factory=lambda: Techniques(compile=False))
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora = field(default_factory=Lora)
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def training(self) -> bool:
        """Whether weights are trained."""
        return self.use in ("train", "finetune", "lora")

    def recipe(self) -> Recipe:
        """The same as a recipe."""
        data = Data(context=self.length or 1024, batch_size=self.batch_size or 8, accumulation=self.accumulation)
        lora = replace(self.lora, rank=self.lora.rank or 16) if self.use == "lora" else Lora()
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


def config_of(model: str) -> tuple[str, ModelConfig, BenchmarkModel | None]:
    """A name, the config, and the checkpoint where there are weights: of a shape, a config.json, a folder or hub id."""
    from hasten.model.checkpoint import read_json
    from hasten.model.families import read_config

    if model in SHAPES:
        return model, shape_config(model), None
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() and not any(path.glob("*.safetensors")) else path
    if file.suffix == ".json" and file.is_file():
        return file.parent.resolve().name, read_config(read_json(file), str(file)), None
    found = BenchmarkModel(model=model)
    return found.name, found.config(), found


def make_plan(model: str, options: PlanOptions) -> Plan:
    """Raises ConfigError for options that make no sense, CheckpointError for a model that cannot be read."""
    for name in ("batch_size", "new_tokens", "accumulation", "ranks", "tensor_parallel"):
        check_least(f"--{name.replace('_', '-')}", getattr(options, name))
    name, config, checkpoint = config_of(model)
    length = min(1024, config.max_positions) if options.length is None else options.length
    if not 2 <= length <= config.max_positions:
        raise ConfigError(f"--length is {length}; {name} takes from 2 to {config.max_positions}")
    options = replace(options, length=length)
    device, precision = _device(options)
    options = replace(options, techniques=replace(options.techniques, precision=precision))
    options.recipe().check()
    use, phases = (_training if options.training else _inference)(config, checkpoint, options, device)
    free = device.memory - PROCESS_BYTES
    settings = {name: value for name, value in asdict(options).items() if name not in ("model", "json", "picture")}
    return Plan(model=name, config=config, use=use, device=device, free=free, phases=phases, settings=settings)


def _device(options: PlanOptions) -> tuple[Device, Literal["float32", "bfloat16", "float16"]]:
    """Where it runs, and the dtype of its products."""
    dtype = options.techniques.precision
    if options.device != "auto" and options.device.partition(":")[0] not in ("cpu", "cuda"):
        return known_device(options.device), "bfloat16" if dtype == "auto" else dtype
    kind = str(resolve_device(options.device))
    dtype = training_precision(kind).dtype if dtype == "auto" else dtype  # type: ignore[assignment]
    limits, free = measure_limits(kind, (dtype,), seconds=0.3), available_memory(kind)
    name = f"this machine ({kind})"
    return Device(name=name, kind=kind, memory=free, limits=limits, link=10e9, measured=True), dtype  # type: ignore[return-value]


def _training(
    config: ModelConfig, checkpoint: BenchmarkModel | None, options: PlanOptions, device: Device
) -> tuple[TrainingUse, tuple[Phase, ...]]:
    import torch

    from hasten.bench.predict import step_seconds
    from hasten.training.layer_drop import keep_probabilities
    from hasten.training.memory import training_use

    recipe, theta = options.recipe(), options.techniques.layer_drop
    base = weight_bytes(config, options.weights) if checkpoint is None else checkpoint.stored_bytes()
    use = training_use(config, recipe, torch.device(device.kind), base=base)
    use = replace(use, ranks=options.ranks // options.parallel.replicas)
    kept = [1.0] if theta is None else keep_probabilities(len(config.layers), theta=theta)
    phase = training_phase(config, use, kept=sum(kept) / len(kept))
    if device.measured and device.kind == "cpu" and options.measure:
        phase = replace(phase, measured=step_seconds(config, recipe))
    return use, (phase,)


def _inference(
    config: ModelConfig, checkpoint: BenchmarkModel | None, options: PlanOptions, device: Device
) -> tuple[InferenceUse, tuple[Phase, ...]]:
    from hasten.bench.predict import generating_seconds
    from hasten.generation.cache import row_format

    assert options.length is not None
    served, prompt, settings = options.use == "serve", options.length - options.new_tokens, EngineSettings()
    if prompt < 1 or options.tensor_parallel > config.heads:
        raise ConfigError(
            f"--new-tokens ({options.new_tokens}) must be below --length ({options.length}), and --tensor-parallel "
            f"({options.tensor_parallel}) no more than the {config.heads} heads"
        )
    stored = checkpoint if options.weights == "auto" else None
    batch, dtype = options.batch_size or (16 if served else 1), options.techniques.precision
    use = InferenceUse(
        batch_size=batch,
        length=options.length,
        new_tokens=options.new_tokens,
        step=min(settings.token_budget if served else LARGEST_PREFILL, batch * prompt),
        weights=weight_bytes(config, options.weights) if stored is None else stored.stored_bytes(),
        dtype=dtype,
        row_bytes=row_format(options.kv_cache_dtype).bytes(config.head_dim, resolve_dtype(dtype)),
        block_size=settings.block_size if served else 1,
        degree=options.tensor_parallel,
    )
    before, each = inference_phases(config, use)
    if device.measured and device.kind == "cpu" and options.measure and use.degree == 1:
        weights = (stored and stored.quantized()) or options.weights.replace("auto", "bfloat16")
        seconds = generating_seconds(config, use, weights)
        if seconds is not None:
            before, each = replace(before, measured=seconds[0]), replace(each, measured=seconds[1])
    return use, (before, each)


def weight_bytes(config: ModelConfig, weights: str) -> int:
    """Of all weights in a format; the head of a quantized model is in int8, the embedding as it is."""
    from hasten.ops.linear.weights import INT8, int4_format

    count, (kind, _, group) = parameters(config), weights.partition("-g")
    plain = 4 if weights == "float32" else 2
    if kind not in ("int8", "int4"):
        return plain * count.total
    width, head = config.hidden_size, count.embedding
    inside, blocks = sum(matrices(config, layer)[0] for layer in config.layers), int4_format(int(group or 128))
    packed = INT8.bits_of(width) * head + (INT8 if kind == "int8" else blocks).bits_of(width) * inside
    return int(packed / 8) + plain * (count.total - inside - head)
