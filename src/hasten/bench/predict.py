"""What a step of a model costs on this machine, measured on a few of its blocks: a plan's times where it is at hand."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from hasten.bench.train import TrainRung
from hasten.engine.engine import Engine
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import KVCacheDtype, SamplingParams
from hasten.engine.request import Request
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation.build import first_layers
from hasten.machine import available_memory, resolve_dtype
from hasten.machine.processor import last_level_cache_bytes
from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.fused import fuse_where_it_fits
from hasten.model.initialize import initialize
from hasten.model.transformer import Transformer
from hasten.ops.draw import likeliest
from hasten.ops.linear.weights import INT4_GROUP
from hasten.planning.cost import kv_bytes_per_token, matrices, parameters
from hasten.planning.memory import InferenceUse
from hasten.quantization import Int4, Int8, quantize
from hasten.training.layer_drop import keep_probabilities
from hasten.training.memory import step_memory
from hasten.training.recipe import Parallel, Recipe

ROUNDS = 5  # of training steps


def step_seconds(config: ModelConfig, recipe: Recipe) -> float | None:
    """Seconds of a training step, its blocks not compiled, from steps of a model with one block and with three.

    Their difference is two blocks; the rest is embedding, head and loss. None where they have no room.
    """
    alone = Parallel(policy=recipe.parallel.policy)  # what several processes share is planned, not measured
    plain = replace(recipe, parallel=alone, techniques=replace(recipe.techniques, compile=False, layer_drop=None))
    first, *others = Counter(config.layers)  # the kinds of blocks
    cuts = [replace(config, layers=layers) for layers in ((first,), (first,) * 3, *((first, k, k) for k in others))]
    if sum(step_memory(cut, plain, torch.device("cpu")).peak for cut in cuts) > available_memory():
        return None
    rungs = [TrainRung(recipe=plain, config=cut, steps=1, device="cpu") for cut in cuts]
    rounds = [[rung.measure()["milliseconds_per_batch"] / 1e3 for rung in rungs] for _ in range(1 + ROUNDS)]
    one, *more = (median(own[1:]) for own in zip(*rounds, strict=True))
    each = {kind: (seconds - one) / 2 for kind, seconds in zip((first, *others), more, strict=True)}
    theta, count = recipe.techniques.layer_drop, len(config.layers)
    kept = [1.0] * count if theta is None else keep_probabilities(count, theta=theta)
    return one - each[first] + sum(share * each[layer] for share, layer in zip(kept, config.layers, strict=True))


@dataclass(frozen=True, slots=True)
class Generating:
    """Measured seconds: to read one prompt of a use, and of a step that gives each sequence a token, by batch size."""

    prompt: float
    steps: dict[int, float]


def generating_seconds(
    config: ModelConfig, use: InferenceUse, batches: Iterable[int], weights: str, *, cache: KVCacheDtype, served: bool
) -> Generating | None:
    """Time a model of the use's first layers, and of half as many: the difference is what further layers take.

    Steps are those of a server's engine (served), or of texts in the middle of a use's answers. The layers are as many
    as the processor's caches cannot hold. None where they have no room.
    """
    held = matrices(config, config.layers[0])[0] * {"int8": 1, "int4": 0.5}.get(weights.partition("-")[0], 2)
    cut = replace(config, layers=config.layers[: _timed(config.layers, round(4 * last_level_cache_bytes() / held))])
    if 6 * parameters(cut).total > available_memory():
        return None
    whole, others = random_model(cut, weights), config.layers[len(cut.layers) :]
    half = first_layers(whole, len(cut.layers) // 2) if others else whole

    def size(layers: Sequence[LayerConfig]) -> int:
        return sum(matrices(config, layer)[0] for layer in layers)

    more = size(others) / size(cut.layers[len(half.config.layers) :]) if others else 0.0

    def scaled(measure: Callable[[Transformer], float]) -> float:
        """Seconds of all layers, from those of the two models."""
        seconds = measure(whole)
        return seconds + more * max(0.0, seconds - measure(half)) if more else seconds

    reading, context = use.length - use.new_tokens, use.length - use.new_tokens // 2
    room = available_memory() // 4 // kv_bytes_per_token(cut, 4)  # tokens whose cache is small beside what is free
    # Seconds for each token of context, in all layers with attention.
    each = token_seconds(whole, context, cache) * attending(config.layers) / attending(cut.layers)
    steps = {}
    for batch in {*batches}:
        reached = 0 if served else max(1, min(context, room // batch))
        if served:
            step = scaled(partial(engine_step, sequences=batch))
        else:
            step = scaled(partial(text_step, sequences=batch, context=reached, cache=cache))
        steps[batch] = step + batch * (context - reached) * each
    return Generating(scaled(partial(prompt_seconds, length=reading, most=use.step)), steps)


def attending(layers: Sequence[LayerConfig]) -> int:
    """Number of layers with attention."""
    return sum(layer.attends for layer in layers)


def _timed(layers: Sequence[LayerConfig], least: int) -> int:
    """Number of first layers to time: `least` or more, and attention in each half of them."""
    first = next(i for i, layer in enumerate(layers, 1) if layer.attends)
    counts = range(max(2 * first, least), len(layers))
    return next((count for count in counts if attending(layers[count // 2 : count])), len(layers))


def prompt_seconds(model: Transformer, length: int, most: int) -> float:
    """Seconds to read a prompt; of a long one the first and the last piece are timed."""
    piece = min(length, most)
    texts, times = GivenTexts(model, batch=1, capacity=length), []
    for start in (0, length - piece):
        own = []
        for _ in range(3):
            texts.suppose(start)
            begun = time.perf_counter()
            likeliest(texts.prefill([[1] * piece])).tolist()
            own.append(time.perf_counter() - begun)
        times.append(median(own))
    return length / piece * sum(times) / len(times)


def token_seconds(model: Transformer, context: int, cache: KVCacheDtype) -> float:
    """Seconds that each token of context adds to a step of one sequence."""
    context = min(max(1024, context), model.config.max_positions - 1)
    near, far = (text_step(model, 1, at, cache) for at in (1, context))
    return max(0.0, far - near) / context


def text_step(model: Transformer, sequences: int, context: int, cache: KVCacheDtype) -> float:
    """Seconds of a step of `hasten.generate` with a token of each of `sequences` texts."""
    texts, times = GivenTexts(model, batch=sequences, capacity=context + 1, kv_cache_dtype=cache), []
    token = torch.ones(sequences, dtype=torch.int64)
    texts.suppose(max(0, context - 11))
    for _ in range(min(12, context + 1)):
        start = time.perf_counter()
        likeliest(texts.decode(token)).tolist()
        times.append(time.perf_counter() - start)
    return median(times)


def engine_step(model: Transformer, sequences: int) -> float:
    """Seconds of a step of a server's engine: a token of each of some short sequences."""
    settings = EngineSettings(max_length=32, max_sequences=sequences, token_budget=max(512, 16 * sequences))
    engine, times = Engine(model, None, settings), []
    params = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    for number in range(sequences):
        engine.add(Request(id=f"{number}", prompt=(1,) * 8, params=params))
    while not engine.idle:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.close()
    return median(times)


def random_model(config: ModelConfig, weights: str) -> Transformer:
    """Random weights in a format, fused where that fits."""
    kind, _, group = weights.partition("-g")
    packed = kind in ("int8", "int4")
    model = initialize(config, seed=0, dtype=resolve_dtype("bfloat16" if packed else weights)).eval()
    if packed:
        quantize(model, Int8() if kind == "int8" else Int4(group_size=int(group or INT4_GROUP), search="minmax"))
    return fuse_where_it_fits(model)
