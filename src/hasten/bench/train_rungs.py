"""The rungs of the ladder of training; their names never change.

- explicit-float32: eager, attention that writes the whole score matrix, float32.
- math: PyTorch's unfused attention.
- memory-efficient: attention in chunks; on a CPU, where PyTorch has none, ours.
- flash: PyTorch's FlashAttention.
- compile: torch.compile, block by block.
- bf16: matrix products in bfloat16 (autocast); weights, gradients and the loss stay in float32. Left out, with all
  that follows in float32, where the device only emulates bfloat16, unless it is asked for by name.
- padded-vocabulary: rows of embedding and head rounded up to a multiple of 64 (50,257 -> 50,304, 65 -> 128).
- fused-optimizer-and-loss: one kernel updates many tensors; head and cross-entropy without all logits in memory.
- keep-memory: freed memory stays in the process, in large pages (Linux, CPU).
- native-kernels: attention, activations and joined projections of ours (CPU).
- checkpoint-selective, checkpoint-full: activations computed again. They save memory, not time.
- layer-drop: the share of blocks that progressive layer dropping leaves in the end (θ = 0.5), without checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.training.recipe import Techniques

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
    "loss": "reference",
}
# name -> what it adds
RUNGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "explicit-float32": ("float32, eager, explicit attention", {}),
    "math": ("math attention", {"attention": "math"}),
    "memory-efficient": ("memory-efficient attention", {"attention": "memory-efficient"}),
    "flash": ("flash attention", {"attention": "flash"}),
    "compile": ("torch.compile per block", {"compile": True}),
    "bf16": ("bf16 autocast", {"precision": "bfloat16"}),
    "padded-vocabulary": ("padded vocabulary", {"pad_vocabulary_to": PADDING}),
    "fused-optimizer-and-loss": ("fused optimizer, chunked loss", {"fused_optimizer": True, "loss": None}),
    "keep-memory": ("freed memory kept, in large pages", {"keep_memory": True}),
    "native-kernels": (
        "native attention and activations, joined projections",
        {"attention": None, "fused_activation": True, "joined_projections": True},
    ),
    "checkpoint-selective": ("selective checkpointing", {"checkpointing": "selective"}),
    "checkpoint-full": ("full checkpointing", {"checkpointing": "full"}),
    "layer-drop": (f"layer dropping, θ = {LAYER_DROP}", {"checkpointing": "none", "layer_drop": LAYER_DROP}),
}
ATTENTIONS = ("math attention", "memory-efficient attention", "flash attention")
CHECKPOINTS = ("selective checkpointing", "full checkpointing")


Rungs = Mapping[str, tuple[str, dict[str, Any]]]


def possible(device: str, *, vocab_size: int | None, wanted: tuple[str, ...] = ()) -> Rungs:
    """The rungs that differ from the one below them here; of a vocabulary that is not known (None), also its padding.

    Raises ConfigError where a wanted one does not.
    """
    from hasten.machine import emulated

    found = dict(RUNGS)
    if "bf16" not in wanted and emulated("bfloat16", device) is not None:
        del found["bf16"]
    reasons = {}
    if vocab_size is not None and vocab_size % PADDING == 0:
        reasons["padded-vocabulary"] = f"{vocab_size:,} tokens are a multiple of {PADDING} already"
    if device != "cpu":
        reasons["keep-memory"] = reasons["native-kernels"] = "it concerns training on a CPU"
    else:  # PyTorch has no memory-efficient attention there
        found["memory-efficient"] = (RUNGS["memory-efficient"][0], {"attention": "chunked"})
    for name, reason in reasons.items():
        if name in wanted:
            raise ConfigError(f"the rung {name!r} changes nothing here: {reason}")
        del found[name]
    return found


def techniques(rung: str, rungs: Rungs) -> Techniques:
    """Everything that is switched on at a rung of these."""
    from hasten.training.recipe import Techniques

    found = dict(FIRST)
    for name, (_, adds) in rungs.items():
        found |= adds
        if name == rung:
            break
    return Techniques(**found)


def switched_on(rung: str, rungs: Rungs) -> tuple[str, ...]:
    """The techniques of a rung of these in words: of those that replace each other the last, of the first its own."""
    names = list(rungs)
    words = [rungs[name][0] for name in names[1 : names.index(rung) + 1]] or [rungs[rung][0]]
    for group in (ATTENTIONS, CHECKPOINTS):
        last = [word for word in words if word in group][-1:]
        over = group is ATTENTIONS and any(word.startswith("native attention") for word in words)
        over = over or (group is CHECKPOINTS and rung == "layer-drop")
        words = [word for word in words if word not in group or (word in last and not over)]
    return tuple(words)
