"""Activation checkpointing: recompute activations in the backward pass instead of keeping them (arXiv 1604.06174).

- "full": of a block only its input is kept; its forward pass runs twice.
- "selective": the results of matrix products and fused attention are kept, because they cost time; norms, activation
  functions, casts, and the score matrix of explicit attention, which cost memory and little time, are computed again.

The wrapper goes around a block's forward before it is compiled, so that the compiler sees which results are kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hasten.errors import ConfigError
from hasten.model.transformer import Block, Transformer
from hasten.training.recipe import CheckpointingName

PRODUCTS = ("mm", "addmm", "linear")


def checkpoint_activations(model: Transformer, kind: CheckpointingName) -> None:
    """Have every block of a model recompute its activations in the backward pass. Raises ConfigError for a name."""
    if kind == "none":
        return
    contexts: dict[str, Callable[[], Any] | None] = {"full": None, "selective": _selective}
    if kind not in contexts:
        raise ConfigError(f"techniques.checkpointing is {kind!r}; choose one of none, selective, full")
    for block in model.blocks:
        assert isinstance(block, Block)
        # On the object, not in a wrapping module: the names of the parameters stay what they are.
        block.forward = _recomputed(block.forward, contexts[kind])  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any] | None) -> Callable[..., Any]:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def run(x: Any, rope: Any, layer: Any, scale: Any = None) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, rope, layer, scale)
        # A closure over what is no tensor: inside a compiled block only tensors may be arguments of the checkpoint.
        cos, sin = (None, None) if rope is None else rope

        def body(x: Any, cos: Any, sin: Any, scale: Any) -> Any:
            return forward(x, None if cos is None else (cos, sin), layer, scale)

        return checkpoint(body, x, cos, sin, scale, use_reentrant=False, **options)

    return run


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of "selective": by the operator's name, so that every fused attention kernel is meant."""
    name = operator.name() if hasattr(operator, "name") else str(operator)
    space, _, rest = name.partition("::")
    plain = rest.partition(".")[0]
    if plain in PRODUCTS or "attention" in plain or (space.startswith("hasten") and plain.startswith("linear")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _keep)
