"""What quantizing with calibration samples takes, counted before it starts: memory, and work where it is long."""

from typing import Any

from torch import Tensor, nn

from hasten.model.transformer import Transformer
from hasten.planning.memory import calibration_memory
from hasten.quantization.awq import AWQ
from hasten.quantization.sequential import BlockMethod
from hasten.quantization.sign import SignRounding


def predicted_bytes(model: Transformer, tokens: Tensor, method: BlockMethod, *, spill: bool = False) -> int:
    """Bytes beside the checkpoint.

    GPTQ and AWQ have three sums over the samples, four with GPTAQ; GPTQ what the experts of a block are given, AWQ the
    scaled weights. Sign rounding has the states before quantization, and nine copies (weight, offsets, the best ones,
    gradients of two calls, and what the pass keeps for them).
    """
    states = tokens.numel() * model.config.hidden_size * model.compute_dtype.itemsize
    walks = 2 if method.needs_before else 1
    counts: dict[str, Any] = {"copies": 0, "squares": 2 + walks, "routed": True}
    if isinstance(method, SignRounding):
        counts = {"copies": 9, "squares": 0, "routed": False}
    elif isinstance(method, AWQ):
        counts = {"copies": 1, "squares": 3, "routed": False}
    needed = calibration_memory(model.config, states=states, walks=walks, spill=spill, **counts).peak
    return needed + (states if isinstance(method, SignRounding) else 0)


def tuning_flops(model: Transformer, tokens: Tensor, method: SignRounding) -> float:
    """Of the products of sign rounding: forward and backward of each block, for each sample of each step."""
    weights = sum(linear.weight.numel() for linear in model.blocks.modules() if isinstance(linear, nn.Linear))
    return 6.0 * weights * method.steps * min(method.batch, len(tokens)) * tokens.shape[1]
