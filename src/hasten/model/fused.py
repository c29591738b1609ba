"""Fusing: replaces readable blocks by blocks with the same interface that call fused steps.

The readable `Block` is the reference of both kinds: native code on a CPU (fused_native.py), Triton on a GPU
(fused_cuda.py).
"""

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError, HastenWarning
from hasten.machine.pages import SharedPages, mapped_files, release_file_pages, return_freed_memory
from hasten.model.fused_block import FusedSteps
from hasten.model.fused_cuda import CudaBlock, CudaStack, cuda_refusal, runs_triton
from hasten.model.fused_linear import packed, plain
from hasten.model.fused_native import FusedBlock, native_refusal, native_shape_refusal, native_waits, settled
from hasten.model.fused_stack import FusedStack
from hasten.model.interfaces import Stack
from hasten.model.transformer import Block, Transformer, require_model
from hasten.model.wide import narrow
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.weights import PLAIN
from hasten.ops.native import choose_isa, library

__all__ = [
    "CudaBlock",
    "CudaStack",
    "FusedBlock",
    "FusedStack",
    "FusedSteps",
    "fuse",
    "fuse_where_it_fits",
    "is_fused",
    "new_stack",
    "path_of",
    "refusal",
    "take_apart",
]


def refusal(model: Transformer) -> str | None:
    """Why this model cannot be fused here, or None."""
    return cuda_refusal(model) if runs_triton(model) else native_refusal(model)


def fuse(model: Transformer) -> Transformer:
    """Replace every block by its fused form, and pack the head, in place. Raises ConfigError if that is not possible.

    Weights are packed block by block and the originals released, those of a mapped file too, so at most one block
    exists twice.
    """
    require_model(model, "hasten.fuse")
    reason = refusal(model)
    if reason is not None:
        raise ConfigError(f"this model cannot be fused: {reason}")
    model.auto_fuse = True
    if runs_triton(model):
        return _fuse_for_cuda(model)
    narrow(model)
    mapped, pages = mapped_files(), SharedPages()
    for i in range(len(model.blocks)):
        if isinstance(block := model.blocks[i], Block):
            originals = matrices(block)
            model.blocks[i] = FusedBlock(block, pages)
            del block  # else its weights would be in use
            release_file_pages(originals, mapped)
    if (features := model.token_features) is not None:
        originals = matrices(features)
        features.projection = packed(features.projection)
        settled(features.projection, pages)
        release_file_pages(originals, mapped)
    tied = isinstance(model.embedding, nn.Embedding) and model.tied
    originals = matrices(model.head)
    model.head = packed(model.head)
    settled(model.head, pages)  # now that the original is let go
    if tied:
        model.tie()
    release_file_pages(originals, mapped)
    return_freed_memory()
    if all(isinstance(block, FusedBlock) and (block.experts is None or block.joins_experts) for block in model.blocks):
        model.stack = new_stack(model)
    return model


def matrices(module: nn.Module) -> list[Tensor]:
    """The weights of a module's plain linear layers."""
    return [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]


def _fuse_for_cuda(model: Transformer) -> Transformer:
    for i, block in enumerate(model.blocks):
        if isinstance(block, Block):
            model.blocks[i] = CudaBlock(block)
    model.stack = new_stack(model)
    return model


def new_stack(model: Transformer) -> Stack:
    """Create the object that runs all blocks of a fused model at once."""
    return CudaStack() if runs_triton(model) else FusedStack(model.config)


def waits(model: Transformer) -> str | None:
    """Why a model that could be fused is faster unfused on this processor, or None."""
    return None if runs_triton(model) else native_waits(model)


def fuse_where_it_fits(model: Transformer) -> Transformer:
    """Fuse a model in place before it generates, if the fused steps can run it; otherwise leave it unchanged.

    `hasten.generate`, `stream`, `Chat`, `LLM` and every command call this. No weight changes its value, and
    `hasten.unfuse` restores the readable blocks. If a model runs unfused needlessly, a HastenWarning says once why,
    about how much slower it is, and what to do. There is no warning if that was asked for (float32 weights, an unfused
    or compiled model, HASTEN_ISA=none) or if PyTorch's products are faster (`waits`). A model that is being trained, or
    that the caller changed (hooks, modules of other kinds), is never fused here.
    """
    if not model.auto_fuse or any(type(block) is not Block for block in model.blocks):
        return model
    if (model.dtype == torch.float32 and model.dtype_asked) or _no_kernels(model):
        return model  # as asked, or after a warning of its own
    if (reason := touched(model)) is not None:
        advice = "call hasten.fuse(model) when that is over"
    elif (reason := refusal(model)) is not None:
        advice = _advice(model)
    else:
        return fuse(model) if waits(model) is None else model
    model.auto_fuse = False  # said once
    factor = 3 if model.quantization is not None else _FACTORS[model.dtype]
    slower = f", about {factor} times slower" if model.device.type == "cpu" else ", slower"
    text = f"the model runs without the fused steps{slower}: {reason}; {advice}"
    warnings.warn(text, HastenWarning, stacklevel=3)
    return model


