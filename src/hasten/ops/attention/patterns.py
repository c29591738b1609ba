"""Sparse attention patterns as data: which blocks of keys each block of queries sees.

Positions are cut into blocks; a pattern says, row by row, which key blocks a query block attends. What comes out is a
`BlockLayout`, the column numbers of each row and never an n × n matrix. Causal patterns see nothing later than the
query: later blocks are left out, and in the block on the diagonal the kernels hide the later keys.

    print(BigBird(block=64).render(8))

Sources: local, atrous and their union, Sparse Transformers (arXiv 1904.10509); Fixed, Variable, BigBird (arXiv
2007.14062), BSLongformer (arXiv 2004.05150) as DeepSpeed lays them out in blocks. Different from there: a causal
pattern never sees the future, whatever its random, global or rotating blocks; every row sees its own block; rows with
fewer candidates than random blocks take all of them; and the random choice depends on (seed, layer, head, row) alone,
so every process draws the same, and a causal row stays what it is when the sequence grows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hasten.checks import whole
from hasten.errors import ConfigError
from hasten.ops.attention.pattern_layout import Pattern, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(Pattern):
    """Everything (causal: everything up to the query)."""

    causal: bool = False

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        return range(blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Causal(Dense):
    """Everything up to the query, as a pattern: the dense baseline."""

    causal: bool = True

    def __post_init__(self) -> None:
        Pattern.__post_init__(self)
        if not self.causal:
            raise ConfigError("Causal cannot be bidirectional; use Dense()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(Pattern):
    """Blocks at most `radius` away: |i - j| <= radius."""

    radius: int = size(1, least=0)

    @property
    def reach(self) -> int | None:
        return (self.radius + 1) * self.block

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        return _within(row - self.radius, row + self.radius + 1, blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Pattern):
    """`window` blocks around the query: window // 2 on each side."""

    window: int = size(3, least=1)

    @property
    def reach(self) -> int | None:
        return (self.window // 2 + 1) * self.block

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        return _window(row, self.window, blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Atrous(Pattern):
    """Every `stride`-th block, counted from the query: (i - j) mod stride = 0. Also called dilated.

    With block=1 that is every stride-th position. Any block is skipped by any dense kernel (regroup.py).
    """

    stride: int = size(4, least=1)

    @property
    def differs_by_head(self) -> bool:
        return False

    @property
    def period(self) -> int | None:
        return self.stride

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        return range(row % self.stride, blocks, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided(Pattern):
    """Near blocks densely, far ones every `stride`-th: the union of Local and Atrous (Sparse Transformers)."""

    radius: int = size(1, least=0)
    stride: int = size(4, least=1)

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        near = _within(row - self.radius, row + self.radius + 1, blocks)
        return {*near, *range(row % self.stride, blocks, self.stride)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Pattern):
    """Windows of `local_blocks`; the last `global_blocks` of each window are seen by everyone (causal: by all later).

    global_patterns: how many heads in turn take the last, the last but one, … as their global blocks. horizontal, for
    bidirectional attention: global blocks also see everything.
    """

    local_blocks: int = size(4, least=1)
    global_blocks: int = size(1, least=1)
    global_patterns: int = size(1, least=1)
    horizontal: bool = False

    def __post_init__(self) -> None:
        Pattern.__post_init__(self)
        if self.global_blocks * self.global_patterns > self.local_blocks:
            raise ConfigError(
                f"Fixed: {self.global_patterns} patterns of {self.global_blocks} global blocks do not fit into windows "
                f"of {self.local_blocks}"
            )
        _refuse_causal_rows(self, self.horizontal)

    @property
    def differs_by_head(self) -> bool:
        return self.per_head or self.global_patterns > 1

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        first = self.local_blocks - (1 + head % self.global_patterns) * self.global_blocks
        whole = blocks // self.local_blocks * self.local_blocks
        starts = [*range(first, whole, self.local_blocks)]
        if whole < blocks:  # a last window that is short keeps as many global blocks as there is room for
            starts.append(max(whole, min(whole + first, blocks - self.global_blocks)))
        globals_ = {j for start in starts for j in _within(start, start + self.global_blocks, blocks)}
        if self.horizontal and row in globals_:
            return range(blocks)
        own = row // self.local_blocks * self.local_blocks
        return {*_within(own, own + self.local_blocks, blocks), *globals_}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithGlobals(Pattern):
    """global_indices: blocks that everyone sees; with global_ends, of the same length, ranges [index, end)."""

    global_indices: tuple[int, ...] = (0,)
    global_ends: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        Pattern.__post_init__(self)
        starts, ends = self.global_indices, self._ends()
        if len(starts) != len(ends) or any(not 0 <= a < b for a, b in zip(starts, ends, strict=True)):
            raise ConfigError(
                f"{type(self).__name__}: each global range must begin at 0 or later and end past its begin; found "
                f"{starts}, {ends}"
            )

    def globals(self, blocks: int) -> set[int]:
        """Indices of the global blocks in a sequence of `blocks` blocks."""
        return {j for a, b in zip(self.global_indices, self._ends(), strict=True) for j in _within(a, b, blocks)}

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + 1 for start in self.global_indices) if self.global_ends is None else self.global_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable(_WithGlobals):
    """Windows of the given sizes one after the other (the last repeats), random blocks a row, and global blocks.

    horizontal, for bidirectional attention: global blocks also see everything.
    """

    windows: tuple[int, ...] = (4,)
    random_blocks: int = size(0, least=0)
    horizontal: bool = False

    def __post_init__(self) -> None:
        _WithGlobals.__post_init__(self)
        if not self.windows:
            raise ConfigError("Variable: windows must hold at least one size; found ()")
        for blocks in self.windows:
            whole("Variable: windows", blocks)
        _refuse_causal_rows(self, self.horizontal)

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        start = 0
        for window in self.windows:
            if row < start + window:
                break
            start += window
        else:
            window = self.windows[-1]
            start += (row - start) // window * window
        globals_ = self.globals(blocks)
        if self.horizontal and row in globals_:
            return range(blocks)
        seen = {*_within(start, start + window, blocks), *globals_}
        return self._with_drawn(seen, blocks, self.random_blocks, head=head, layer=layer, row=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class BigBird(Pattern):
    """Random blocks a row, a sliding window, and the first `global_blocks` rows and columns (arXiv 2007.14062).

    Causal: global rows see what is not later, so only the columns are left of them.
    """

    random_blocks: int = size(1, least=0)
    window: int = size(3, least=1)
    global_blocks: int = size(1, least=0)

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        if row < self.global_blocks:
            return range(blocks)
        seen = {*_window(row, self.window, blocks), *_within(0, self.global_blocks, blocks)}
        return self._with_drawn(seen, blocks, self.random_blocks, head=head, layer=layer, row=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class BSLongformer(_WithGlobals):
    """A sliding window and global blocks, which everyone sees and which see everything (arXiv 2004.05150)."""

    window: int = size(3, least=1)

    def columns(self, row: int, blocks: int, *, head: int, layer: int) -> Iterable[int]:
        globals_ = self.globals(blocks)
        if row in globals_:
            return range(blocks)
        return {*_window(row, self.window, blocks), *globals_}


def _within(start: int, stop: int, blocks: int) -> range:
    """start … stop-1 as far as there are such blocks: a size may be any number, what is laid out has an end."""
    return range(max(0, start), min(stop, blocks))


def _window(row: int, window: int, blocks: int) -> range:
    return _within(row - window // 2, row + window // 2 + 1, blocks)


def _refuse_causal_rows(pattern: Pattern, horizontal: bool) -> None:
    if horizontal and pattern.causal:
        raise ConfigError(
            f"{type(pattern).__name__}: global rows that see everything need causal=False; drop horizontal or causal"
        )


PATTERNS: dict[str, type[Pattern]] = {
    "causal": Causal,
    "dense": Dense,
    "local": Local,
    "sliding-window": SlidingWindow,
    "atrous": Atrous,
    "strided": Strided,
    "fixed": Fixed,
    "variable": Variable,
    "bigbird": BigBird,
    "bslongformer": BSLongformer,
}
