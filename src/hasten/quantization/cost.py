"""What quantizing with calibration samples takes, told before it starts: memory, and time where it is long."""

from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hasten.model.transformer import Transformer
from hasten.ops.pages import return_freed_memory
from hasten.planning.memory import calibration_memory
from hasten.quantization.awq import AWQ
from hasten.quantization.blocks import at_once
from hasten.quantization.schemes import Scheme
from hasten.quantization.sequential import BlockMethod, block_task
from hasten.quantization.sign import SignRounding
from hasten.quantization.walk import PASS_TOKENS, CalibrationWalk, computing_dtype

MAPPED = 32 << 20  # bytes from which glibc gives each tensor memory of its own, which goes back when the tensor dies
WORKSPACE = 32 << 20  # bytes of cuBLAS's workspace on Hopper; a quarter of it on other GPUs


def predicted_bytes(
    model: Transformer,
    tokens: Tensor,
    method: BlockMethod,
    *,
    device: torch.device | None = None,
    spill: bool = False,
) -> int:
    """Bytes beside the checkpoint; where blocks move to another device than the model's, all bytes there.

    GPTQ and AWQ have three matrices as large as a sum over the samples and a quarter of one at work, GPTAQ five; GPTQ
    what the experts of a block are given, AWQ the scaled weights and about as much for a layer that it tries. Sign
    rounding has the states before quantization, eleven copies (weight, offsets, the best and the last ones, what
    rounding keeps for its gradient, and gradients; and a pass's for each further one at a time), what these passes keep
    for their gradient, and then one such sum. Smaller matrices come from glibc's heap, which leaves holes of about
    three copies more (two to five, from run to run).
    """
    device = device or model.device
    moved, size = device != model.device, computing_dtype(model, device).itemsize
    states = tokens.numel() * model.config.hidden_size * size
    walks = 2 if method.needs_before else 1
    lanes = at_once(device)
    counts: dict[str, Any] = {"copies": 0.0, "squares": 3.25 if walks == 1 else 5, "routed": True}
    step = min(tokens.numel(), lanes * max(PASS_TOKENS, tokens.shape[1])) * size
    if isinstance(method, SignRounding):
        largest = max(4 * parameter.numel() for parameter in model.blocks.parameters())
        gradients = (min(lanes, method.batch) - 1) * size / 4
        counts = {"copies": (11 if largest >= MAPPED else 14) + gradients, "squares": 1.25, "routed": False}
        step = 5 * step // 2
    elif isinstance(method, AWQ):
        counts = {"copies": 2.0, "squares": 3.25, "routed": False}
    sizes: dict[str, Any] = {"states": states, "walks": walks, "step": step, "spill": spill or moved, "moved": moved}
    needed = calibration_memory(model.config, **sizes, **counts).peak
    needed += 0 if device.type == "cpu" else WORKSPACE
    return needed + (states if isinstance(method, SignRounding) else 0)


def tuning_seconds(
    model: Transformer, scheme: Scheme, tokens: Tensor, method: SignRounding, *, device: torch.device | None = None
) -> float:
    """Of sign rounding: the first block's third step, as measured, for every step of every block.

    A step goes forward and backward, which is three passes; nine more see all samples (twice the blocks as they were,
    once each as rounded to nearest, with the last parameters and the best, and as it is served; about three for the
    inputs of its layers, by which the outputs' errors are reported).
    """
    walk, times = CalibrationWalk(model, tokens[: method.batch], device=device), [perf_counter()]
    options: dict[str, Any] = {"search": scheme.search, "progress": lambda *_: times.append(perf_counter())}
    with torch.no_grad():
        replace(method, steps=3).quantize_block(block_task(model, 0, scheme.layers(model), [walk, walk], **options))
    return_freed_memory()
    passes = 9 * len(tokens) / min(method.batch, len(tokens))
    return (times[3] - times[2]) * len(model.blocks) * (method.steps + passes / 3)
