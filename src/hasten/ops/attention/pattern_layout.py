"""What every sparse attention pattern is: a rule for the key blocks of a row, and the layout that comes of it.

The patterns themselves are in patterns.py.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from hasten.checks import whole
from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The blocks that are seen. heads: one entry for all heads, or one a head; each holds the sorted columns of a row.
    period: where each row sees exactly every period-th block, counted from its own.

    The rows are the last ones of `blocks_k` (aligned bottom right): row r is block blocks_k - blocks_q + r of the keys.
    """

    block: int  # positions of a block
    causal: bool
    blocks_k: int
    heads: tuple[tuple[Sequence[int], ...], ...]
    period: int | None = None

    @property
    def blocks_q(self) -> int:
        return len(self.heads[0])

    @property
    def first_row(self) -> int:
        """The key block at the position of row 0."""
        return self.blocks_k - self.blocks_q

    @property
    def present(self) -> int:
        """Blocks that are seen, of all heads that are laid out."""
        return sum(len(row) for head in self.heads for row in head)

    @property
    def density(self) -> float:
        """Blocks that are seen over those that dense attention of the same kind (causal or not) would see."""
        rows = range(self.first_row + 1, self.blocks_k + 1)
        whole = sum(rows) if self.causal else len(rows) * self.blocks_k
        return self.present / (whole * len(self.heads))

    def strings(self, head: int = 0) -> tuple[str, ...]:
        """One string of 0 and 1 a row."""
        own = self.heads[head if len(self.heads) > 1 else 0]
        return tuple("".join("1" if j in row else "0" for j in range(self.blocks_k)) for row in map(set, own))


def size(default: int, *, least: int) -> int:
    """A field that is a whole number of at least `least`."""
    return field(default=default, metadata={"least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What all patterns have in common. Sizes are in blocks of `block` positions.

    per_head: random choices differ from head to head; without it one layout serves all heads. first_head: number of the
    first head that is laid out, where ranks divide a model's heads. Raises ConfigError for sizes that mean nothing.
    """

    block: int = size(64, least=1)
    causal: bool = True
    seed: int = 0
    per_head: bool = False
    first_head: int = size(0, least=0)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "least" in f.metadata:
                whole(f"{type(self).__name__}: {f.name}", value, low=f.metadata["least"])
            several = isinstance(f.default, tuple | None) and value != f.default
            if several and not (isinstance(value, tuple | list) and all(type(one) is int for one in value)):
                raise ConfigError(f"{type(self).__name__}: {f.name} must be a tuple of integers; found {value!r}")

    @property
    def differs_by_head(self) -> bool:
        return self.per_head

    @property
    def reach(self) -> int | None:
        """How many keys back a query of a causal pattern can see, its own included; None: all of them."""
        return None

    @property
    def period(self) -> int | None:
        """For a pattern that sees exactly every period-th block, counted from the query's own."""
        return None

    @property
    def cycle(self) -> int | None:
        """The rows after which those that follow see the same within their reach; None where they never do."""
        return self.period if self.reach is None else self.reach // self.block + 1

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        """The key blocks that block `row` sees, in any order. blocks: how many there are (causal: up to the row).

        What lies outside of them is dropped by `layout`, and the row's own block is added.
        """
        raise NotImplementedError

    def layout(self, blocks_q: int, blocks_k: int | None = None, *, heads: int = 1, layer: int = 0) -> BlockLayout:
        """The blocks that the last `blocks_q` of `blocks_k` (default: as many) query blocks see."""
        blocks_k = blocks_q if blocks_k is None else blocks_k
        for name, value, low in (("blocks_q", blocks_q, 1), ("heads", heads, 1), ("layer", layer, 0)):
            whole(name, value, low=low)
        if not isinstance(blocks_k, int) or blocks_k < blocks_q:
            raise ConfigError(f"{blocks_q} query blocks are the last of at least as many key blocks; found {blocks_k}")
        laid = tuple(
            tuple(self._row(row, blocks_k, head, layer) for row in range(blocks_k - blocks_q, blocks_k))
            for head in range(self.first_head, self.first_head + (heads if self.differs_by_head else 1))
        )
        return BlockLayout(block=self.block, causal=self.causal, blocks_k=blocks_k, heads=laid, period=self.period)

    def _row(self, row: int, blocks: int, head: int, layer: int) -> Sequence[int]:
        end = row + 1 if self.causal else blocks
        if self.period is not None:  # without its columns in memory: a block may be a single position
            return range(row % self.period, end, self.period)
        seen = {j for j in self.columns(row, end, head=head, layer=layer) if 0 <= j < end}
        return tuple(sorted(seen | {row}))

    def render(self, blocks: int, *, head: int = 0, layer: int = 0) -> str:
        """The pattern of `blocks` blocks for people: its parameters, then a line a row, ■ seen and · not."""
        layout = self.layout(blocks, heads=head + 1, layer=layer)
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        title = f"{type(self).__name__}({given}), {layout.density:.0%} of the blocks"
        signs = str.maketrans("01", "·■")
        return "\n".join([title, *(" ".join(row.translate(signs)) for row in layout.strings(head))])

    def _with_drawn(self, seen: set[int], blocks: int, count: int, *, head: int, layer: int, row: int) -> set[int]:
        """What is seen and `count` of the other blocks, or all where there are fewer; from a generator of its own."""
        others = [j for j in range(blocks) if j not in seen]
        if count == 0 or len(others) <= count:
            return seen.union(others[:count])
        # Only seeding by a string and random() are promised to stay what they are from one Python to the next.
        generator = random.Random(f"{self.seed}/{layer}/{head if self.per_head else 0}/{row}")
        return seen.union(j for _, j in sorted((generator.random(), j) for j in others)[:count])
