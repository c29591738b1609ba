"""Memory check of a recipe: refuses it before anything is allocated if it does not fit, or makes it fit (--fit)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from hasten.checkpoints.load import open_checkpoint
from hasten.checkpoints.source import ModelSource
from hasten.distributed.ranks import ALONE, Ranks
from hasten.machine import available_memory, resolve_dtype
from hasten.model.config import ModelConfig
from hasten.ops.loss import KERNELS, LossRequest, rows_of_a_chunk
from hasten.ops.picker import pick
from hasten.planning.cost import head_products, matrices, parameters
from hasten.planning.held import held_bytes
from hasten.planning.largest import largest
from hasten.planning.memory import (
    ITEMSIZE,
    InferenceUse,
    Memory,
    TrainingUse,
    inference_memory,
    training_memory,
)
from hasten.training.build import attention_kernel, lora_adapter
from hasten.training.recipe import Data, Lora, Recipe
from hasten.training.teacher import teacher_path


def training_use(
    config: ModelConfig,
    recipe: Recipe,
    device: torch.device,
    *,
    base: int | None = None,
    ranks: Ranks = ALONE,
) -> TrainingUse:
    """A rank's training step of a recipe, in the planner's terms.

    base: bytes of the checkpoint that LoRA adapts.
    """
    techniques, data, parallel = recipe.techniques, recipe.data, recipe.parallel
    dtype = resolve_dtype(techniques.precision, auto=torch.bfloat16)
    # On a GPU no other kernel takes sinks.
    explicit = attention_kernel(recipe, device) == "reference" or (config.attention_sinks and device.type != "cpu")
    loss = pick(KERNELS, LossRequest(device=device, dtype=dtype, softcap=config.logit_softcap), forced=techniques.loss)
    recompute, adapter = techniques.checkpointing, None
    if recompute == "offload" and device.type == "cpu":  # which is the same memory
        recompute = "full"
    if recipe.lora.rank is not None:
        adapter, count = _adapter_weights(config, recipe.lora), parameters(config).total
        wanted = resolve_dtype(recipe.lora.base, auto=torch.bfloat16).itemsize * count
        base = wanted if base is None or recipe.lora.base == "float32" else base
    return TrainingUse(
        batch_size=ranks.rows(data.batch_size),
        length=data.context,
        accumulation=data.accumulation,
        dtype=str(dtype).removeprefix("torch."),
        masters=parallel.policy == "float32-masters",
        optimizer=recipe.optimizer.kind,
        recompute=recompute,
        compiled=techniques.compile,
        joined=techniques.joined_projections and device.type == "cpu",
        explicit_attention=explicit,
        loss="chunked" if ranks.tensor > 1 else loss.name,  # a head split over ranks always uses that one
        zero=parallel.zero,
        ranks=ranks.size // parallel.replicas,
        replicas=parallel.replicas,
        tensor=ranks.tensor,
        experts=parallel.experts,
        copies=parallel.offload == "optimizer",
        offload=parallel.offload != "none" and device.type != "cpu",
        adapter=adapter,
        keeps_freed=techniques.keep_memory and device.type == "cpu",
        base=0 if adapter is None else base or 0,
        rounded=0 if recipe.qat.bits is None else _rounded(config),
    )


@lru_cache(maxsize=1)  # the same model for many batch sizes
def _adapter_weights(config: ModelConfig, lora: Lora) -> int:
    """Number of trained weights of an adapter."""
    factors = {id(one): one.numel() for own in lora_adapter(config, lora).values() for one in (own.a, own.b)}
    return sum(factors.values())


def _teacher_bytes(source: str, use: TrainingUse) -> int:
    """Bytes of a teacher and its pass, and of both models' logits, logarithms and gradients for a chunk of rows."""
    path = teacher_path(source)
    config, stored = _teacher_facts(path, path.stat().st_mtime_ns)
    tokens, size = use.batch_size * use.length, ITEMSIZE["float32" if use.dtype == "float16" else use.dtype]
    weights = stored or size * parameters(config).total
    step = InferenceUse(batch_size=1, length=1, step=1, weights=weights, row_bytes=0)
    parts = inference_memory(config, step).parts
    rows = min(tokens, rows_of_a_chunk(config.vocab_size))
    return weights + tokens * parts["activations"] + 8 * 4 * rows * config.vocab_size


