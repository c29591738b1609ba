"""A decode step of one sequence as one launch for all blocks of a fused model on a GPU: which models have it.

The kernel is in ops/block/decode.py; without it each block is a few launches (fused_cuda.py).
"""

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten.model.fused_linear import norm_arguments
from hasten.model.transformer import Transformer
from hasten.ops import triton_support

if TYPE_CHECKING:
    from hasten.ops.block.decode import DecodeLayers

HOPPER = (9, 0)
HEAD_SIZES = (64, 128, 256)


def multiprocessors_for(device: torch.device) -> int:
    """How many multiprocessors the launch of all blocks has there; 0 where it does not run."""
    if device.type != "cuda" or triton_support.compute_capability(device) != HOPPER:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_layers(model: Transformer) -> "DecodeLayers | str":
    """All blocks of a fused model in one launch, or why the kernel does not serve the model or the GPU."""
    from hasten.ops.block.decode import DecodeLayers, Sizes, cut_for
    from hasten.ops.linear.beside import ACTIVATIONS

    config = model.config
    blocks: list[Any] = list(model.blocks)
    multiprocessors = multiprocessors_for(model.device)
    if not multiprocessors:
        return "its kernel is for Hopper GPUs (compute capability 9.0)"
    if any(block.experts is not None for block in blocks):
        return "its kernel computes no experts"
    first = blocks[0]
    if not first.gated:
        return "its kernel computes gated MLPs; this model's have no gate"
    if any(post is not None for block in blocks for post in block._bound.post_norms):
        return "its kernel knows no norms behind attention and MLP"
    norms = [norm_arguments(norm) for block in blocks for norm in (block.attention_norm, block.mlp_norm)]
    of_heads = [[None if n is None else norm_arguments(n) for n in (block.q_norm, block.k_norm)] for block in blocks]
    kinds = {(norm[1] is None, *norm[2:]) for norm in (*norms, *chain(*of_heads)) if norm is not None}
    plain, eps, offset, centred = kinds.pop()
    if kinds or not plain or centred or any(weight is None for weight, *_ in norms):
        return "its kernel computes RMS norms that are alike in all layers"
    if len({block.spec for block in blocks}) > 1:
        return "its kernel computes layers that are alike; this model's attend differently"
    spec = first.spec
    turned = config.ropes[0].dim if len(config.ropes) == 1 else 0
    if spec.window or spec.softcap or not turned:
        return "its kernel knows rotary positions, and no windows or caps of scores"
    if spec.head_dim not in HEAD_SIZES:
        return f"its kernel knows heads of {', '.join(map(str, HEAD_SIZES))}; this model's have {spec.head_dim}"
    products = [[getattr(block._bound, name).weight for name in ("qkv", "output", "inner", "down")] for block in blocks]
    if any(own.format.bits != 16 or own.data.dtype != model.dtype for own in chain(*products)):
        return "its kernel multiplies weights in 16 bits"
    if any(own.bias is not None for _, *others in products for own in others):
        return "its kernel knows biases of queries, keys and values alone"
    matrices: list[list[Tensor]] = [[own.data for own in four] for four in products]
    small: list[list[Any]] = [
        [*(weight for weight, *_ in norms[2 * i : 2 * i + 2]), products[i][0].bias, *(n and n[0] for n in of_heads[i])]
        for i in range(len(blocks))
    ]
    if len({tuple(one is None for one in own) for own in small}) > 1:
        return (
            "its kernel computes layers that are alike; some of this model's have biases or norms that others have not"
        )
    halves = [one for own in small for one in own if one is not None]
    held = [*chain(*matrices), *halves]
    even = config.hidden_size % 8 == 0 and all(one.data_ptr() % 16 == 0 and one.is_contiguous() for one in held)
    if not even or any(one.dtype != model.dtype for one in halves):
        return "its kernel reads rows 16 bytes at a time, in the model's dtype"
    sizes = Sizes(
        layers=len(blocks),
        hidden=config.hidden_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        inner=config.intermediate_size,
        turned=turned,
        activation=ACTIVATIONS.index(first.activation_name) + 1,
        biased=small[0][2] is not None,
        normed=small[0][3] is not None,
    )
    cut = cut_for(sizes, multiprocessors)
    if isinstance(cut, str):
        return cut
    return DecodeLayers(sizes, matrices, small, scale=spec.scale, eps=eps, offset=offset, cut=cut)
