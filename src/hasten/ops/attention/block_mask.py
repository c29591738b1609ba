"""Converts a block layout to the forms that kernels take: native tiles, flex_attention's mask, a boolean matrix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.attention.pattern_layout import BlockLayout, Pattern
from hasten.ops.native import native_ops, obtainable

if TYPE_CHECKING:
    from torch.nn.attention import flex_attention

TILE = 64  # queries and keys of a tile of train.cpp
CELL = 16  # the smallest piece of a tile that can be hidden
WHOLE = 0xFFFF
FLEX = 128  # queries and keys of flex_attention's own tiles, which its kernels divide as they like

Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class MaskTiles:
    """What train.cpp takes, int32, on the CPU: row r of layout h sees columns[starts[h, r] : starts[h, r + 1]].

    Rows and columns are tiles of 64 positions, counted from position 0. cells: bit 4·k + q of an entry says that the
    q-th 16 queries of the tile see its k-th 16 keys.
    """

    starts: Tensor  # (layouts, tiles + 1), counted through all layouts
    columns: Tensor  # (entries,)
    cells: Tensor  # (entries,)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """The mask of one layout, for the `block_mask` of `hasten.ops.attention.attention`.

    For calls of exactly `keys` keys, of which the queries are the last ones. Created once for a pattern, length and
    layer; each form is created when a kernel first needs it. window: with a causal mask, how many keys a query sees at
    most, its own included (the sliding window of the layer).
    """

    layout: BlockLayout
    keys: int
    window: int | None = None
    _forms: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        blocks = -(-self.keys // self.layout.block)
        if self.keys < 1 or blocks != self.layout.blocks_k:
            raise ConfigError(
                f"a layout of {self.layout.blocks_k} blocks of {self.layout.block} positions cannot be the mask of "
                f"{self.keys} keys, which are {blocks} blocks"
            )

    @classmethod
    def of(
        cls,
        pattern: Pattern,
        keys: int,
        *,
        queries: int | None = None,
        heads: int = 1,
        layer: int = 0,
        window: int | None = None,
    ) -> BlockMask:
        """The mask of a pattern for `keys` positions; the last `queries` (default: all) are queries."""
        queries = keys if queries is None else queries
        if not 1 <= queries <= keys:
            raise ConfigError(f"the queries are the last ones of the {keys} keys, at least one; found {queries}")
        blocks = -(-keys // pattern.block)
        rows = blocks - (keys - queries) // pattern.block
        return cls(pattern.layout(rows, blocks, heads=heads, layer=layer), keys, window)

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.layout.causal

    @property
    def heads(self) -> int:
        """1 if all heads have one layout, else the number of layouts."""
        return len(self.layout.heads)

    def check(self, queries: int, keys: int) -> None:
        """Raise ConfigError unless the layout is for the last `queries` of `keys` positions."""
        if keys != self.keys:
            raise ConfigError(f"the block mask is of {self.keys} keys; found {keys}; make one for this length")
        first = (keys - queries) // self.layout.block
        if queries > keys or first < self.layout.first_row:
            raise ConfigError(
                f"the block mask has the rows of the last {keys - self.layout.first_row * self.layout.block} "
                f"positions; found {queries} queries"
            )

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """bool (1 or H, T, S), True where a query sees a key: the n × n matrix, for the reference and small sizes."""
        self.check(queries, keys)
        layout, block = self.layout, self.layout.block
        places = torch.arange(keys)
        own = places[keys - queries :]
        mask = self._blocks()[:, own // block - layout.first_row][:, :, places // block]
        if layout.causal:
            mask = mask & (own[:, None] >= places)
        if self.window is not None:
            mask = mask & (own[:, None] - places < self.window)
        return mask.to(device)

    def tiles(self) -> MaskTiles:
        """The layout in tiles of 64 positions. Raises ConfigError for blocks that do not consist of whole cells."""
        return self._form("tiles", lambda: _tiles(self.layout, self.keys))

    def native(self) -> Tensor:
        """The form for native kernels over a cache."""
        period = self.layout.period
        table = self._blocks() if period is None else torch.eye(period, dtype=torch.bool)[None]
        return self._form("native", lambda: native_ops().plan_pattern(table, self.layout.block, self.window or 0))

    def prepare(self, device: torch.device) -> None:
        """Create the forms for a device's kernels now, so that a compiled step does not."""
        if self.layout.period is not None:
            return
        if device.type == "cuda":
            self.flex(self.keys, device)
        elif tiles_refusal(self.layout.block) is None and obtainable("training"):
            self.tiles()
        else:
            self._blocks()

    def flex(self, queries: int, device: torch.device) -> flex_attention.BlockMask:
        """flex_attention's mask of the last `queries` positions, from block numbers."""
        self.check(queries, self.keys)
        window = self.window
        return self._form((queries, device), lambda: _flex(self.layout, queries, self.keys, device, window))

    def _blocks(self) -> Tensor:
        return self._form("blocks", lambda: dense_blocks(self.layout))

    def _form(self, key: Hashable, make: Callable[[], Form]) -> Form:
        """The form under this key, created once."""
        if key not in self._forms:
            self._forms[key] = make()
        return self._forms[key]


