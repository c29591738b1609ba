"""The static key/value cache: allocated once, so that every decode step has the same shapes and addresses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.ops.attention.masks import visible
from hasten.ops.attention.view import KVView, StackView
from hasten.ops.pages import zeros_in_large_pages


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's view of the cache during one step.

    k, v (B·S + 1, Hkv, D): sequence b keeps its position p in row b·S + p; the last row takes the padding and is
    never read. slots (B·T,): the rows for this step's tokens, -1 (the last row) for padding. mask (B, T, S'): which
    rows each query sees; None in a prefill of empty sequences, where the tokens at hand are all there is. starts
    (B + 1,), lengths (B,), first (B,): the same for kernels that read the cache themselves, see KVView.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    mask: Tensor | None
    batch: int
    read: int  # S', how many of a sequence's S rows are read
    starts: Tensor
    lengths: Tensor
    first: Tensor

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """For a kernel that writes and reads the cache itself."""
        return KVView(self.k, self.v, self.slots, self.starts, self.lengths, self.first)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the step's k, v (B, T, Hkv, D) and return what its queries may look at."""
        self.k[self.slots] = k.flatten(0, 1)
        self.v[self.slots] = v.flatten(0, 1)
        if self.mask is None:
            return k, v, None
        keys = self.k[:-1].unflatten(0, (self.batch, -1))[:, : self.read]  # (B, S', Hkv, D)
        values = self.v[:-1].unflatten(0, (self.batch, -1))[:, : self.read]
        return keys, values, self.mask


@dataclass(frozen=True, slots=True)
class Step:
    """The context of one forward pass over a static cache. together: all layers, for kernels that take them at once."""

    together: StackView
    read: int
    masks: list[Tensor | None]  # of each layer

    @property
    def layers(self) -> list[CachedLayer]:
        k, v, slots, starts, lengths, first, *_ = self.together
        assert first is not None
        return [
            CachedLayer(k, v, slots, mask, len(first), self.read, starts, lengths, first)
            for k, v, mask in zip(k, v, self.masks, strict=True)
        ]


class StaticCache:
    """Keys and values of B sequences of at most `capacity` tokens each, in (B·capacity + 1, Hkv, D) a layer."""

    def __init__(
        self, config: ModelConfig, *, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if config.learned_positions and capacity > config.max_positions:
            raise ConfigError(
                f"{capacity} tokens of prompt and answer do not fit this model's {config.max_positions} learned "
                "positions; shorten the prompt or max_new_tokens"
            )
        self.batch, self.capacity = batch, capacity
        self.config = config
        self.windows = [layer.window for layer in config.layers]
        shape = (batch * capacity + 1, config.kv_heads, config.head_dim)
        # Zeros, not garbage: a masked row still takes part in a product with probability 0, and 0·NaN is NaN.
        memory = zeros_in_large_pages((2 * len(config.layers), *shape), dtype=dtype, device=device)
        self.k, self.v = list(memory[: len(config.layers)]), list(memory[len(config.layers) :])
        self.first = torch.arange(batch, device=device) * capacity  # (B,)
        self.first_slots = self.first[:, None]
        self._starts: dict[int, Tensor] = {}  # by the tokens of a step: the same in all of them

    @property
    def bytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def grow(self, capacity: int) -> None:
        """Make room for more tokens a sequence, keeping what is there (a copy; the addresses change)."""
        larger = StaticCache(
            self.config, batch=self.batch, capacity=capacity, dtype=self.k[0].dtype, device=self.k[0].device
        )
        for old, new in zip((*self.k, *self.v), (*larger.k, *larger.v), strict=True):
            rows = old[:-1].unflatten(0, (self.batch, -1))  # (B, S, Hkv, D)
            new[:-1].unflatten(0, (self.batch, -1))[:, : self.capacity] = rows
        self.k, self.v, self.capacity = larger.k, larger.v, larger.capacity
        self.first, self.first_slots = larger.first, larger.first_slots

    def step(
        self,
        positions: Tensor,
        *,
        valid: Tensor | None = None,
        fresh: bool = False,
        read: int | None = None,
        masks: bool = True,
    ) -> Step:
        """The context for tokens at positions (B, T).

        valid, bool (B, T): False for padding, whose keys are kept nowhere. fresh: the sequences are empty and the
        positions are 0 … T-1, so that plain causal attention over the tokens at hand is enough. read: look at the
        first so many rows of each sequence only (all positions lie below it); the whole capacity by default, as a
        compiled step wants it. masks: False where all layers read the cache through `view` (a fused model).
        """
        batch, tokens = positions.shape
        if tokens not in self._starts:
            self._starts[tokens] = torch.arange(0, (batch + 1) * tokens, tokens, device=positions.device)
        slots = self.first_slots + positions  # (B, T)
        lengths = positions[:, 0] + tokens  # as if no token were padding: nobody looks at those
        if valid is not None:
            slots = slots.masked_fill(~valid, -1)
        read = self.capacity if read is None else min(read, self.capacity)
        seen: dict[int | None, Tensor | None] = dict.fromkeys(self.windows)
        if masks and not fresh:
            rows = torch.arange(read, device=positions.device)
            seen = {window: visible(positions, rows, window) for window in seen}  # (B, T, S')
        together = StackView(self.k, self.v, slots.flatten(), self._starts[tokens], lengths, self.first)
        return Step(together, read, [seen[window] for window in self.windows])
