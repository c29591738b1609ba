"""A decode step's blocks in one launch (decode_kernels.py): which models it serves, how the work is cut, the launch.

The kernel finds the matrices of a layer through a table of offsets from one of them, so its arguments are the same
whatever the number of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hasten.ops.attention.ragged import LOG2_E
from hasten.ops.attention.view import KVView

UNIT = 16  # bytes in which offsets are counted
SHARED = 227 << 10  # bytes of shared memory that a program can have
SPARE = 6 << 10  # of them for sums that warps exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model whose layers are all alike."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    turned: int  # elements of a head that rotary positions turn
    activation: int  # its number in beside.py, plus 1
    biased: bool = False  # qkv has a bias
    normed: bool = False  # q and k have a norm of each head

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a step is divided: tiles of `rows` by `words`, `stages` of them in shared memory."""

    programs: int
    rows: int
    words: int
    across: int
    staged: int
    stages: int
    splits: int
    keys: int = 64
    warps: int = 8


WORDS, STAGED = 512, 2048  # 32-bit words of a row of a tile; features of x that are put into shared memory at once
FEWEST_STAGES = 4  # tiles on their way, with which the memory is kept busy


def cut_for(sizes: Sizes, multiprocessors: int) -> Tiling | str:
    """How a step is divided on a GPU, or why the kernel does not serve these sizes.

    Tiles have 16 rows, or 8 where these give more programs work or leave room for x beside them in shared memory.
    """
    largest = max(sizes.hidden, sizes.inner, sizes.heads * sizes.head_dim)
    places = triton.cdiv(triton.cdiv(largest, 2 * WORDS) * 2 * WORDS, STAGED) * STAGED
    room = SHARED - SPARE - places * 4
    for rows in (16, 8):
        blocks = min(sizes.hidden, sizes.qkv, 2 * sizes.inner) // rows
        stages = min(10, room // (rows * WORDS * 4))
        if blocks >= multiprocessors and stages >= FEWEST_STAGES:
            break
    programs = min(multiprocessors, blocks)
    splits = programs // sizes.heads
    if stages < FEWEST_STAGES:
        return f"its kernel has no shared memory for tiles of weights beside {largest:,} features"
    if splits < 1 or 2 * programs < multiprocessors:
        return f"its kernel has work for {programs} of {multiprocessors} multiprocessors, with {sizes.heads} heads"
    return Tiling(
        programs=programs,
        rows=rows,
        words=WORDS,
        across=2,
        staged=STAGED,
        stages=stages,
        splits=min(8, splits),
    )


class DecodeLayers:
    """All blocks of a model for one row, with the buffers they share: steps of one stream at a time.

    matrices: per layer qkv, output, inner and down, (N, K) in 16 bits; small: per layer the weights of its two norms,
    qkv's bias, and the weights of the norms of q and k, in 16 bits, where there are any. All contiguous, K a
    multiple of 8.
    """

    def __init__(
        self,
        sizes: Sizes,
        matrices: Sequence[Sequence[Tensor]],
        small: Sequence[Sequence[Tensor | None]],
        *,
        scale: float,
        eps: float,
        offset: float,
        cut: Tiling,
    ) -> None:
        self.sizes, self.cut, self.matrices, self.small = sizes, cut, matrices, small
        self.numbers = (eps, offset, scale * LOG2_E)
        assert small[0][0] is not None
        like, heads = small[0][0], cut.splits * sizes.heads
        self.parts = like.new_empty(heads * sizes.head_dim)
        self.peaks, self.sums = like.new_empty(2, heads, dtype=torch.float32).unbind()
        self.qkv, self.inner = like.new_empty(sizes.qkv), like.new_empty(sizes.inner)
        self._like, self.counter = like, like.new_zeros(1, dtype=torch.int32)
        self._tables: dict[tuple[int, ...], Tensor] = {}  # by addresses; captured steps read them, so all are kept

    def reads(self) -> list[int | None]:
        """The addresses of the weights."""
        held = (tensor for own in (*self.matrices, *self.small) for tensor in own)
        return [None if tensor is None else tensor.data_ptr() for tensor in held]

    def table(self, views: Sequence[KVView]) -> Tensor | None:
        """The offsets of weights and caches, or None where a new one is needed while a step is captured."""
        place = tuple(t.data_ptr() for view in views for t in (view.k, view.v))
        if place not in self._tables:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return None
            rows = []
            for layer, view in enumerate(views):
                of_words = _offsets(self.matrices[layer], self.matrices[0][0])
                first, second, *others = _offsets([*self.small[layer], view.k, view.v], self._like)
                rows.append([*of_words, first, second, *others[3:], *others[:3], *[0] * 5])
            self._tables[place] = torch.tensor(rows, dtype=torch.int64).to(self.counter.device)
        return self._tables[place]

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, views: Sequence[KVView]) -> bool:
        """Run the blocks on x (C,) float32, in place; False where they were not run. cos, sin (dim/2,) float32."""
        table = self.table(views)
        if table is None:
            return False
        with torch.cuda.device_of(x):
            page = 0 if views[0].metadata.block_table is None else views[0].metadata.block_size
            self.launch(*self.arguments(x, cos, sin, views, table), PAGE=page)
        return True

    def launch(self, *arguments: Any, **known: Any) -> None:
        """Launch the kernel."""
        from hasten.ops.block.decode_kernels import decode_layers  # imports Gluon

        cut = self.cut
        known |= constants(self.sizes, cut)
        decode_layers[(cut.programs,)](*arguments, **known, num_warps=cut.warps, launch_cooperative_grid=True)

    def arguments(self, x: Tensor, cos: Tensor, sin: Tensor, views: Sequence[KVView], table: Tensor) -> tuple[Any, ...]:
        """The kernel's arguments, for all layers."""
        view = views[0]
        step = view.metadata
        first = self.matrices[0][0].view(torch.int32)
        return (
            *(x, first, self._like, table, self.qkv, self.parts, self.peaks, self.sums),
            *(self.inner, cos, sin, step.slot_mapping, step.seq_lens, step.first_slots, step.block_table, self.counter),
            *(self.sizes.layers, view.k.shape[0], 0 if step.block_table is None else step.block_table.shape[1]),
            *(*view.k.stride()[:2], *self.numbers),
        )


def _offsets(tensors: Sequence[Tensor | None], first: Tensor) -> list[int]:
    """Where tensors are, counted from the first one."""
    return [0 if tensor is None else (tensor.data_ptr() - first.data_ptr()) // UNIT for tensor in tensors]


def constants(sizes: Sizes, cut: Tiling) -> dict[str, Any]:
    """The constants the kernel is compiled with."""
    return {
        "HIDDEN": sizes.hidden,
        "HEADS": sizes.heads,
        "KV_HEADS": sizes.kv_heads,
        "D": sizes.head_dim,
        "INNER": sizes.inner,
        "HALF": sizes.turned // 2,
        "ACTIVATION": sizes.activation,
        "BIASED": sizes.biased,
        "NORMED": sizes.normed,
        "ACROSS": cut.across,
        "R": cut.rows,
        "KT": cut.words,
        "XT": cut.staged,
        "STAGES": cut.stages,
        "SPLITS": cut.splits,
        "KEYS": cut.keys,
    }