def dense_blocks(layout: BlockLayout) -> Tensor:
    """bool (layouts, query blocks, key blocks), True where a block is present."""
    present = torch.zeros(len(layout.heads), layout.blocks_q, layout.blocks_k, dtype=torch.bool)
    for head, rows in enumerate(layout.heads):
        for row, columns in enumerate(rows):
            present[head, row, list(columns)] = True
    return present


def seen_blocks(pattern: Pattern, blocks: int, *, heads: int = 1, layer: int = 0) -> Tensor:
    """bool (1 or H, rows, columns), True where a row of queries sees a column of keys within the pattern's reach.

    Rows and columns are to be taken modulo their number: of a pattern that repeats they are those of one cycle, of
    others those of `blocks` blocks.
    """
    cycle = pattern.cycle
    if cycle is None:
        return dense_blocks(pattern.layout(blocks, heads=heads, layer=layer))
    return dense_blocks(pattern.layout(cycle, 2 * cycle)).unflatten(-1, (2, cycle)).any(dim=-2)


def tiles_refusal(block: int) -> str | None:
    """Why a layout with this block size cannot be cut into tiles of 64, or None."""
    if block % TILE and (block % CELL or TILE % block):
        return f"its blocks have {block} positions; it takes {CELL}, {CELL * 2} and multiples of {TILE}"
    return None


def _tiles(layout: BlockLayout, keys: int) -> MaskTiles:
    reason = tiles_refusal(layout.block)
    if reason:
        raise ConfigError(f"no tiles can be made of the block layout: {reason}")
    tiles = -(-keys // TILE)
    starts: list[int] = []
    columns: list[int] = []
    cells: list[int] = []
    for rows in layout.heads:
        for tile in range(tiles):
            starts.append(len(columns))
            seen = _tile_row(layout, rows, tile)
            kept = [column for column in sorted(seen) if column < tiles]
            columns += kept
            cells += [seen[column] for column in kept]
        starts.append(len(columns))
    return MaskTiles(
        torch.tensor(starts, dtype=torch.int32).view(len(layout.heads), tiles + 1),
        torch.tensor(columns, dtype=torch.int32),
        torch.tensor(cells, dtype=torch.int32),
    )


def _tile_row(layout: BlockLayout, rows: tuple[Sequence[int], ...], tile: int) -> dict[int, int]:
    """The tiles that a row of tiles sees, with their cells."""
    if layout.block >= TILE:
        whole = layout.block // TILE  # tiles of a block
        row = tile // whole - layout.first_row
        return {j * whole + i: WHOLE for j in (rows[row] if row >= 0 else ()) for i in range(whole)}
    each, size = TILE // layout.block, layout.block // CELL  # blocks of a tile, cells of a block, along one side
    seen: dict[int, int] = {}
    for part in range(each):
        row = tile * each + part - layout.first_row
        for j in rows[row] if 0 <= row < len(rows) else ():
            for k in range(j % each * size, (j % each + 1) * size):
                bits = ((1 << size) - 1) << (4 * k + part * size)
                seen[j // each] = seen.get(j // each, 0) | bits
    return seen


def _flex(
    layout: BlockLayout, queries: int, keys: int, device: torch.device, window: int | None
) -> flex_attention.BlockMask:
    """In tiles of FLEX positions: those seen as a whole, and those of which the blocks say what is seen."""
    # Imported here, because it brings the compiler's symbolic mathematics along.
    from torch.nn.attention import flex_attention

    offset, block, first_row, several = keys - queries, layout.block, layout.first_row, len(layout.heads) > 1
    seen = dense_blocks(layout).to(device)  # (1 or H, rows, columns)
    places = torch.arange(keys, device=device)
    own = places[offset:]
    # One side after the other, so that no n x n matrix is made of large blocks: is any, is all of a tile seen?
    sides = [(own // block - first_row, 1), (places // block, 2)]
    some = whole = seen
    for index, side in sides:
        some = _by_tiles(some.index_select(side, index), side).any(dim=side + 1)
        whole = _by_tiles(whole.index_select(side, index), side).all(dim=side + 1)
    if layout.causal:
        first, last = own[::FLEX, None], (own[::FLEX, None] + FLEX - 1)  # of a tile's queries
        starts = places[::FLEX]
        some, whole = some & (starts <= last), whole & (starts + FLEX - 1 <= first)
        if window is not None:
            some, whole = some & (first - starts - FLEX + 1 < window), whole & (last - starts < window)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + offset
        found = seen[head if several else 0, query // block - first_row, key // block]
        found = found & (query >= key) if layout.causal else found
        return found if window is None else found & (query - key < window)

    return flex_attention.BlockMask.from_kv_blocks(
        *_counted(some & ~whole),
        *_counted(whole),
        BLOCK_SIZE=FLEX,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )


def _by_tiles(seen: Tensor, side: int) -> Tensor:
    """Positions along a side -> (tiles, FLEX) there; behind the last position nothing is seen."""
    padding = [0, 0] * (seen.dim() - 1 - side) + [0, -seen.shape[side] % FLEX]
    return torch.nn.functional.pad(seen, padding).unflatten(side, (-1, FLEX))


def _counted(present: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has (1, H, rows), and the columns with their numbers first (1, H, rows, columns)."""
    order = present.int().argsort(dim=-1, descending=True, stable=True)
    return present.sum(-1).int()[None], order.int()[None]
