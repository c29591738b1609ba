"""What quantizing with calibration samples takes, counted before it starts: memory, and work where it is long."""

from torch import Tensor, nn

from hasten.model.transformer import Transformer
from hasten.quantization.awq import AWQ
from hasten.quantization.sequential import BlockMethod
from hasten.quantization.sign import SignRounding


def predicted_bytes(model: Transformer, tokens: Tensor, method: BlockMethod, *, spill: bool = False) -> int:
    """Bytes beside the checkpoint, whose pages are mapped.

    The largest block's weights, rounded, twice; the states of all samples, once for each walk through the model, unless
    they are spilled. GPTQ and AWQ: three float32 matrices of the widest input, four with GPTAQ. GPTQ: what the experts
    of a block are given. AWQ: the block's weights, scaled, in float32. Sign rounding: the states of the block before
    quantization, and nine float32 copies of the block's weights (weight, offsets, the best ones, gradients of two
    calls, and what the pass keeps for them).
    """
    largest, widest = _largest(model)
    states = tokens.numel() * model.config.hidden_size * model.compute_dtype.itemsize
    walks = 2 if method.needs_before else 1
    kept = 0 if spill else walks * states
    if isinstance(method, SignRounding):
        return 2 * largest + 9 * 4 * largest + kept + states
    if isinstance(method, AWQ):
        return 2 * largest + 4 * largest + 3 * 4 * widest**2 + kept
    routed = max(layer.experts for layer in model.config.layers) * model.config.experts_per_token * states
    return 2 * largest + (2 + walks) * 4 * widest**2 + kept + routed


def tuning_flops(model: Transformer, tokens: Tensor, method: SignRounding) -> float:
    """Of the products of sign rounding: forward and backward of each block, for each sample of each step."""
    weights = sum(linear.weight.numel() for block in model.blocks for linear in _linears(block))
    return 6.0 * weights * method.steps * min(method.batch, len(tokens)) * tokens.shape[1]


def _largest(model: Transformer) -> tuple[int, int]:
    """Weights of the block, or head, that has most; features of the widest input."""
    parts = [_linears(part) for part in (*model.blocks, model.head)]
    widest = max(linear.in_features for part in parts for linear in part)
    return max(sum(linear.weight.numel() for linear in part) for part in parts), widest


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [linear for linear in module.modules() if isinstance(linear, nn.Linear)]