def path_of(model: Transformer) -> str:
    """Describe in one line the weights that a model generates with and the code that multiplies them."""
    dtype = str(model.dtype).removeprefix("torch.")
    layers = model.quantization or {}
    kinds = {layer.weight.element for name, layer in layers.items() if name not in model.stored_types}
    kinds |= {kind if name in layers else f"{kind} as {dtype}" for name, kind in model.stored_types.items()}
    weights = listed(sorted(kinds)) or dtype
    if not kinds and model.stored_dtype not in (None, model.dtype):
        weights += f" ({str(model.stored_dtype).removeprefix('torch.')} in the file)"
    if model.stack is not None or is_fused(model):
        code = "Triton" if runs_triton(model) else f"native, {choose_isa()}"
        return f"{weights}, fused steps ({code})"
    if type(model.blocks[0]) is not Block:
        return f"{weights}, compiled blocks"
    weights += f" in {dtype}" if kinds else ""
    if model.dtype == torch.float32 and model.dtype_asked:
        return f"{weights} as asked for, not fused"
    if not model.auto_fuse:
        return f"{weights}, not fused"
    if _no_kernels(model):
        return f"{weights}, not fused: no native kernels here"
    if waits(model) is None:  # only until it generates
        return f"{weights}, not fused yet"
    return f"{weights}, not fused: PyTorch's products are faster here"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _no_kernels(model: Transformer) -> bool:
    return model.device.type == "cpu" and not runs_triton(model) and library() is None


# How many times faster a decode step is when fused; docs/precision.md says where that was tried.
_FACTORS = {torch.float32: 4, torch.bfloat16: 4, torch.float16: 10}


def _advice(model: Transformer) -> str:
    if model.dtype not in PLAIN and native_shape_refusal(model.config) is None:
        own = str(model.dtype).removeprefix("torch.")
        asked = f", or dtype='{own}' to keep it without this warning" if model.dtype == torch.float32 else ""
        return f"load it with dtype='bfloat16' (--dtype bfloat16){asked}"
    if model.quantization is not None and native_shape_refusal(model.config) is not None:
        return "its quantized products are packed all the same"
    if model.quantization is not None:
        name = model.origin or "MODEL"
        return (
            "quantize the original checkpoint with `hasten quantize`, whose layers can be fused; without it, "
            f"`hasten export {name} PLAIN --dequantize`, then PLAIN with --quantize int8"
        )
    if model.device.type != "cpu":
        return "--compile (compiled=True) makes its decode steps faster"
    return "--quantize int8 (hasten.quantize) makes its products faster"


def touched(model: Transformer) -> str | None:
    """Name a change of a readable model by the caller that fusing would undo, or None."""
    if model.training or model.was_trained or any(p.grad is not None for p in model.parameters()):
        return "it is being trained"
    for name, module in model.named_modules():
        if not name:
            continue
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):
            return f"{name} has a hook"
        if "forward" in module.__dict__ or module._compiled_call_impl is not None:
            return f"the forward method of {name} was replaced"
        if not type(module).__module__.startswith(("hasten.", "torch.nn.modules.")):
            return f"{name} was replaced by a {type(module).__name__}"
    return None


def is_fused(model: Transformer, which: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Whether all blocks (with `which=any`, at least one) are fused."""
    return which(isinstance(block, FusedSteps) for block in model.blocks)


def unfuse(model: Transformer) -> Transformer:
    """Undo `fuse` in place: restores the readable blocks with the same weights (quantized layers stay packed).

    Generating does not fuse the model again by itself until `hasten.fuse(model)` is called.
    """
    require_model(model, "hasten.unfuse")
    model.auto_fuse = False
    return take_apart(model)


def take_apart(model: Transformer) -> Transformer:
    """Unfuse temporarily: generating may fuse the model again."""
    if any(isinstance(block, FusedBlock) and block.factors for block in model.blocks):
        raise ConfigError("this model has adapters, which its fused steps hold; load it again to take it apart")
    model.stack = None
    for i, block in enumerate(model.blocks):
        if isinstance(block, FusedSteps):
            model.blocks[i] = block.readable(model.config, model.config.layers[i])
    if model.token_features is not None:
        model.token_features.projection = plain(model.token_features.projection)
    if isinstance(model.head, PackedLinear):
        tied, model.head = model.tied, plain(model.head)
        if tied and isinstance(model.head, nn.Linear):
            model.embedding = nn.Embedding.from_pretrained(model.head.weight)
            model.tie()
    model.bind()
    return model
