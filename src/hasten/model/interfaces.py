"""Interfaces of the objects that the decoder is called with: layer contexts, a stack of all blocks, a teacher."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hasten.model.mixer_config import MixerConfig
from hasten.ops.attention import LayerAttention
from hasten.ops.attention.view import AttentionMetadata, KVView
from hasten.ops.cache_plan import CachePlan
from hasten.ops.states import State, StateView

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer


class LayerContext(Protocol):
    """The keys and values that one layer's attention sees, besides those of this call."""

    @property
    def alone(self) -> bool:
        """Whether there are none besides those of this call, which is of whole sequences from their first token on."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention: LayerAttention,
        kept: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Store the new k, v (B, T, Hkv, D); return attention (B, T, H, D) of q (B, T, H, D) over everything stored.

        attention: the layer's kernels, for contexts that hold the keys in one contiguous tensor. kept (B, T, 1, D'):
        where nothing else is seen, what is stored in the place of k and v (latent attention). sinks (H,): logits of its
        heads that join the softmax.
        """
        ...

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """The cache's tensors, for a kernel that writes the new keys and values itself and reads all of them."""
        ...


class StateContext(Protocol):
    """The states of one layer that keeps one of each sequence."""

    def recur(self, run: Callable[..., tuple[Tensor, State]], *inputs: Tensor) -> Tensor:
        """Compute the step's tokens and keep the states after them; return the outputs (B, T, …).

        run(state, *inputs (n, L, …)) -> (outputs (n, L, …), new state) for n sequences with L tokens each; state: what
        is kept of them, None before their first token. inputs (B, T, …).
        """
        ...

    def state_view(self, *, batch: int, tokens: int, sizes: MixerConfig) -> StateView:
        """The states of all places, for a kernel that goes from state to state itself."""
        ...


class Context(Protocol):
    """One object for each layer: its tensors, and no layer number, so that one compiled graph serves all layers.

    Kernels that run all layers in one call take their tensors from `views` or `plan`. metadata None: there is no cache,
    and nothing for such kernels.
    """

    @property
    def layers(self) -> Sequence[LayerContext | StateContext]: ...

    @property
    def metadata(self) -> AttentionMetadata | None: ...

    @property
    def plan(self) -> CachePlan | None: ...

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...

    @property
    def state_slots(self) -> Tensor | None: ...

    @property
    def certain(self) -> Tensor | None: ...

    @property
    def views(self) -> Sequence[KVView]: ...

    @property
    def stretched(self) -> Tensor | None:
        """Which tokens take longrope's frequencies for long sequences: see `RotaryTable`."""
        ...


class Stack(Protocol):
    """All blocks at once, and the last norm with the head. The model has it, and is given: a cycle would outlive it."""

    def run(
        self,
        model: "Transformer",
        x: Tensor,
        positions: Tensor,
        context: Context,
        features: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, C) of tokens at positions int64 (B, T) -> (B, T, C), or of some rows (1, R, C).

        features and rows as in `Transformer.each_block`.
        """
        ...

    def scores(self, model: "Transformer", x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoftTargets:
    """Targets that are another model's probabilities (distillation, arXiv 1503.02531).

    targets: int64 (B, T), -100 for tokens without a loss. states (B, T, C') of the other model, and the function that
    computes logits (R, V) from R of them.
    """

    targets: Tensor
    states: Tensor
    logits: Callable[[Tensor], Tensor]
