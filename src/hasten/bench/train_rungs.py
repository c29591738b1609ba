"""The rungs of the ladder of training; their names never change.

- explicit-float32: eager, attention that writes the whole score matrix, float32.
- math: PyTorch's unfused attention.
- memory-efficient: attention in chunks; on a CPU, where PyTorch has none, ours.
- flash: PyTorch's FlashAttention; on CUDA after bf16, since it multiplies in half precision only.
- compile: torch.compile, block by block.
- fp16: matrix products in float16 (autocast), the loss scaled so that gradients do not vanish; weights, gradients and
  the loss stay in float32.
- bf16: matrix products in bfloat16 (autocast); weights, gradients and the loss stay in float32. Left out, with all
  that follows in float32, where the device only emulates bfloat16, unless it is asked for by name. So is fp16, which
  bf16 replaces.
- padded-vocabulary: rows of embedding and head rounded up to a multiple of 64 (50,257 -> 50,304, 65 -> 128).
- fused-optimizer-and-loss: one kernel updates many tensors; head and cross-entropy without all logits in memory.
- keep-memory: freed memory stays in the process, in large pages (Linux, CPU).
- fastest-attention: on CUDA the kernel that hasten takes by itself, maybe cuDNN's.
- whole-model: on CUDA forward pass and loss as one compiled graph: fused norms and activations, joined projections.
- captured: on CUDA the whole step as CUDA graphs, with 16-bit copies of the weights and one kernel for AdamW.
- fp8: on CUDA the products of blocks and head in FP8; off again in the rungs that follow.
- native-kernels: attention, activations and joined projections of ours; on CUDA FlashAttention in Triton.
- checkpoint-selective, checkpoint-full: activations computed again. They save memory, not time.
- checkpoint-offload: as checkpoint-full, with the inputs of blocks on the host (not on a CPU).
- layer-drop: the share of blocks that progressive layer dropping leaves in the end (θ = 0.5), without checkpointing.

With several processes the rungs are `RANK_RUNGS`, all with what saves time above: one-process is the same batch in one.
"""

from dataclasses import replace
from typing import Any

from hasten.bench.models import choose_rungs
from hasten.errors import ConfigError
from hasten.machine import emulated
from hasten.training.recipe import Parallel, Recipe, Techniques

PADDING = 64
LAYER_DROP = 0.5  # θ in the end, as in the paper
FIRST: dict[str, Any] = {
    "pad_vocabulary_to": 1,
    "precision": "float32",
    "attention": "reference",
    "compile": False,
    "keep_memory": False,
    "fused_optimizer": False,
    "fused_activation": False,
    "joined_projections": False,
    "whole_model": False,
    "capture": False,
    "loss": "reference",
}
Rungs = dict[str, tuple[str, dict[str, Any]]]  # name -> what it adds, in words and as fields of Techniques
RUNGS: Rungs = {
    "explicit-float32": ("float32, eager, explicit attention", {}),
    "math": ("math attention", {"attention": "math"}),
    "memory-efficient": ("memory-efficient attention", {"attention": "memory-efficient"}),
    "flash": ("flash attention", {"attention": "flash"}),
    "compile": ("torch.compile per block", {"compile": True}),
    "fp16": ("fp16 autocast, scaled loss", {"precision": "float16"}),
    "bf16": ("bf16 autocast", {"precision": "bfloat16"}),
    "padded-vocabulary": ("padded vocabulary", {"pad_vocabulary_to": PADDING}),
    "fused-optimizer-and-loss": ("fused optimizer, chunked loss", {"fused_optimizer": True, "loss": None}),
    "fastest-attention": ("the fastest attention", {"attention": None}),
    "whole-model": ("the model as one function, fused norms", {"whole_model": True}),
    "captured": ("steps as CUDA graphs", {"capture": True}),
    "fp8": ("products in FP8", {"fp8": True}),
    "keep-memory": ("freed memory kept, in large pages", {"keep_memory": True}),
    "native-kernels": (
        "native attention and activations, joined projections",
        {"attention": None, "fused_activation": True, "joined_projections": True},
    ),
    "checkpoint-selective": ("selective checkpointing", {"checkpointing": "selective"}),
    "checkpoint-full": ("full checkpointing", {"checkpointing": "full"}),
    "checkpoint-offload": ("full checkpointing, kept on the host", {"checkpointing": "offload"}),
    "layer-drop": (f"layer dropping, θ = {LAYER_DROP}", {"checkpointing": "none", "layer_drop": LAYER_DROP}),
}
ZERO_3: dict[str, Any] = {"zero": 3}
RANK_RUNGS: Rungs = {  # name -> in words, and as fields of Parallel
    "one-process": ("one process", {}),
    "ddp": ("DDP (ZeRO 0)", {}),
    "zero-1": ("ZeRO 1", {"zero": 1}),
    "zero-2": ("ZeRO 2", {"zero": 2}),
    "zero-3": ("ZeRO 3", ZERO_3),
    "zero-3-prefetch": ("ZeRO 3, the next block gathered ahead", ZERO_3 | {"prefetch": 1}),
    "zero-3-offload-optimizer": ("ZeRO 3, optimizer on the host", ZERO_3 | {"offload": "optimizer"}),
    "zero-3-offload-all": ("ZeRO 3, all on the host", ZERO_3 | {"offload": "all"}),
    "tensor-2": ("tensor and sequence parallelism of 2", {"zero": 2, "tensor": 2}),
    "zero-3-masters": ("ZeRO 3, 16-bit weights, float32 masters", ZERO_3 | {"policy": "float32-masters"}),
}
REPLACED = ("attention", "precision", "checkpointing")  # techniques of which a rung replaces the one before


