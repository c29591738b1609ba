"""Activation checkpointing: recompute activations in the backward pass instead of keeping them (arXiv 1604.06174).

- "full": only a block's input is kept; its forward pass runs twice.
- "offload": as "full", with that input on the host, in pinned memory if the block computes on a GPU.
- "selective": the results of matrix products and fused attention are kept, because they cost time; norms, activation
  functions, casts and the score matrix of explicit attention, which cost memory and little time, are recomputed.

Each block is replaced by one with the same weights that does so, before it is compiled: the compiler then sees which
results are kept.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hasten.errors import ConfigError
from hasten.model.attention import KeysValues
from hasten.model.interfaces import LayerContext, StateContext
from hasten.model.rope import Rotation
from hasten.model.swap import replace_modules, take_over
from hasten.model.transformer import Block, Transformer
from hasten.training.recipe import CheckpointingName

PRODUCTS = ("mm", "addmm", "linear")


def apply_checkpointing(model: Transformer, kind: CheckpointingName) -> None:
    """Have every block recompute its activations in the backward pass. Raises ConfigError for an unknown `kind`."""
    if kind not in ("full", "selective", "offload"):
        raise ConfigError(f"techniques.checkpointing is {kind!r}; choose one of none, selective, full, offload")
    own = OffloadedBlock if kind == "offload" else RecomputedBlock
    new = {block: take_over(own, block) for block in model.blocks}
    for block in new.values():
        block.options = {"context_fn": _selective} if kind == "selective" else {}
    replace_modules(model, new)


class RecomputedBlock(Block):
    """A block that recomputes activations in its backward pass. options: for torch's `checkpoint`."""

    options: dict[str, Any]

    def forward(
        self,
        x: Tensor,
        rope: Rotation | None,
        layer: LayerContext | StateContext,
        scale: Tensor | None = None,
        features: Tensor | None = None,
        shared: KeysValues | None = None,
    ) -> Any:
        plain = super().forward
        if not torch.is_grad_enabled():
            return plain(x, rope, layer, scale, features, shared)
        # A closure over `layer`: inside a compiled block only tensors may be arguments of the checkpoint.
        turn: tuple[Any, ...] = (None, None) if rope is None else rope
        cos, sin, factors = (*turn, None)[:3]
        k, v = (None, None) if shared is None else shared

        def body(
            x: Tensor,
            cos: Tensor | None,
            sin: Tensor | None,
            factors: Tensor | None,
            scale: Tensor | None,
            features: Tensor | None,
            k: Tensor | None,
            v: Tensor | None,
        ) -> Any:
            rope: Rotation | None = None if cos is None or sin is None else (cos, sin)
            rope = rope if rope is None or factors is None else (*rope, factors)
            shared = None if k is None or v is None else (k, v)
            return plain(x, rope, layer, scale, features, shared)

        return checkpoint(body, x, cos, sin, factors, scale, features, k, v, use_reentrant=False, **self.options)


class OffloadedBlock(RecomputedBlock):
    """A recomputed block whose input is kept on the host until the backward pass."""

    def __call__(self, x: Tensor, *args: Any, **more: Any) -> Any:
        """Call the block; overridden instead of `forward`, because this part is not compiled."""
        place, device = x.data_ptr(), x.device  # so that the functions below do not keep x

        def pack(kept: Tensor) -> Tensor | tuple[Tensor]:
            return (on_host(kept),) if kept.data_ptr() == place else kept

        def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed[0].to(device, non_blocking=True)

        with saved_tensors_hooks(pack, unpack):
            return super().__call__(x, *args, **more)


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, even if it is there already; pinned if it comes from a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of "selective", by the operator's name, so that it covers every fused attention kernel."""
    name = operator.name() if hasattr(operator, "name") else str(operator)
    space, _, rest = name.partition("::")
    plain = rest.partition(".")[0]
    if plain in PRODUCTS or "attention" in plain or (space.startswith("hasten") and plain.startswith("linear")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _keep)
