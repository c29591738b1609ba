"""Sets a run up before its first step: data, model, optimizer and training step."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hasten.checkpoints.load import open_checkpoint
from hasten.checkpoints.source import ModelSource
from hasten.data import Batches, TokenData, prepare
from hasten.data.packing import longest_document
from hasten.distributed.ranks import ALONE, Ranks
from hasten.errors import ConfigError, HastenError
from hasten.machine import ProductPrecision, configure, matrix_rate, resolve_device
from hasten.model.config import ModelConfig
from hasten.model.initialize import Weights, initialize
from hasten.model.transformer import Transformer
from hasten.planning.cost import training_flops_per_token
from hasten.training.build import (
    divided_at_once,
    model_and_weights,
    pretrained_model,
    shape_config,
    training_config,
    training_step,
)
from hasten.training.evaluate import Validation
from hasten.training.memory import MemoryCheck
from hasten.training.patterns import with_pattern
from hasten.training.precision import choose_precision
from hasten.training.rank_checks import check_ranks, check_shares
from hasten.training.recipe import Recipe
from hasten.training.step import TrainStep

CONTEXT_MULTIPLE = 64  # of a context that is fitted to the data


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the loop works with.

    recipe: with precision, context and micro-batches decided. precision: of the matrix products, with the reason.
    notes: lines for people: what would fit, and how conversations are packed. flops_per_token: training FLOPs of the
    whole model; block_flops: the part of each block. rate: measured FLOP/s of matrix products, None if not measured.
    """

    recipe: Recipe
    precision: ProductPrecision
    notes: tuple[str, ...]
    data: TokenData
    batches: Batches
    validation: Validation | None
    model: Transformer
    step: TrainStep
    flops_per_token: float
    block_flops: tuple[float, ...]
    rate: float | None

    @property
    def validation_batches(self) -> int:
        """Number of batches that a measurement of the validation loss reads."""
        return 0 if self.validation is None else self.validation.batches


def prepare_data(recipe: Recipe, *, init: Path | None, progress: bool) -> TokenData:
    """Prepare the token shards of the recipe's text, with the tokenizer of the model `init` unless one is named."""
    data = recipe.data
    return prepare(
        data.source,
        tokenizer=data.tokenizer or init,
        tokenizer_kind=data.tokenizer_kind,
        vocab_size=data.vocab_size,
        validation_fraction=data.validation_fraction,
        text_field=data.text_field,
        limit_bytes=data.limit_bytes,
        progress=progress,
    )


def set_up(
    recipe: Recipe,
    *,
    progress: bool,
    ranks: Ranks = ALONE,
    should_stop: Callable[[], bool] = lambda: False,
    begun: Recipe | None = None,
) -> Setup:
    """Prepare the data, check that the run fits into memory, then create the model and its step.

    should_stop: called between micro-batches. begun: recipe of the run that is resumed; its precision is kept, and the
    trained weights will be read from its checkpoint. Raises as `train` does.
    """
    check_ranks(recipe, ranks)
    recipe, precision = choose_precision(recipe, begun, ranks=ranks)
    device, seed = own_device(recipe, ranks), recipe.run.seed + ranks.rank
    configure(threads=recipe.run.threads, seed=seed, processes=ranks.local_size)
    source = None if recipe.init is None else open_checkpoint(recipe.init)
    data = prepare_data(recipe, init=None if source is None else source.path, progress=progress)
    recipe = fit_context(recipe, data, source)
    config = model_config(recipe, data, source)
    check_shares(config, recipe.parallel)
    memory = MemoryCheck.here(config, recipe, device, source=source, ranks=ranks).fitted()
    recipe, note = memory.recipe, memory.check()
    batches, validation = make_batches(recipe, data, ranks), make_validation(recipe, data, ranks)
    model, weights = make_model(config, recipe, source, data, device, ranks)
    if ranks.size > 1:
        same = {"torch": torch.__version__, "data": data.folder.name, "weights": _fingerprint(model, source)}
        ranks.require_same(same)
    restored = begun is not None
    step = training_step(model, recipe, ranks=ranks, should_stop=should_stop, restored=restored, weights=weights)
    # No utilization for LoRA, which computes no gradients of frozen weights: the FLOPs would be too many.
    rate = _rate(step.precision.dtype, device) if recipe.lora.rank is None else None
    # Seed last: measuring consumes a varying number of random draws.
    torch.manual_seed(seed)
    random.seed(seed)
    flops, block_flops = _flops(model.config, recipe.data.context)
    return Setup(
        recipe=recipe,
        precision=precision,
        notes=(note,) if batches.packing is None else (note, batches.packing.describe(recipe.data.context)),
        data=data,
        batches=batches,
        validation=validation,
        model=model,
        step=step,
        flops_per_token=flops,
        block_flops=block_flops,
        rate=rate,
    )