def recipes(
    recipe: Recipe, device: str, *, vocab_size: int | None, wanted: tuple[str, ...]
) -> dict[str, tuple[Recipe, tuple[str, ...]]]:
    """The recipe at each wanted rung (all by default), and what is switched on there in words.

    Raises ConfigError for rungs that are unknown or change nothing.
    """
    active = possible(device, vocab_size=vocab_size, wanted=wanted)
    switched_on = cumulative(active)
    return {
        name: (replace(recipe, techniques=switched_on[name][0]), switched_on[name][1])
        for name in choose_rungs(active, wanted)
    }


def rank_recipes(
    recipe: Recipe, device: str, *, vocab_size: int | None, wanted: tuple[str, ...]
) -> dict[str, tuple[Recipe, tuple[str, ...]]]:
    """The same as `recipes`, for several processes."""
    all_on = cumulative(possible(device, vocab_size=vocab_size))
    techniques = all_on["native-kernels" if device == "cpu" else "fused-optimizer-and-loss"][0]
    known = dict(RANK_RUNGS)
    if techniques.precision == "float32":  # masters belong to weights in 16 bits
        del known["zero-3-masters"]
    return {
        name: (replace(recipe, techniques=techniques, parallel=Parallel(**known[name][1])), (known[name][0],))
        for name in choose_rungs(known, wanted)
    }


def possible(device: str, *, vocab_size: int | None, wanted: tuple[str, ...] = ()) -> Rungs:
    """The rungs that differ from the one below them here; of a vocabulary that is not known (None), also its padding.

    Raises ConfigError where a wanted one does not.
    """
    found = dict(RUNGS)
    for name in ("fp16", "bf16"):
        if name not in wanted and emulated(found[name][1]["precision"], device) is not None:
            del found[name]
    reasons = {}
    if vocab_size is not None and vocab_size % PADDING == 0:
        reasons["padded-vocabulary"] = f"{vocab_size:,} tokens are a multiple of {PADDING} already"
    if device != "cpu":
        names = [name for name in found if name != "flash"]
        names.insert(names.index("bf16") + 1, "flash")  # it multiplies in half precision only
        found = {name: found[name] for name in names}
        found["native-kernels"] = ("FlashAttention of ours, in Triton", {"attention": "flash-triton", "fp8": False})
        if (reason := _no_fp8(device)) is not None:
            reasons["fp8"] = reason
        reasons["keep-memory"] = "it concerns training on a CPU"
    else:  # PyTorch has no memory-efficient attention there
        reasons |= dict.fromkeys(("whole-model", "captured", "fp8"), "it concerns training on CUDA")
        reasons["fastest-attention"] = "there it is part of native-kernels"
        reasons["checkpoint-offload"] = "what a CPU computes with is on the host already"
        found["memory-efficient"] = (RUNGS["memory-efficient"][0], {"attention": "chunked"})
    for name, reason in reasons.items():
        if name in wanted:
            raise ConfigError(f"the rung {name!r} changes nothing here: {reason}")
        del found[name]
    return found


def _no_fp8(device: str) -> str | None:
    import torch

    from hasten.ops.fp8 import why_not

    return why_not(torch.device(device))


def cumulative(rungs: Rungs) -> dict[str, tuple[Techniques, tuple[str, ...]]]:
    """Everything that is switched on at each rung of these, and in words.

    The words are those of the rungs below too, but for the first; of those that replace each other only the last.
    """
    fields = dict(FIRST)
    words: dict[str, str] = {}
    found: dict[str, tuple[Techniques, tuple[str, ...]]] = {}
    for name, (text, adds) in rungs.items():
        fields |= adds
        kind = next((technique for technique in REPLACED if technique in adds), name)
        if not fields.get("fp8"):
            words.pop("fp8", None)
        words.pop(kind, None)  # its replacement is listed where it was switched on
        words[kind] = text
        found[name] = Techniques(**fields), tuple(words.values())
        if len(found) == 1:
            words.clear()
    return found