@lru_cache(maxsize=1)
def _teacher_facts(path: Path, _changed: int) -> tuple[ModelConfig, int]:
    """A teacher's config, and its bytes if it is quantized, else 0."""
    source = open_checkpoint(path)
    return source.config, 0 if source.quantized is None else held_bytes(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """Checks whether training a recipe fits.

    base: bytes of the initial checkpoint. free: bytes for this process.
    """

    config: ModelConfig
    recipe: Recipe
    device: torch.device
    ranks: Ranks = ALONE
    base: int | None = None
    free: int = 0

    @classmethod
    def here(
        cls, config: ModelConfig, recipe: Recipe, device: torch.device, *, source: ModelSource | None, ranks: Ranks
    ) -> "MemoryCheck":
        """Create a check with the memory that is free now. source: the checkpoint that the recipe starts from."""
        free = available_memory(device)
        if device.type == "cpu":  # shared by all processes of this machine
            free //= ranks.local_size
        if recipe.run.fit:
            free = int(ranks.broadcast_from_rank0(free))  # so that all ranks decide alike
        base = None if source is None else held_bytes(source)
        return cls(config=config, recipe=recipe, device=device, ranks=ranks, base=base, free=free)

    def memory(self, data: Data | None = None) -> Memory:
        """Memory of a step; data: sizes of batches other than the recipe's."""
        recipe = self.recipe if data is None else replace(self.recipe, data=data)
        use = training_use(self.config, recipe, self.device, base=self.base, ranks=self.ranks)
        memory = training_memory(self.config, use)
        return memory if recipe.teacher is None else memory.beside(teacher=_teacher_bytes(recipe.teacher, use))

    def fits(self, data: Data) -> bool:
        """Whether a step with these sizes of batches fits."""
        return self.memory(data).peak <= self.free

    def fitted(self) -> "MemoryCheck":
        """With `run.fit`, divide the recipe's rows into as few micro-batches as fit; else return this check."""
        if not self.recipe.run.fit:
            return self
        data, size = self.recipe.data, self.ranks.readers
        rows = data.batch_size * data.accumulation
        for count in range(1, rows // size + 1):
            divided = replace(data, batch_size=rows // count, accumulation=count)
            if rows % (count * size) == 0 and self.fits(divided):
                return replace(self, recipe=replace(self.recipe, data=divided))
        return self

    def check(self) -> str:
        """Say in a line what would fit. Raises ResourceError, with the field to lower, if the recipe does not."""
        need, data, size = self.memory(), self.recipe.data, self.ranks.readers
        remedy = f"lower data.batch_size (now {data.batch_size}) and raise data.accumulation by as much, as --fit does"
        if data.batch_size == size:
            remedy = f"lower data.context (now {data.context}), model.layers or model.hidden_size"
        if not self.fits(replace(data, batch_size=size, context=2, accumulation=1)):
            remedy = "lower model.layers or model.hidden_size"
        what = f"training {self.recipe.name!r} with batches of {data.batch_size} x {data.context} tokens"
        if self.recipe.teacher is not None:
            remedy += ", or use a smaller teacher"
        need.require(what, self.free, self.device, remedy=remedy)
        rows = size * largest(lambda count: self.fits(replace(data, batch_size=count * size)), most=1 << 20)
        length = largest(lambda count: self.fits(replace(data, context=count)), most=self.config.max_positions)
        return (
            f"batches of {data.batch_size} x {data.context} tokens take {need.peak / 1e9:.1f} of {self.free / 1e9:.1f} "
            f"GB; up to {rows:,} rows would fit, or {length:,} tokens in a row"
        )


def step_memory(config: ModelConfig, recipe: Recipe, device: torch.device, *, ranks: Ranks = ALONE) -> Memory:
    """Memory that a step of a recipe takes in one process."""
    return MemoryCheck(config=config, recipe=recipe, device=device, ranks=ranks).memory()


def _rounded(config: ModelConfig) -> int:
    """Number of weights that QAT rounds."""
    return sum(matrices(config, layer)[0] - head_products(config) for layer in config.layers)
