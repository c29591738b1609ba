"""The engine of texts that are known when it is made: `hasten.generate`, `stream` and `Chat` continue them with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hasten.engine import kept
from hasten.engine.admission import settings_on_device, state_places
from hasten.engine.blocks import blocks_of
from hasten.engine.cache import READ_STEP, KVCache, row_format
from hasten.engine.engine import Engine
from hasten.engine.following import capture_steps
from hasten.engine.params import KVCacheDtype
from hasten.engine.runner import ModelRunner
from hasten.engine.settings import EngineSettings
from hasten.engine.side_by_side import SideBySideRunner
from hasten.engine.speculation import Speculator
from hasten.errors import ConfigError
from hasten.model.fused import is_fused
from hasten.model.transformer import Transformer

_FIXED_STEP = 128  # compiled steps are compiled for each size of a cache: it is a multiple of this
_CPU_BUDGET = 4096  # tokens of prompts that are read at once, which bounds the memory of the activations


def engine_for(
    model: Transformer,
    lengths: Sequence[int],
    *,
    compiled: bool = False,
    kv_cache_dtype: KVCacheDtype = "auto",
    speculator: Speculator | None = None,
    prefix_cache: bool = False,
    capture: bool = True,
    bounded: bool = True,
) -> Engine:
    """An engine with room for texts of these lengths, prompt and answer together, all at once.

    compiled: the model's blocks are (`compile_blocks`). prefix_cache: a text may begin with blocks of one before it.
    capture: on a GPU, capture steps. bounded: blocks to which no query looks back any more are used again. Every rank
    that holds a part of the model makes an engine, and all of them take the same steps.
    """
    reads_states = speculator is not None and speculator.reader is not None
    if compiled and reads_states:
        raise ConfigError("the draft mtp reads the model's states, which compiled blocks do not give; take suffix")
    settings = EngineSettings(
        max_sequences=len(lengths),
        token_budget=max(_CPU_BUDGET, len(lengths)) if model.device.type == "cpu" else None,
        max_length=max(lengths),
        kv_cache_dtype=kv_cache_dtype,
        prefix_cache=prefix_cache,
        capture=capture,
    )
    reach = model.config.reach if bounded else None
    if compiled or (not prefix_cache and not reads_states and _reads_one_tensor(model, max(lengths), reach)):
        runner, settings = _side_by_side(model, lengths, settings, compiled)
    else:
        runner, settings = _in_blocks(model, lengths, settings, reach)
    runner.reach, runner.in_step, runner.chooses_adapters = None if runner.side_by_side else reach, True, False
    return Engine(model, model.tokenizer, settings, runner=runner, speculator=speculator)


def release_engine(engine: Engine) -> None:
    """Let an engine go that has no more texts; what the model's next one can use of it is kept."""
    kept.keep(engine.runner, engine.settings)
    engine.close()


def _side_by_side(
    model: Transformer, lengths: Sequence[int], settings: EngineSettings, compiled: bool
) -> tuple[ModelRunner, EngineSettings]:
    """One block a text, and all prompts in one step."""
    step = _FIXED_STEP if compiled else READ_STEP
    capacity = max(max(lengths), min(-(-max(lengths) // step) * step, model.config.max_positions))
    cache = KVCache.of_texts(
        model.config,
        batch=len(lengths),
        capacity=capacity,
        dtype=model.compute_dtype,
        device=model.device,
        row_format=row_format(settings.kv_cache_dtype),
    )
    runner = SideBySideRunner(model, cache, fixed=compiled)
    runner.max_length = max(lengths)
    budget = sum(lengths) + len(lengths)
    return runner, replace(settings, block_size=cache.block_size, token_budget=budget, prefix_cache=False)


def _in_blocks(
    model: Transformer, lengths: Sequence[int], settings: EngineSettings, reach: int | None
) -> tuple[ModelRunner, EngineSettings]:
    """Small blocks, as a server has them."""
    settings = settings_on_device(settings, model)
    size = settings.block_size
    # One block more for each: a sequence begins only where every one that runs can take another block.
    blocks = sum(1 + blocks_of(length, size, reach=reach, step=settings.budget) for length in lengths)
    found = kept.take(model, settings, blocks=blocks)
    if found is not None:
        runner = ModelRunner(model, found.decoder.cache)
        runner.decoder, runner.max_length = found.decoder, found.max_length
        found.decoder.restart()
        return runner, settings
    cache = KVCache(
        model.config,
        blocks=blocks,
        block_size=size,
        dtype=model.compute_dtype,
        device=model.device,
        row_format=row_format(settings.kv_cache_dtype),
        sequences=state_places(settings),
    )
    runner = ModelRunner(model, cache)
    runner.max_length = max(lengths)
    capture_steps(runner, settings)
    return runner, settings


def _reads_one_tensor(model: Transformer, longest: int, reach: int | None) -> bool:
    """Whether the layers' attention reads a text's keys as one tensor: PyTorch's does, on a CPU.

    Over blocks it copies them first. That is for texts far longer than what any layer looks back to, which need not be
    kept, and for texts whose beginnings are shared.
    """
    if model.device.type != "cpu" or is_fused(model):
        return False
    return reach is None or longest <= 2 * reach
