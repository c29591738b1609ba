"""The static key/value cache: allocated once, so that every decode step has the same shapes and addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.engine.sparse import SparseMasks
from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.ops.attention import LayerAttention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.attention.inputs import visible
from hasten.ops.attention.view import AttentionMetadata, KVView, StackView
from hasten.ops.native import library
from hasten.ops.pages import zeros_in_large_pages

# An eager decode step reads the cache up to the next multiple of this, so that a short text does not pay for the
# whole capacity; a compiled one reads all of it, because its shapes must not change.
READ_STEP = 64
ROW_FORMATS: Mapping[str, RowFormat] = {
    "auto": PLAIN,
    "int8": RowFormat(8, rotated=True),
    "int4": RowFormat(4, rotated=True),
    "int8-plain": RowFormat(8),
    "int4-plain": RowFormat(4),
}


def row_format(kv_cache_dtype: str) -> RowFormat:
    """The format of a name. Raises ConfigError for one that is not known."""
    if kv_cache_dtype not in (*ROW_FORMATS,):
        known = ", ".join(map(repr, ROW_FORMATS))
        raise ConfigError(
            f"kv_cache_dtype must be one of {known} ('auto' is the model's dtype); found {kv_cache_dtype!r:.40}"
        )
    return ROW_FORMATS[kv_cache_dtype]


def key_value_memory(
    config: ModelConfig, *, slots: int, rows: RowFormat, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Room for the keys of all layers, then their values: (2·layers, slots, Hkv, …), `dtype` being the model's.

    In memory a head's rows follow each other, as attention reads them: between those of other heads, a processor does
    not foresee what is read next.
    """
    shape = (2 * len(config.layers), config.kv_heads, slots, rows.length(config.head_dim))
    # Zeros, not garbage: a masked row still takes part in a product with probability 0, and 0·NaN is NaN.
    return zeros_in_large_pages(shape, dtype=rows.element(dtype), device=device).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's view of the cache during one step.

    held: its keys and values (B·S + 1, Hkv, …), in which sequence b keeps its position p in row b·S + p (in a
    bounded cache p modulo S); the last row takes the padding and is never read. mask: (B, T, S') of the rows that each
    query sees, or (B, H, T, S'); in a prefill of empty sequences, where the tokens at hand are all there is, None,
    or the blocks of a sparse pattern. read: S', how many of a sequence's S rows are read.
    """

    held: KVView
    mask: Tensor | BlockMask | None
    read: int

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """For a kernel that writes and reads the cache itself."""
        return self.held

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, attention: LayerAttention, dropout: float) -> Tensor:
        """Write the step's k, v (B, T, Hkv, D); attention of q (B, T, H, D) over what its queries may look at."""
        held, rows = self.held, self.held.metadata.rows
        slots, head_dim, dtype = held.metadata.slot_mapping, k.shape[-1], k.dtype
        k, v = rows.write(k), rows.write(v)
        held.k[slots], held.v[slots] = k.flatten(0, 1), v.flatten(0, 1)
        if isinstance(self.mask, Tensor):
            k, v = (t[:-1].unflatten(0, (len(q), -1))[:, : self.read] for t in (held.k, held.v))  # (B, S', Hkv, …)
        k, v = (rows.read(t, head_dim, dtype) for t in (k, v))
        return attention(q, k, v, mask=self.mask, dropout=dropout)


@dataclass(frozen=True, slots=True)
class Step:
    """The context of one forward pass over a static cache."""

    all_layers: StackView
    read: int
    masks: Sequence[Tensor | BlockMask | None]  # of each layer

    @property
    def layers(self) -> list[CachedLayer]:
        layers = zip(self.all_layers.layers, self.masks, strict=True)
        return [CachedLayer(view, mask, self.read) for view, mask in layers]


class StaticCache:
    """Keys and values of B sequences of at most `capacity` tokens each, in (B·rows + 1, Hkv, …) a layer.

    row_format: how each is kept, `dtype` being the model's. rows is the capacity, rounded up to a multiple of
    READ_STEP: steps read multiples of it, so that a text does not depend on how many tokens may still come. Where every
    layer has a window or a local pattern, rows is no more than twice what a query can look back, however long the texts
    get: position p is then in row p modulo rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        row_format: RowFormat = PLAIN,
        bounded: bool = True,
    ) -> None:
        """bounded: False where steps of any length come, of which every token is to see its own ones."""
        if config.learned_positions and capacity > config.max_positions:
            raise ConfigError(
                f"{capacity} tokens of prompt and answer do not fit this model's {config.max_positions} learned "
                "positions; shorten the prompt or max_new_tokens"
            )
        self.batch, self.capacity, self.row_format = batch, capacity, row_format
        self.reach = config.reach if bounded else None
        self.rows = -(-capacity // READ_STEP) * READ_STEP
        if self.reach is not None:
            self.rows = min(self.rows, 2 * self.reach)
        self.config = config
        self.windows = [layer.window for layer in config.layers]
        self.sparse = None
        if config.attention_pattern is not None:
            self.sparse = SparseMasks(config, positions=self.rows, device=device)
        slots = batch * self.rows + 1
        memory = key_value_memory(config, slots=slots, rows=row_format, dtype=dtype, device=device)
        self.k, self.v = list(memory[: len(config.layers)]), list(memory[len(config.layers) :])
        self.first_slots = torch.arange(batch, device=device) * self.rows  # (B,)
        self._query_start_loc: dict[int, Tensor] = {}  # by the tokens of a step: the same in all of them

    @property
    def bytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def grow(self, capacity: int) -> None:
        """Make room for more tokens a sequence, keeping what is there (a copy; the addresses change)."""
        larger = StaticCache(
            self.config,
            batch=self.batch,
            capacity=capacity,
            dtype=self.k[0].dtype,
            device=self.k[0].device,
            row_format=self.row_format,
            bounded=self.reach is not None,
        )
        for old, new in zip((*self.k, *self.v), (*larger.k, *larger.v), strict=True):
            rows = old[:-1].unflatten(0, (self.batch, -1))  # (B, S, Hkv, …)
            new[:-1].unflatten(0, (self.batch, -1))[:, : self.rows] = rows
        self.k, self.v, self.capacity, self.rows = larger.k, larger.v, larger.capacity, larger.rows
        self.first_slots, self.sparse = larger.first_slots, larger.sparse

    @property
    def longest_step(self) -> int | None:
        """The most tokens that may be added to sequences that are not empty, None: as many as there is room for."""
        return None if self.reach is None or self.rows >= self.capacity else self.rows - self.reach + 1

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
        if tokens not in self._query_start_loc:
            self._query_start_loc[tokens] = torch.arange(0, (batch + 1) * tokens, tokens, device=positions.device)
        around = self.longest_step is not None  # the rows of each sequence are one block, that begins again at its end
        slots = self.first_slots[:, None] + (positions % self.rows if around else positions)  # (B, T)
        seq_lens = positions[:, 0] + tokens  # as if no token were padding: nobody looks at those
        if valid is not None:
            slots = slots.masked_fill(~valid, -1)
        if self.rows < tokens:  # only the last ones find room
            slots = slots.masked_fill(positions <= positions[:, -1:] - self.rows, -1)
        read = self.rows if read is None else min(read, self.rows)
        made = self._masks(positions, read, fresh) if masks else [None] * len(self.windows)
        where = (slots.flatten(), self._query_start_loc[tokens], seq_lens, self.first_slots)
        metadata = AttentionMetadata(*where, rows=self.row_format, max_query=tokens, longest=self.rows)
        if around:
            table = self.first_slots[:, None] // self.rows
            metadata = metadata._replace(first_slots=None, block_table=table, block_size=self.rows)
        natively = self.sparse is not None and positions.device.type == "cpu" and library() is not None
        seen = self.sparse.native if self.sparse is not None and natively else []
        return Step(StackView(self.k, self.v, metadata, seen), read, made)

    def _masks(self, positions: Tensor, read: int, fresh: bool) -> Sequence[Tensor | BlockMask | None]:
        """What each layer's queries see of the rows that are read, or of the tokens at hand."""
        if fresh:
            return [None] * len(self.windows) if self.sparse is None else self.sparse.block_masks(positions.shape[1])
        places = torch.arange(read, device=positions.device)
        if self.longest_step is not None:  # what stands in a row: the latest position that belongs there
            last = positions[:, -1:]
            places = last - (last - places) % self.rows  # (B, S')
        if self.sparse is not None:
            return self.sparse.masks(positions, places)
        held = (places >= 0).unsqueeze(-2)
        by_window = {window: visible(positions, places, window) & held for window in set(self.windows)}  # (B, T, S')
        return [by_window[window] for window in self.windows]
