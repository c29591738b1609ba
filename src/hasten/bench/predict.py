"""What a step of a model costs on this machine, measured on a few of its blocks: a plan's times where it is at hand."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import torch

from hasten.bench.train import TrainRung
from hasten.engine.decoder import Decoder
from hasten.engine.engine import Engine
from hasten.engine.params import KVCacheDtype, SamplingParams
from hasten.engine.request import Request
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation.cost import StepCost, measure_step_cost
from hasten.machine import available_memory, resolve_dtype
from hasten.machine.processor import last_level_cache_bytes
from hasten.model.config import ModelConfig
from hasten.model.fused import fuse_where_it_fits
from hasten.model.initialize import initialize
from hasten.model.transformer import Transformer
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


def generating_cost(
    config: ModelConfig, use: InferenceUse, batches: Iterable[int], weights: str, *, cache: KVCacheDtype, served: bool
) -> StepCost | None:
    """What steps of so many sequences cost, and one over a use's prompt, by speculation's cost table; steps of one
    token a sequence as the engine (served), or the decoder in the middle of a use's answer, takes them.

    Measured on so many blocks that the processor's caches cannot hold them; None where they have no room.
    """
    context = use.length - use.new_tokens // 2
    # Of longer prompts the pieces are added up.
    prompt = min(use.length - use.new_tokens, use.step, config.max_positions // 2)
    held = matrices(config, config.layers[0])[0] * {"int8": 1, "int4": 0.5}.get(weights.partition("-")[0], 2)
    cut = replace(config, layers=config.layers[: max(2, round(4 * last_level_cache_bytes() / held))])
    if 6 * parameters(cut).total > available_memory():
        return None
    model = random_model(cut, weights)
    decoded = {1, *batches}
    counts, prompts = sorted({*decoded, prompt}), {prompt} - decoded
    layers, longest = len(config.layers), max(1024, context)
    cost = measure_step_cost(model, row_counts=counts, seconds=2.0, layers=layers, prompts=prompts, longest=longest)
    # The blocks that the whole has besides, and the context that is told apart.
    more = sum(matrices(config, layer)[0] for layer in config.layers[len(cut.layers) :]) / parameters(config).active
    base, seen = list(cost.base), cost.per_token[0] * len(cut.layers) / layers
    room = available_memory() // 4 // kv_bytes_per_token(cut, 4)  # tokens whose cache is small beside what is free
    for at, rows in enumerate(cost.rows):
        if rows in decoded:
            reached = 0 if served else max(1, min(context, room // rows))
            whole = engine_step(model, rows) if served else decoder_step(model, rows, reached, cache)
            whole += more * base[at]
            base[at] = max(whole / 2, whole - rows * reached * seen)
    return StepCost(cost.rows, base, cost.per_token)


def decoder_step(model: Transformer, sequences: int, context: int, cache: KVCacheDtype) -> float:
    """Seconds of a step of the decoder: a token of each of so many sequences."""
    decoder, times = Decoder(model, batch=sequences, capacity=context + 1, kv_cache_dtype=cache), []
    token = torch.ones(sequences, dtype=torch.int64)
    for _ in range(12):
        decoder.lengths = [context] * sequences
        start = time.perf_counter()
        decoder.decode(token).argmax(-1).tolist()
        times.append(time.perf_counter() - start)
    return median(times)


def engine_step(model: Transformer, sequences: int) -> float:
    """Seconds of a step of a server's engine: a token of each of so many short sequences."""
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


def generating_seconds(use: InferenceUse, cost: StepCost) -> tuple[float, float]:
    """Seconds to take all prompts in, and of a token of each sequence."""
    batch, prompt, context = use.batch_size, use.length - use.new_tokens, use.length - use.new_tokens // 2
    piece = max(cost.rows)
    reading = sum(cost.seconds(min(piece, prompt - start), start) for start in range(0, prompt, piece))
    # Each sequence reads its own context; the table's rows share one.
    return batch * reading, cost.seconds(batch, 0) + batch * context * cost.per_token[0]


def random_model(config: ModelConfig, weights: str) -> Transformer:
    """Random weights in a format, fused where that fits."""
    kind, _, group = weights.partition("-g")
    packed = kind in ("int8", "int4")
    model = initialize(config, seed=0, dtype=resolve_dtype("bfloat16" if packed else weights)).eval()
    if packed:
        quantize(model, Int8() if kind == "int8" else Int4(group_size=int(group or INT4_GROUP), search="minmax"))
    return fuse_where_it_fits(model)