def fit_context(recipe: Recipe, data: TokenData, source: ModelSource | None) -> Recipe:
    """With `data.fit_context`, shorten the context to what the longest conversation needs; else return the recipe."""
    if not recipe.data.fit_context:
        return recipe
    most = recipe.data.context
    if source is not None:
        most = min(most, source.config.max_positions)
    if data.train.weights is not None:
        longest = max(longest_document(data.train), longest_document(data.validation))
        most = min(most, -(-(longest - 1) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE)
    return replace(recipe, data=replace(recipe.data, context=most))


def own_device(recipe: Recipe, ranks: Ranks) -> torch.device:
    """The device of this process: of several GPUs the one with its local rank."""
    device = resolve_device(recipe.run.device)
    return device if device.type == "cpu" or ranks.local_size == 1 else resolve_device(f"cuda:{ranks.local_rank}")


def model_config(recipe: Recipe, data: TokenData, source: ModelSource | None) -> ModelConfig:
    """The config of the model to train. Raises ConfigError if it does not fit the tokenizer or the context."""
    context, vocab = recipe.data.context, data.tokenizer.vocab_size
    if source is None:
        config = shape_config(recipe.model, vocab_size=vocab, positions=context, tokenizer=data.tokenizer)
        return training_config(recipe, config)
    config, init = with_pattern(source.config, recipe.model), source.path
    if vocab > config.vocab_size:
        raise ConfigError(
            f"the tokenizer {recipe.data.tokenizer or init} has {vocab:,} tokens and the model {init} "
            f"{config.vocab_size:,}; use the model's own tokenizer (leave out --data.tokenizer)"
        )
    if context > config.max_positions:
        raise ConfigError(
            f"data.context is {context:,} and the model {init} has {config.max_positions:,} positions; lower "
            "data.context"
        )
    return training_config(recipe, config)


def make_batches(recipe: Recipe, data: TokenData, ranks: Ranks) -> Batches:
    """Batches of the rows that this rank trains on."""
    return Batches(
        data.train,
        batch_size=ranks.rows(recipe.data.batch_size),
        sequence_length=recipe.data.context,
        seed=recipe.run.seed,
        rank=ranks.reader,
        world_size=ranks.readers,
        workers=recipe.data.workers,
        documents=recipe.data.separate_documents,
    )


def make_validation(recipe: Recipe, data: TokenData, ranks: Ranks) -> Validation | None:
    """The measurement of the validation loss; None if no text is held out."""
    if not recipe.data.validation_fraction:
        return None
    return Validation(
        data.validation,
        batch_size=recipe.data.batch_size,
        sequence_length=recipe.data.context,
        batches=recipe.run.validation_batches,
        ranks=ranks,
    )


def make_model(
    config: ModelConfig,
    recipe: Recipe,
    source: ModelSource | None,
    data: TokenData,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> tuple[Transformer, Weights | None]:
    """Create the model, without techniques: with random weights, or those of the checkpoint `source`.

    Where ranks divide them, the model has no memory for its weights, and these are the second value.
    """
    weights = None
    if divided_at_once(recipe, ranks, source):
        model, weights = model_and_weights(source, config, recipe, device=device, ranks=ranks)
    elif source is not None:
        model = pretrained_model(source, recipe, device=device)
    else:
        model = initialize(config, seed=recipe.run.seed, device=device)
    if source is None:
        eos = next(iter(data.tokenizer.eos_ids), None)
        model.generation = {} if eos is None else {"bos_token_id": data.tokenizer.bos_id, "eos_token_id": eos}
    model.tokenizer = data.tokenizer
    return model, weights


def _fingerprint(model: Transformer, source: ModelSource | None) -> str:
    """A value that differs where ranks have other weights: their sum, of a file that none reads whole its vectors'."""
    tensors = list(model.state_dict().values())
    if any(one.is_meta for one in tensors):
        tensors = [] if source is None else [source.read(n) for n, one in source.stored.items() if len(one.shape) == 1]
    return f"{float(sum(one.sum(dtype=torch.float64) for one in tensors)):.6g}"


def _flops(config: ModelConfig, context: int) -> tuple[float, tuple[float, ...]]:
    """Training FLOPs per token of the whole model, and of each block."""
    layers, whole = config.layers, training_flops_per_token(config, context)
    without_each = [replace(config, layers=layers[:i] + layers[i + 1 :]) for i in range(len(layers))]
    return whole, tuple(whole - training_flops_per_token(without, context) for without in without_each)


def _rate(dtype: torch.dtype, device: torch.device) -> float | None:
    """Measured FLOP/s of matrix products, or None."""
    try:
        return matrix_rate(dtype, device=device, seconds=0.5)
    except HastenError:
        return None
