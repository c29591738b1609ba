"""The key/value cache: blocks of a fixed number of tokens in any order, a table a sequence (arXiv 2309.06180).

Beside the blocks it holds the states of layers that keep one of each sequence. The tensors only; which block and which
state belongs to whom is `hasten.engine.blocks.BlockManager`'s business. A block may be as long as a text
(`KVCache.of_texts`): then text b is block b, and no table is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.engine.cache_shapes import LayerShape, kept_shapes, layer_shapes
from hasten.engine.layout import RaggedLayout
from hasten.engine.sparse import SparseMasks
from hasten.engine.states import StateShape, groups_of_texts
from hasten.engine.step import KVStep
from hasten.errors import ConfigError
from hasten.machine.pages import zeros_in_large_pages
from hasten.model.config import ModelConfig
from hasten.ops.attention import AttentionRequest, AttentionSpec
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.attention.inputs import visible
from hasten.ops.attention.paged import PAGED_KERNELS, PagedGroup
from hasten.ops.attention.view import AttentionMetadata
from hasten.ops.cache_plan import CachePlan
from hasten.ops.native import library
from hasten.ops.picker import Kernel, pick
from hasten.ops.states import SequenceGroup, State

# A step that reads texts side by side reads them up to the next multiple of this, so that a short text does not pay for
# the whole capacity; a compiled one reads all of it, because its shapes must not change.
READ_STEP = 64
_ALIGNED = 64  # elements: layers of another shape begin at multiples
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


class KVCache:
    """Keys and values in `blocks` blocks of `block_size` tokens, and the states of `sequences` sequences.

    k, v: of each layer with attention, (blocks·block_size + 1, Hkv, …), the last row for padding, which is never read.
    They lie in one allocation, the layers of one shape together; a layer that uses another's has the same tensors, and
    with latent attention k and v are one.
    states: of every layer, None where it has attention; an MLP alone has one of no tensors.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int,
        block_size: int = 16,
        dtype: torch.dtype,
        device: torch.device | str,
        row_format: RowFormat = PLAIN,
        sequences: int = 1,
    ) -> None:
        """dtype: of the model. row_format: how keys and values are kept. `bytes_per_block` says what a block takes.

        Raises ConfigError for sizes below 1.
        """
        if blocks < 1 or block_size < 1:
            raise ConfigError(f"a paged cache needs at least 1 block of 1 token; found {blocks} of {block_size}")
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.blocks, self.block_size, self.row_format = blocks, block_size, row_format
        self.sequences = sequences  # that states are kept of
        self.first_slots = torch.arange(blocks, device=device) * block_size  # (blocks,)
        self.windows = [layer.window for layer in config.layers if layer.attends]
        self._stretches = config.stretches_at is not None
        self.sparse: SparseMasks | None = None
        found = layer_shapes(config)
        shapes = kept_shapes(config)
        self.states = [_places(shape, sequences, dtype, self.device) for shape in found]
        self._keeps_states = any(own is not None for own in self.states)
        self._groups = self._allocate(shapes)
        held = {shape: _pairs(shape, group) for shape, group in self._groups.items()}
        pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        for place, (shape, layer) in enumerate(zip(found, config.layers, strict=True)):
            if isinstance(shape, LayerShape):
                pairs[place] = next(held[shape]) if layer.keys_of is None else pairs[layer.keys_of]
        self.k, self.v = [k for k, _ in pairs.values()], [v for _, v in pairs.values()]
        # One kernel for all layers: of those picked for each shape, the least particular one.
        self.kernel = max((self._picked(shape) for shape in self._groups), key=PAGED_KERNELS.index)
        self._query_start_loc: dict[int, Tensor] = {}  # by the tokens of a step: the same in all of them
        self._plan: tuple[SparseMasks | None, CachePlan] | None = None  # by the pattern that it shows

    def _allocate(self, shapes: Sequence[LayerShape]) -> dict[LayerShape, Tensor]:
        """For the layers of each shape, their keys and then their values: (tensors·layers, slots, Hkv, …)."""
        slots, rows = self.blocks * self.block_size + 1, self.row_format
        # In memory a head's rows follow each other, as attention reads them: between those of other heads, a processor
        # does not foresee what is read next.
        sizes = {
            shape: (shape.tensors * shapes.count(shape), shape.kv_heads, slots, rows.length(shape.head_dim))
            for shape in dict.fromkeys(shapes)
        }
        counts = [-(-torch.Size(size).numel() // _ALIGNED) * _ALIGNED for size in sizes.values()]
        # Zeros, not garbage: a masked row still takes part in a product with probability 0, and 0·NaN is NaN.
        self._memory = zeros_in_large_pages((sum(counts),), dtype=rows.element(self.dtype), device=self.device)
        starts = accumulate(counts, initial=0)
        return {
            shape: self._memory[start : start + torch.Size(size).numel()].view(size).transpose(1, 2)
            for (shape, size), start in zip(sizes.items(), starts, strict=False)
        }

    def _picked(self, shape: LayerShape) -> Kernel[AttentionRequest]:
        spec = AttentionSpec(heads=self.config.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, scale=1.0)
        request = AttentionRequest(spec=spec, device=self.device, dtype=self.dtype, cache_bits=self.row_format.bits)
        sparse = self.config.attention_pattern is not None
        return pick(PAGED_KERNELS, replace(request, block_mask=sparse, sinks=self.config.attention_sinks))

    @classmethod
    def of_texts(
        cls,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        row_format: RowFormat = PLAIN,
    ) -> KVCache:
        """A cache with one block for each of `batch` texts of at most `capacity` tokens, for `step_of_texts`.

        A block has `capacity` rows, rounded up to a multiple of READ_STEP: steps read multiples of it, so that a text
        does not depend on how many tokens may still come.
        """
        if config.learned_positions and capacity > config.max_positions:
            raise ConfigError(
                f"{capacity} tokens of prompt and answer do not fit this model's {config.max_positions} learned "
                "positions; shorten the prompt or max_new_tokens"
            )
        rows = -(-capacity // READ_STEP) * READ_STEP
        like: dict[str, Any] = {"dtype": dtype, "device": device, "row_format": row_format}
        cache = cls(config, blocks=batch, block_size=rows, sequences=batch, **like)
        cache.sparse_up_to(rows)
        return cache

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, *, block_size: int = 16, dtype: torch.dtype, row_format: RowFormat = PLAIN
    ) -> int:
        """Bytes that one block takes in all layers together."""
        rows = (one.tensors * one.kv_heads * row_format.bytes(one.head_dim, dtype) for one in kept_shapes(config))
        return block_size * sum(rows)

    @staticmethod
    def bytes_per_sequence(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that the states of one sequence take in all layers together."""
        return sum(shape.bytes(dtype) for shape in layer_shapes(config) if isinstance(shape, StateShape))

    @property
    def bytes(self) -> int:
        """Size of the cache in bytes."""
        states = sum(tensor.nbytes for own in self.states if own is not None for tensor in own.values())
        return states + sum(group.nbytes for group in self._groups.values())

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), as if one after the other."""
        for together in _independent(pairs):
            sources, targets = torch.tensor(together, device=self.device).T
            for group in self._groups.values():
                blocks = group[:, :-1].unflatten(1, (self.blocks, self.block_size))
                blocks[:, targets] = blocks[:, sources]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of sequences (source, target), as if one after the other."""
        for source, target in pairs if self._keeps_states else ():
            for tensor in (tensor for own in self.states if own is not None for tensor in own.values()):
                tensor[target] = tensor[source]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return sum(group[:, :-1].nbytes for group in self._groups.values()) // self.blocks

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """The contents of whole blocks, as they are: bytes (n, block_bytes), a copy."""
        contents = torch.empty(len(blocks), self.block_bytes, dtype=torch.uint8, device=self.device)
        for block, row in zip(blocks, contents, strict=True):
            for kept, copied in self._parts(block, row):
                copied.copy_(kept)
        return contents

    def write_blocks(self, blocks: Sequence[int], contents: Iterable[Tensor]) -> None:
        """Write contents (block_bytes,) that `read_blocks` returned, of a cache of the same layers and formats."""
        for block, row in zip(blocks, contents, strict=True):
            for kept, copied in self._parts(block, row):
                kept.copy_(copied)

    def _parts(self, block: int, contents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A block of the layers of each shape, and its place in `contents`: both (tensors·layers, Hkv, block_size, …).

        In this order of dimensions each head's rows of a block are copied at once.
        """
        first, slots = 0, slice(block * self.block_size, (block + 1) * self.block_size)
        for group in self._groups.values():
            kept = group[:, slots].transpose(1, 2)
            yield kept, contents[first : first + kept.nbytes].view(group.dtype).view(kept.shape)
            first += kept.nbytes

    def grow(self, blocks: int) -> None:
        """Become a cache of more blocks, keeping what is there (a copy; the addresses change)."""
        larger = KVCache(
            self.config,
            blocks=blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            row_format=self.row_format,
        )
        for old, new in zip((*self.k, *self.v), (*larger.k, *larger.v), strict=True):
            new[: len(old) - 1] = old[:-1]
        larger.sparse, larger.states, larger.sequences = self.sparse, self.states, self.sequences
        vars(self).update(vars(larger))

    def plan(self, sparse: SparseMasks | None = None) -> CachePlan | None:
        """The cache as the native calls take it; None where there are none. sparse: the pattern that it shows."""
        if self.kernel.name != "native":
            return None
        if self._plan is None or self._plan[0] is not sparse:
            seen = [] if sparse is None else sparse.native
            self._plan = sparse, CachePlan(self.k, self.v, seen, self.states if self._keeps_states else ())
        return self._plan[1]

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, rows: Sequence[Rows]) -> KVStep:
        """The context of a call model(tokens (1, N), step.positions, step): the rows' tokens end to end.

        The tables must have room for their tokens; nobody else may be reading the blocks that are written.
        """
        return self.step_over(RaggedLayout(rows, self.block_size))

    def step_over(self, layout: RaggedLayout) -> KVStep:
        """The context of a step of these tokens; on a CPU it changes with the layout, but for a pattern's masks."""
        positions, slots, query_start_loc, seq_lens, table = layout.on(self.device)

        device = self.device

        def groups() -> list[PagedGroup]:  # for all layers, and only where a kernel asks for it
            return layout.groups(lambda t: t.to(device))

        metadata = AttentionMetadata(
            slots,
            query_start_loc,
            seq_lens,
            first_slots=None,
            block_table=table,
            block_size=self.block_size,
            rows=self.row_format,
            max_query=layout.most,
            longest=table.shape[1] * self.block_size,
        )
        sparse = self.sparse_up_to(layout.longest)
        natively = sparse if self.kernel.name == "native" else None
        seen = [] if natively is None else natively.native
        shown = [groups] * len(self.k) if sparse is None or seen else self._masked(groups(), sparse)
        stretched = None
        if self._stretches:
            stretched = torch.from_numpy(layout.stretched)[None].to(device)  # (1, N)
        states = self._states_of(lambda: layout.groups_of_states(device), layout.state_slots)
        if self._keeps_states and layout.most > 1:
            states["certain"] = torch.tensor(layout.certain)
        more = states | {"stretched": stretched, "plan": self.plan(natively)}
        return KVStep(self.k, self.v, metadata, positions[None], seen, self.kernel.run, shown, **more)

    def _states_of(self, groups: Callable[[], list[SequenceGroup]], slots: Sequence[int]) -> dict[str, Any]:
        """The fields of a `KVStep` for layers that keep states."""
        if not self._keeps_states:
            return {}
        return {"states": self.states, "groups_of_states": groups, "state_slots": torch.tensor(list(slots))}

    def _masked(self, groups: list[PagedGroup], sparse: SparseMasks) -> Sequence[Callable[[], list[PagedGroup]]]:
        """The groups as each layer sees them, with its masks."""
        masked: list[list[PagedGroup]] = [[] for _ in self.k]
        for group in groups:
            places = torch.arange(group.slots.shape[1], device=self.device)
            for own, mask in zip(masked, sparse.masks(group.positions, places), strict=True):
                own.append(group._replace(mask=mask))
        return [functools.partial(list, own) for own in masked]

    def sparse_up_to(self, longest: int) -> SparseMasks | None:
        """What the model's pattern, if it has one, shows of texts of up to `longest` tokens."""
        if self.config.attention_pattern is not None and (self.sparse is None or self.sparse.positions < longest):
            self.sparse = SparseMasks(self.config, positions=1 << longest.bit_length(), device=self.device)
        return self.sparse

    def step_of_texts(
        self,
        positions: Tensor,
        *,
        valid: Tensor | None = None,
        fresh: bool = False,
        read: int | None = None,
        masks: bool = True,
        stretched: Tensor | None = None,
        state_slots: Sequence[int] | None = None,
    ) -> KVStep:
        """The context for tokens at positions (B, T), as many of each text, in a cache that `of_texts` made.

        valid, bool (B, T): False for padding, whose keys are kept nowhere. fresh: the texts are empty and the positions
        are 0 … T-1, so that plain causal attention over the tokens at hand is enough. read: look at the first `read`
        rows of each block only (all positions lie below it); the whole block by default, as a compiled step wants it.
        masks: False where all layers read the cache through `view` (a fused model). stretched: bool (B, 1).
        state_slots: the place of each text's states; the number of its block by default.
        """
        batch, tokens = positions.shape
        if tokens not in self._query_start_loc:
            self._query_start_loc[tokens] = torch.arange(0, (batch + 1) * tokens, tokens, device=positions.device)
        size = self.block_size
        slots = self.first_slots[:, None] + positions  # (B, T)
        seq_lens = positions[:, 0] + tokens  # as if no token were padding: nobody looks at those
        if valid is not None:
            slots = slots.masked_fill(~valid, -1)
        read = size if read is None else min(read, size)
        made = self._masks(positions, read, fresh) if masks else [None] * len(self.windows)
        where = (slots.flatten(), self._query_start_loc[tokens], seq_lens, self.first_slots)
        metadata = AttentionMetadata(*where, rows=self.row_format, max_query=tokens, longest=size)
        natively = self.sparse if positions.device.type == "cpu" and library() is not None else None
        seen = [] if natively is None else natively.native
        places = range(batch) if state_slots is None else state_slots
        states = self._states_of(lambda: groups_of_texts(positions, valid, places), places)
        more = states | {"stretched": stretched, "plan": self.plan(natively)}
        return KVStep(self.k, self.v, metadata, positions, seen, masks=made, read=read, **more)

    def _masks(self, positions: Tensor, read: int, fresh: bool) -> Sequence[Tensor | BlockMask | None]:
        """What each layer's queries see of the rows that are read, or of the tokens at hand."""
        if fresh:
            return [None] * len(self.windows) if self.sparse is None else self.sparse.block_masks(positions.shape[1])
        places = torch.arange(read, device=positions.device)
        if self.sparse is not None:
            return self.sparse.masks(positions, places)
        by_window = {window: visible(positions, places, window) for window in set(self.windows)}  # (B, T, S')
        return [by_window[window] for window in self.windows]


def _places(shape: LayerShape | StateShape | None, count: int, dtype: torch.dtype, device: Any) -> State | None:
    """The places of a layer for the states of `count` sequences, as in `KVCache.states`."""
    if shape is None:
        return {}
    return None if isinstance(shape, LayerShape) else shape.zeros(count, dtype, device)


def _pairs(shape: LayerShape, group: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of a shape, which may be one tensor."""
    parts = [part.unbind() for part in group.chunk(shape.tensors)]
    return zip(parts[0], parts[-1], strict=True)


def _independent(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in order, in runs in which nothing is read or written after it was written."""
    runs: list[list[tuple[int, int]]] = []
    targets: set[int] = set()
    for source, target in pairs:
        if not runs or source in targets or target in targets:
            runs.append([])
            targets = set()
        runs[-1].append((source, target))
        targets.add(target)
    return runs
