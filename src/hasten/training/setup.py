"""Everything a run needs before its first step: data, model, optimizer, the training step."""

import random
from collections.abc import Callable, Sequence
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
from hasten.model.initialize import initialize
from hasten.model.transformer import Transformer
from hasten.planning.cost import training_flops_per_token
from hasten.training.build import (
    check_ranks,
    check_shares,
    pretrained_model,
    shape_config,
    training_config,
    training_step,
)
from hasten.training.evaluate import Validation
from hasten.training.memory import MemoryCheck
from hasten.training.patterns import with_pattern
from hasten.training.precision import choose_precision
from hasten.training.recipe import Recipe
from hasten.training.step import TrainStep

ROWS = 64  # of which the context that follows the data is a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the loop works with. recipe: as it is trained, precision, context and micro-batches decided.

    precision: of the matrix products, and why. notes: for people, what would fit and how conversations are packed.

    rate: measured FLOP/s of matrix products, if any.

    flops_per_token: of training, all blocks. block_flops: how much of it each block is.
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
        """Batches of one measurement of the validation loss."""
        return 0 if self.validation is None else self.validation.batches

    def mfu(self, tokens_per_second: float, block_scales: Sequence[Sequence[float]] | None = None) -> float | None:
        """Model FLOPs utilisation (arXiv 2204.02311, appendix B), against the rate measured on this machine.

        block_scales: of the step's micro-batches; a block that was left out does not count.
        """
        if self.rate is None:
            return None
        flops = self.flops_per_token
        for own in block_scales or ():
            flops -= sum(f for f, scale in zip(self.block_flops, own, strict=True) if not scale) / len(
                block_scales or ()
            )
        return flops * tokens_per_second / self.rate


def prepare_data(recipe: Recipe, *, init: Path | None, progress: bool) -> TokenData:
    """The token shards of the recipe's text; with `init` in that model's tokens unless another one is named."""
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
    """Prepare the data, check that the run fits into memory, then build the model and its step.

    should_stop: asked between micro-batches. begun: the recipe of the run that goes on; its precision is kept, and what
    is trained will be read from a checkpoint.
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
    room = MemoryCheck.here(config, recipe, device, source=source, ranks=ranks).fitted()
    recipe, note = room.recipe, room.check()
    rows, context = recipe.data.batch_size, recipe.data.context
    batches = Batches(
        data.train,
        batch_size=ranks.rows(rows),
        sequence_length=context,
        seed=recipe.run.seed,
        rank=ranks.reader,
        world_size=ranks.readers,
        workers=recipe.data.workers,
    )
    validation = None
    if recipe.data.validation_fraction:
        validation = Validation(
            data.validation,
            batch_size=rows,
            sequence_length=context,
            batches=recipe.run.validation_batches,
            ranks=ranks,
        )
    if source is None:
        model = initialize(config, seed=recipe.run.seed, device=device)
        eos = next(iter(data.tokenizer.eos_ids), None)
        model.generation = {} if eos is None else {"bos_token_id": data.tokenizer.bos_id, "eos_token_id": eos}
    else:
        model = pretrained_model(source, recipe, device=device)
    model.tokenizer = data.tokenizer
    if ranks.size > 1:
        weights = torch.stack([t.sum(dtype=torch.float64) for t in model.state_dict().values()]).sum()
        ranks.require_same({"torch": torch.__version__, "data": data.folder.name, "weights": f"{float(weights):.6g}"})
    step = training_step(model, recipe, ranks=ranks, should_stop=should_stop, restored=begun is not None)
    # LoRA computes no gradients of frozen weights: these FLOPs are not its own.
    rate = _rate(step.precision.dtype, device) if recipe.lora.rank is None else None
    # Seed last: measuring consumes a varying number of random draws.
    torch.manual_seed(seed)
    random.seed(seed)
    layers, whole = model.config.layers, training_flops_per_token(model.config, context)
    without_each = [replace(model.config, layers=layers[:i] + layers[i + 1 :]) for i in range(len(layers))]
    return Setup(
        recipe=recipe,
        precision=precision,
        notes=(note,) if batches.packing is None else (note, batches.packing.describe(context)),
        data=data,
        batches=batches,
        validation=validation,
        model=model,
        step=step,
        flops_per_token=whole,
        block_flops=tuple(whole - training_flops_per_token(without, context) for without in without_each),
        rate=rate,
    )


def fit_context(recipe: Recipe, data: TokenData, source: ModelSource | None) -> Recipe:
    """The recipe with rows no longer than its longest conversation needs, where `data.fit_context` asks for it."""
    if not recipe.data.fit_context:
        return recipe
    most = recipe.data.context
    if source is not None:
        most = min(most, source.config.max_positions)
    if data.train.weights is not None:
        longest = max(longest_document(data.train), longest_document(data.validation))
        most = min(most, -(-(longest - 1) // ROWS) * ROWS)
    return replace(recipe, data=replace(recipe.data, context=most))


def own_device(recipe: Recipe, ranks: Ranks) -> torch.device:
    """Where this process computes: of several GPUs the one with its number on this machine."""
    device = resolve_device(recipe.run.device)
    return device if device.type == "cpu" or ranks.local_size == 1 else resolve_device(f"cuda:{ranks.local_rank}")


def model_config(recipe: Recipe, data: TokenData, source: ModelSource | None) -> ModelConfig:
    """The config of the model that is trained. Raises ConfigError where it does not fit the tokens or the context."""
    context, vocab = recipe.data.context, data.tokenizer.vocab_size
    if source is None:
        config = shape_config(recipe.model, vocab_size=vocab, positions=context, tokenizer=data.tokenizer)
        return training_config(recipe, config)
    config, init = with_pattern(source.config, recipe.model), source.path
    if vocab > config.vocab_size:
        raise ConfigError(
            f"the tokenizer {recipe.data.tokenizer or init} has {vocab:,} tokens and the model {init} "
            f"{config.vocab_size:,}; use the model's own tokenizer (leave --data.tokenizer away)"
        )
    if context > config.max_positions:
        raise ConfigError(
            f"data.context is {context:,} and the model {init} knows {config.max_positions:,} positions; lower it"
        )
    return training_config(recipe, config)


def _rate(dtype: torch.dtype, device: torch.device) -> float | None:
    try:
        return matrix_rate(dtype, device=device, seconds=0.5)
    except HastenError:
        return None
