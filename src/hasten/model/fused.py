"""Fusing: the readable block swapped for one of the same interface that calls fused steps.

The readable `Block` stays the reference of both kinds: native code on a CPU (fused_native.py), Triton on a GPU
(fused_cuda.py).
"""

import warnings
from collections.abc import Callable, Iterable

from torch import nn

from hasten.errors import ConfigError, HastenWarning
from hasten.model.fused_block import FusedSteps
from hasten.model.fused_cuda import CudaBlock, CudaStack, cuda_conflict, cuda_refusal, runs_triton
from hasten.model.fused_linear import fusion_conflict, packed, plain
from hasten.model.fused_native import FusedBlock, FusedStack, native_refusal, native_waits, settled
from hasten.model.transformer import Block, Transformer, require_model
from hasten.model.wide import narrow
from hasten.ops.linear import PackedLinear
from hasten.ops.pages import return_freed_memory

__all__ = [
    "CudaBlock",
    "CudaStack",
    "FusedBlock",
    "FusedStack",
    "FusedSteps",
    "fuse",
    "fuse_where_it_fits",
    "is_fused",
    "refusal",
]


def refusal(model: Transformer) -> str | None:
    """Why this model cannot be fused here, or None if it can."""
    return cuda_refusal(model) if runs_triton(model) else native_refusal(model)


def fuse(model: Transformer) -> Transformer:
    """Swap every block for its fused form, and pack the head, in place. Raises ConfigError where that cannot be.

    Weights are packed block by block and the originals let go, so there are never two copies of more than one block.
    """
    require_model(model, "hasten.fuse")
    reason = refusal(model)
    if reason is not None:
        raise ConfigError(f"this model cannot be fused: {reason}")
    if runs_triton(model):
        return _fuse_for_cuda(model)
    narrow(model)
    for i, block in enumerate(model.blocks):
        if isinstance(block, Block):
            model.blocks[i] = FusedBlock(block)
    del block  # else the last one would stay
    tied = isinstance(model.embedding, nn.Embedding) and model.tied
    model.head = packed(model.head)
    settled(model.head)  # now that the original is let go
    if tied:
        model.tie()
    return_freed_memory()
    if all(isinstance(block, FusedBlock) and block.experts is None for block in model.blocks):
        model.stack = FusedStack(model)
    return model


def _fuse_for_cuda(model: Transformer) -> Transformer:
    for i, block in enumerate(model.blocks):
        if isinstance(block, Block):
            model.blocks[i] = CudaBlock(block)
    model.stack = CudaStack(model)
    return model


def waits(model: Transformer) -> str | None:
    """Why a model that could be fused is better left as it is on this processor, or None."""
    return None if runs_triton(model) else native_waits(model)


def fuse_where_it_fits(model: Transformer) -> Transformer:
    """`fuse`, or the model as it is; with a HastenWarning where only its mixture of formats is against fusing it.

    Where PyTorch's products are clearly faster than the native ones, it stays as it is, and `hasten explain` says so.
    """
    reason = refusal(model)
    if reason is None:
        return fuse(model) if waits(model) is None else model
    if reason == (cuda_conflict(model) if runs_triton(model) else fusion_conflict(model)):
        warnings.warn(f"the model runs without the fused steps, slower: {reason}", HastenWarning, stacklevel=2)
    return model


def is_fused(model: Transformer, which: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Whether all blocks, or any, are fused ones."""
    return which(isinstance(block, FusedSteps) for block in model.blocks)


def unfuse(model: Transformer) -> Transformer:
    """Undo `fuse` in place: readable blocks again, of the same numbers (quantized layers stay packed)."""
    require_model(model, "hasten.unfuse")
    if any(isinstance(block, FusedBlock) and block.factors for block in model.blocks):
        raise ConfigError("this model has adapters, which its fused steps hold; load it anew to take it apart")
    model.stack = None
    for i, block in enumerate(model.blocks):
        if isinstance(block, FusedSteps):
            model.blocks[i] = block.readable(model.config, model.config.layers[i])
    if isinstance(model.head, PackedLinear):
        tied, model.head = model.tied, plain(model.head)
        if tied and isinstance(model.head, nn.Linear):
            model.embedding = nn.Embedding.from_pretrained(model.head.weight)
            model.tie()
    model.bind()
    return model
