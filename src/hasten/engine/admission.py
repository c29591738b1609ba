"""Which requests are taken: settings that make sense, a length that fits the model, and blocks that exist."""

from __future__ import annotations

import dataclasses
import logging

from hasten.checks import require
from hasten.engine.blocks import blocks_of
from hasten.engine.cache import KVCache, row_format
from hasten.engine.kept import release
from hasten.engine.params import SamplingParams
from hasten.engine.prompts import check_ids, fit
from hasten.engine.request import QueueFull, Request, RequestRefused
from hasten.engine.scheduler import Scheduler
from hasten.engine.settings import EngineSettings
from hasten.engine.state_slots import StateSnapshots
from hasten.errors import ConfigError, ResourceError
from hasten.machine.memory import available_memory
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

_CAPTURED = 1 << 30  # bytes that stay free for captured steps on a GPU


def admitted(
    request: Request, model: Transformer, settings: EngineSettings, scheduler: Scheduler, *, max_length: int
) -> Request:
    """The request with its answer cut to the length there is; raises RequestRefused, with the numbers."""
    try:
        check_request(request, vocab_size=model.config.vocab_size)
        check_ids(model, request.prompt)
        prompt = len(request.prompt)
        if not prompt:
            raise ConfigError("the prompt has no tokens; give at least one")
        if request.samples > settings.max_sequences:
            raise RequestRefused(
                f"{request.samples} samples or beams were asked for; the engine runs {settings.max_sequences} at most",
                field="best_of" if request.samples > request.n else "n",
            )
        if prompt >= max_length:
            raise ConfigError(f"the prompt has {prompt} tokens; prompt and answer may have {max_length} together")
        params = fit(request.params, prompt, model, length=max_length)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    length = prompt + params.max_new_tokens - 1  # the last token's keys are never needed
    needed = scheduler.most_blocks(length)
    if request.beam_width:  # beams need each other: all of them at once; the prompt is common while nothing is left
        whole = needed * settings.block_size >= length
        found = settings.prefix_cache and whole and not model.config.keeps_states  # again, after they lost their blocks
        common = prompt // settings.block_size if found else 0
        needed = common + request.beam_width * (needed - common)
    if needed > scheduler.blocks.blocks:
        raise RequestRefused(
            f"{prompt} tokens of prompt and {params.max_new_tokens} of answer need {needed} blocks of "
            f"{settings.block_size} tokens; the cache has {scheduler.blocks.blocks}: ask for less, or enlarge the cache"
        )
    return request if params is request.params else dataclasses.replace(request, params=params)


def settings_on_device(settings: EngineSettings, model: Transformer) -> EngineSettings:
    """The settings with the defaults of the model's device.

    Raises ConfigError for a prefix cache on disk where layers keep states: its files hold none.
    """
    if model.config.keeps_states and not isinstance(settings.prefix_cache, bool):
        raise ConfigError(
            f"--prefix-cache DIR keeps blocks, and the layers of a {model.config.family} keep states beside them; "
            "leave it out: beginnings of texts are kept in memory"
        )
    if model.device.type == "cpu":
        return settings
    from hasten.planning.cost import parameters  # only here, as below: generating on a CPU needs none of it

    return settings.on(model.device.type, weights=parameters(model.config).active)


def with_room_for_states(settings: EngineSettings, model: Transformer, *, head_states: int = 0) -> EngineSettings:
    """The settings with as many sequences as have room for the states of layers, in half of the cache's memory.

    head_states: as in `InferenceUse`. Raises ResourceError where not even one has.
    """
    each = bytes_of_states(model, dataclasses.replace(settings, max_sequences=1))
    if not each:
        return settings
    allowed, whence = cache_memory(model, settings, head_states=head_states)
    fits = allowed // 2 // each
    if not fits:
        raise ResourceError(
            f"half of {whence} is {allowed // 2:,} bytes; the states of one sequence take {each:,}: give the cache more"
        )
    if fits >= settings.max_sequences:
        return settings
    logging.getLogger("hasten.engine").warning(
        "%d sequences run at the same time instead of %d: the states of each take %.1f MB",
        *(fits, settings.max_sequences, each / 1e6),
    )
    return dataclasses.replace(settings, max_sequences=fits)


def check_room(waiting: int, *, more: int, limit: int, pace: float) -> None:
    """Raise QueueFull if `more` requests have no room beside those that wait, RequestRefused if they never have.

    pace: seconds from one end of a request to the next.
    """
    if more > limit:
        raise RequestRefused(f"{more} prompts came together; the queue (queue_limit) has room for {limit}")
    if waiting + more > limit:
        message = f"{waiting} requests wait already, the limit is {limit}; try again later"
        raise QueueFull(message, retry_after=max(1.0, pace))


def check_request(request: Request, *, vocab_size: int) -> None:
    """Raise ConfigError for settings of a wrong type, that exclude each other, or that mean nothing.

    What would be found out in a step is found out here: an exception there ends everybody's requests.
    """
    require(request)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(request, name) or 0) > vocab_size:
            raise ConfigError(f"{name} is {getattr(request, name)}; the vocabulary has {vocab_size} tokens")
    if request.best_of is not None and request.best_of < request.n:
        raise ConfigError(f"best_of is {request.best_of}, below n, which is {request.n}")
    for name in ("logit_bias", "stop_token_ids"):
        highest = max(getattr(request.params, name), default=0)
        if highest >= vocab_size:
            raise ConfigError(f"{name} names token {highest}; the vocabulary has {vocab_size} tokens")
    if sum(bias == float("-inf") for bias in request.params.logit_bias.values()) >= vocab_size:
        raise ConfigError(f"logit_bias forbids (-inf) all {vocab_size} tokens of the vocabulary; leave one")
    if request.beam_width:
        _check_beams(request)


