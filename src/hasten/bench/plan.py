"""A plan for a model on a device, from the options of `hasten plan`; times measured where the device is at hand."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hasten.bench.models import BenchmarkModel, check_least
from hasten.errors import ConfigError
from hasten.generation.params import KVCacheDtype
from hasten.model.config import ModelConfig
from hasten.planning.devices import Device, known_device
from hasten.planning.memory import LARGEST_PREFILL, PROCESS_BYTES
from hasten.planning.shapes import SHAPES, shape_config

if TYPE_CHECKING:
    from hasten.planning.memory import InferenceUse, TrainingUse
    from hasten.planning.plan import Phase, Plan
    from hasten.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is to be done with a model, and where."""

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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of products; auto: bfloat16 where it is fast, else float32."""
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int4-g64"] = "auto"
    """Their format where they are only read; auto: the folder's own, else bfloat16."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of the cache's keys and values."""
    optimizer: Literal["adamw", "lamb", "muon"] = "adamw"
    masters: bool = False
    """Weights and gradients in 16 bits, with float32 masters in the optimizer."""
    accumulation: int = 1
    """Micro-batches of a step."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass."""
    layer_drop: float | None = None
    """Progressive layer dropping, at its end."""
    lora_rank: int = 16
    ranks: int = 1
    """Devices that train together, each with rows of its own."""
    zero: Literal[0, 1, 2, 3] = 0
    """What of the states they share."""
    tensor_parallel: int = 1
    """Devices that share every matrix, in generating and serving."""
    measure: bool = True
    """On this machine, measure blocks of the model too (seconds), and not its limits alone."""

    @property
    def training(self) -> bool:
        return self.use in ("train", "finetune", "lora")

    def recipe(self) -> Recipe:
        """The same in the terms of training."""
        from hasten.training.recipe import Data, Lora, Optimizer, Parallel, Recipe, Techniques

        assert self.length is not None
        return Recipe(
            name="plan",
            data=Data(context=self.length, batch_size=self.batch_size or 8, accumulation=self.accumulation),
            optimizer=Optimizer(kind=self.optimizer),
            techniques=Techniques(
                precision=self.dtype, checkpointing=self.recompute, layer_drop=self.layer_drop, compile=False
            ),
            lora=Lora(rank=self.lora_rank if self.use == "lora" else None),
            parallel=Parallel(zero=self.zero, policy="float32-masters" if self.masters else "float32-weights"),
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
    from hasten.machine import available_memory
    from hasten.planning.plan import Plan

    for name in ("batch_size", "new_tokens", "accumulation", "lora_rank", "ranks", "tensor_parallel"):
        check_least(f"--{name.replace('_', '-')}", getattr(options, name))
    name, config, checkpoint = config_of(model)
    length = min(1024, config.max_positions) if options.length is None else options.length
    if not 2 <= length <= config.max_positions:
        raise ConfigError(f"--length is {length}; {name} takes from 2 to {config.max_positions}")
    dtype, device = _device(options)
    options = replace(options, length=length, dtype=dtype)
    use, phases = (_training if options.training else _inference)(config, checkpoint, options, device)
    settings = {one.name: getattr(options, one.name) for one in fields(PlanOptions)}
    free = (available_memory(device.kind) if device.measured else device.memory) - PROCESS_BYTES
    return Plan(model=name, config=config, use=use, device=device, free=free, phases=phases, settings=settings)


def _device(options: PlanOptions) -> tuple[Literal["float32", "bfloat16", "float16"], Device]:
    """The dtype of products, and where they are computed."""
    from hasten.machine import available_memory, measure_limits, resolve_device, training_precision

    if options.device != "auto" and options.device.partition(":")[0] not in ("cpu", "cuda"):
        return "bfloat16" if options.dtype == "auto" else options.dtype, known_device(options.device)
    kind = str(resolve_device(options.device))
    dtype = training_precision(kind).dtype if options.dtype == "auto" else options.dtype
    limits = measure_limits(kind, (dtype,), seconds=0.3)
    name = f"this machine's {kind}"
    return dtype, Device(  # type: ignore[return-value]
        name=name, kind=kind, memory=available_memory(kind), limits=limits, link=10e9, measured=True
    )


def _training(
    config: ModelConfig, checkpoint: BenchmarkModel | None, options: PlanOptions, device: Device
) -> tuple[TrainingUse, tuple[Phase, ...]]:
    import torch

    from hasten.bench.predict import training_seconds
    from hasten.planning.plan import training_phase
    from hasten.training.layer_drop import keep_probabilities
    from hasten.training.memory import training_use

    recipe = options.recipe()
    base = weight_bytes(config, options.weights) if checkpoint is None else checkpoint.stored_bytes()
    use = replace(training_use(config, recipe, torch.device(device.kind), base=base), ranks=options.ranks)
    kept = [1.0] if options.layer_drop is None else keep_probabilities(len(config.layers), theta=options.layer_drop)
    phase = training_phase(config, use, kept=sum(kept) / len(kept))
    if device.measured and device.kind == "cpu" and options.measure:
        phase = replace(phase, measured=training_seconds(config, recipe))
    return use, (phase,)


def _inference(
    config: ModelConfig, checkpoint: BenchmarkModel | None, options: PlanOptions, device: Device
) -> tuple[InferenceUse, tuple[Phase, ...]]:
    from hasten.bench.predict import generating_cost
    from hasten.generation.cache import row_format
    from hasten.machine import resolve_dtype
    from hasten.planning.memory import InferenceUse
    from hasten.planning.plan import inference_phases
    from hasten.serving.settings import EngineSettings

    assert options.length is not None
    served, prompt, stored = options.use == "serve", options.length - options.new_tokens, None
    if prompt < 1:
        raise ConfigError(f"--new-tokens is {options.new_tokens}; a prompt needs room in --length ({options.length})")
    if options.tensor_parallel > config.heads:
        raise ConfigError(f"--tensor-parallel is {options.tensor_parallel}; there are {config.heads} heads to share")
    if options.weights == "auto" and checkpoint is not None:
        stored = checkpoint
    settings, batch = EngineSettings(), options.batch_size or (16 if served else 1)
    use = InferenceUse(
        batch_size=batch,
        length=options.length,
        new_tokens=options.new_tokens,
        step=min(settings.token_budget if served else LARGEST_PREFILL, batch * prompt),
        weights=weight_bytes(config, options.weights) if stored is None else stored.stored_bytes(),
        dtype=options.dtype,
        row_bytes=row_format(options.kv_cache_dtype).bytes(config.head_dim, resolve_dtype(options.dtype)),
        block_size=settings.block_size if served else 1,
        degree=options.tensor_parallel,
    )
    before, each = inference_phases(config, use)
    if device.measured and device.kind == "cpu" and options.measure and use.degree == 1:
        weights = options.weights if stored is None else stored.quantized() or "bfloat16"
        cost = generating_cost(config, weights=weights, batch=batch, prompt=min(prompt, use.step), served=served)
        if cost is not None:
            seconds = cost.token(prompt + options.new_tokens // 2, batch=batch)
            before = replace(before, measured=cost.prompts(prompt, batch=batch, step=use.step))
            each = replace(each, measured=seconds)
    return use, (before, each)


def weight_bytes(config: ModelConfig, weights: str) -> int:
    """Of all weights in a format; the head of a quantized model is in int8, the embedding as it is."""
    from hasten.ops.linear.weights import INT8, int4_format
    from hasten.planning.cost import matrices, parameters

    count, (kind, _, group) = parameters(config), weights.partition("-g")
    plain = 4 if weights == "float32" else 2
    if kind not in ("int8", "int4"):
        return plain * count.total
    width, head = config.hidden_size, count.embedding
    inside = sum(matrices(config, layer)[0] for layer in config.layers)
    packed = INT8.bits_of(width) * head
    packed += (INT8 if kind == "int8" else int4_format(int(group or 128))).bits_of(width) * inside
    return int(packed / 8) + plain * (count.total - inside - head)
