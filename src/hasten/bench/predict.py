"""What a step of a model costs on this machine, measured on a few of its blocks: a plan's times where it is at hand.

Training: steps with one block and with three, whose difference is two blocks; the rest is embedding, head and loss.
Generating: the cost table of speculation, block by block, and the loop around a model that is almost none.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from hasten.bench.generate import RUNGS, GenerateLadder
from hasten.bench.generate_rung import GenerateRung
from hasten.bench.train import TrainRung
from hasten.machine import available_memory
from hasten.machine.processor import last_level_cache_bytes
from hasten.model.config import ModelConfig
from hasten.planning.cost import matrices, parameters

if TYPE_CHECKING:
    from hasten.generation.speculation.cost import StepCost
    from hasten.model.transformer import Transformer
    from hasten.training.recipe import Recipe

ROUNDS = 5  # of training steps
LOOP_STEPS = 24  # of a model that is almost none


def training_seconds(config: ModelConfig, recipe: Recipe) -> float | None:
    """Seconds of a step on the CPU, blocks not compiled; None where not even three blocks have room."""
    import torch

    from hasten.training.layer_drop import keep_probabilities
    from hasten.training.memory import step_memory

    plain = replace(recipe, techniques=replace(recipe.techniques, compile=False, layer_drop=None))
    first, *others = Counter(config.layers)  # the kinds of blocks
    cuts = [replace(config, layers=layers) for layers in ((first,), (first,) * 3, *((first, k, k) for k in others))]
    if sum(step_memory(cut, plain, torch.device("cpu")).peak for cut in cuts) > available_memory():
        return None
    rungs = [TrainRung(recipe=plain.to_json(), config=cut, steps=1, device="cpu") for cut in cuts]
    rounds = [[rung.measure()["milliseconds_per_batch"] / 1e3 for rung in rungs] for _ in range(1 + ROUNDS)]
    one, *more = (median(own[1:]) for own in zip(*rounds, strict=True))
    each = {kind: (seconds - one) / 2 for kind, seconds in zip((first, *others), more, strict=True)}
    theta, count = recipe.techniques.layer_drop, len(config.layers)
    kept = [1.0] * count if theta is None else keep_probabilities(count, theta=theta)
    return one - each[first] + sum(share * each[layer] for share, layer in zip(kept, config.layers, strict=True))


@dataclass(frozen=True, slots=True)
class GeneratingCost:
    """cost: of the model's steps. loop: seconds around each."""

    cost: StepCost
    loop: float

    def prompts(self, tokens: int, *, batch: int, step: int) -> float:
        """Seconds to take in so many prompts, `step` tokens at once."""
        return batch * self.cost.seconds(tokens, 0) + -(-tokens * batch // step) * self.loop

    def token(self, context: int, *, batch: int) -> float:
        """Seconds for one token of each sequence, whose contexts are read one by one."""
        return self.cost.seconds(batch, 0) + batch * context * self.cost.per_token[0] + self.loop


def generating_cost(
    config: ModelConfig, *, weights: str, batch: int, prompt: int, served: bool, seconds: float = 2.0
) -> GeneratingCost | None:
    """Measured on so many blocks that the processor's caches cannot hold them; None where they have no room."""
    from hasten.generation.speculation.cost import measure_step_cost

    block = 2 * matrices(config, config.layers[0])[0]
    held = block / {"int8": 2, "int4": 4}.get(weights.partition("-")[0], 1)
    cut = replace(config, layers=config.layers[: max(2, round(4 * last_level_cache_bytes() / held))])
    if 6 * parameters(cut).total > available_memory():
        return None
    model = random_model(cut, weights)
    rows = sorted({1, batch, prompt})
    cost = measure_step_cost(model, row_counts=rows, seconds=seconds, layers=len(config.layers))
    return GeneratingCost(cost, _served_loop(batch) if served else _loop(batch))


def random_model(config: ModelConfig, weights: str) -> Transformer:
    """Random weights in a format, fused where that fits."""
    from hasten.machine import resolve_dtype
    from hasten.model.fused import fuse_where_it_fits
    from hasten.model.initialize import initialize
    from hasten.quantization import Int4, Int8, quantize

    kind, _, group = weights.partition("-g")
    packed = kind in ("int8", "int4")
    model = initialize(config, seed=0, dtype=resolve_dtype("bfloat16" if packed else weights)).eval()
    if packed:
        quantize(model, Int8() if kind == "int8" else Int4(group_size=int(group or 128), search="minmax"))
    return fuse_where_it_fits(model)


def _loop(batch: int) -> float:
    """Seconds of a step of the smallest model."""
    ladder = GenerateLadder(
        shape="tiny", batches=(batch,), prompt_tokens=8, new_tokens=LOOP_STEPS, dtype="bfloat16", device="cpu"
    )
    rung = GenerateRung(ladder=ladder, mode=RUNGS["native-bf16"])
    return batch / median(rung.measure()["decode_tokens_per_second"] for _ in range(ROUNDS))


def _served_loop(batch: int) -> float:
    """The same in the engine."""
    from hasten.generation.params import SamplingParams
    from hasten.planning.shapes import shape_config
    from hasten.serving.engine import Engine
    from hasten.serving.request import Request
    from hasten.serving.settings import EngineSettings

    engine = Engine(random_model(shape_config("tiny"), "bfloat16"), None, EngineSettings(cache_bytes=64 << 20))
    params = SamplingParams(temperature=0, max_new_tokens=LOOP_STEPS, ignore_eos=True)
    for number in range(batch):
        engine.add(Request(id=str(number), prompt=(number,) * 8, params=params))
    times = []
    while not engine.idle:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return median(times[2:-1])