def _check_beams(request: Request) -> None:
    neutral = SamplingParams(temperature=0)
    if request.n > request.beam_width:
        raise ConfigError(f"n is {request.n}, above beam_width, which is {request.beam_width}")
    if request.best_of is not None:
        raise ConfigError("beam search keeps the best beams by itself; leave best_of out")
    if request.params.temperature not in (0, 1):
        raise ConfigError("beam search draws nothing: temperature must be left out or 0")
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    for name in names:
        if getattr(request.params, name) != getattr(neutral, name):
            raise ConfigError(f"beam search ranks by the model's own probabilities: leave {name} out")
    if request.constraint is not None:
        raise ConfigError("beam search and structured output cannot be combined; draw samples instead")
    if request.params.stop:
        raise ConfigError("beam search ends texts at token ids: leave stop out, or use stop_token_ids")


def cache_blocks(model: Transformer, settings: EngineSettings, *, max_length: int, head_states: int = 0) -> int:
    """How many blocks the cache gets: what all sequences could need, or as many as the memory allows.

    head_states: as in `InferenceUse`.
    """
    size, states = bytes_per_block(model, settings), bytes_of_states(model, settings)
    most = settings.max_sequences * most_blocks(model, settings, max_length)
    allowed, whence = cache_memory(model, settings, head_states=head_states)
    if allowed - states < size:
        beside = f" beside {states:,} of states" if states else ""
        raise ResourceError(
            f"{whence} is {allowed:,} bytes; one block of {settings.block_size} tokens takes {size:,}{beside}"
        )
    return min(most, (allowed - states) // size)


def cache_memory(model: Transformer, settings: EngineSettings, *, head_states: int = 0) -> tuple[int, str]:
    """Bytes that the cache may take, and which limit that is. head_states: as in `InferenceUse`."""
    if settings.cache_bytes is not None:
        return settings.cache_bytes, "cache_bytes"
    release(model)
    free = available_memory(model.device) // (model.group.size if isinstance(model, ShardedTransformer) else 1)
    if not settings.fit:
        return int(free * settings.cache_share), f"{settings.cache_share:.0%} of the free memory"
    from hasten.planning.memory import InferenceUse, inference_memory  # only here: it takes a while to import

    step = settings.budget
    use = InferenceUse(
        batch_size=settings.max_sequences, length=step, step=step, weights=0, row_bytes=0, head_states=head_states
    )
    captured = _CAPTURED if settings.capture and model.device.type == "cuda" else 0
    # A step's memory counts the states, which are the cache's own.
    states = settings.max_sequences * KVCache.bytes_per_sequence(model.config, model.compute_dtype)
    return free - inference_memory(model.config, use).peak + states - captured, "what is free beside a step"


def room(model: Transformer, settings: EngineSettings, *, blocks: int, max_length: int) -> str:
    """A line on the largest batch and the longest context that the cache holds."""
    tokens, each = blocks * settings.block_size, most_blocks(model, settings, max_length)
    longest = model.config.max_positions
    if most_blocks(model, settings, longest) > blocks:
        longest = min(tokens, longest)
    size = bytes_per_block(model, settings)
    more = "" if settings.fit else f"; {available_memory(model.device) // size * settings.block_size:,} more would fit"
    whole = blocks * size + bytes_of_states(model, settings)
    return (
        f"the cache ({whole / 1e9:.2f} GB) holds {tokens:,} tokens: {blocks // each:,} sequences of "
        f"{max_length:,}, or one of {longest:,}{more}"
    )


def most_blocks(model: Transformer, settings: EngineSettings, tokens: int) -> int:
    """Blocks that a sequence of `tokens` tokens has at once."""
    return blocks_of(tokens, settings.block_size, reach=model.config.reach, step=settings.budget)


def bytes_per_block(model: Transformer, settings: EngineSettings) -> int:
    """Bytes of a block in all layers together."""
    rows, dtype = row_format(settings.kv_cache_dtype), model.compute_dtype
    return KVCache.bytes_per_block(model.config, block_size=settings.block_size, dtype=dtype, row_format=rows)


def state_places(settings: EngineSettings) -> int:
    """Places for states of layers: one for each sequence, and with a prefix cache as many for snapshots."""
    return settings.max_sequences * (2 if settings.prefix_cache else 1)


def snapshots_of(settings: EngineSettings, model: Transformer) -> StateSnapshots | None:
    """The snapshots of states, behind the places of the sequences; None where there are none."""
    if not model.config.keeps_states or not settings.prefix_cache:
        return None
    first = settings.max_sequences
    return StateSnapshots(first=first, count=state_places(settings) - first, block_size=settings.block_size)


def bytes_of_states(model: Transformer, settings: EngineSettings) -> int:
    """Bytes of what layers keep of all sequences, and of snapshots, beside the blocks."""
    return state_places(settings) * KVCache.bytes_per_sequence(model.config, model.compute_dtype)


def longest(model: Transformer, settings: EngineSettings) -> int:
    """Tokens that prompt and answer may have together."""
    positions = model.config.max_positions
    return min(positions, settings.max_length or positions)
