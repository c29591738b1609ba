"""How large the tiles of FlashAttention in Triton are: a small table by head size.

Those of heads up to 128 are among the fastest of some ten that were measured on an H100 with 8,192 tokens, causal and
not. Each compiles for a Hopper GPU without spilling registers and within its shared memory
(tests/ops/test_flash_compiles.py).
"""

from dataclasses import dataclass

from torch import Tensor

LEAST_SIDE = 16  # of a tensor core's tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Rows of queries and of keys in a tile, warps of a program, and how many tiles are on their way from memory."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the largest head size (a power of two) that they serve.
FORWARD = {
    64: Tiles(queries=128, keys=64, warps=8, stages=3),  # so small that a multiprocessor holds two programs
    128: Tiles(queries=128, keys=128, warps=8, stages=3),
    256: Tiles(queries=128, keys=64, warps=8, stages=2),
}
BACKWARD_QUERIES = {
    64: Tiles(queries=64, keys=64, warps=4, stages=3),
    128: Tiles(queries=128, keys=64, warps=8, stages=3),
    256: Tiles(queries=64, keys=32, warps=8, stages=2),
}
BACKWARD_KEYS = {
    64: Tiles(queries=64, keys=64, warps=4, stages=3),
    128: Tiles(queries=64, keys=128, warps=8, stages=2),
    256: Tiles(queries=32, keys=64, warps=8, stages=2),
}
# The soft-cap's slope wants registers of its own.
BACKWARD_KEYS_CAPPED = BACKWARD_KEYS | {128: Tiles(queries=32, keys=128, warps=8, stages=3)}
# In the interpreter small ones, so that a short sequence has several of every kind.
INTERPRETED = Tiles(queries=32, keys=16, warps=4, stages=1)


def side(size: int) -> int:
    """A head size, or a number of heads, as a tile has it: the next power of two."""
    return max(LEAST_SIDE, 1 << (size - 1).bit_length())


def forward_tiles(q: Tensor) -> Tiles:
    return _choose(FORWARD, q)


def backward_tiles(q: Tensor, *, capped: bool) -> tuple[Tiles, Tiles]:
    """Tiles of the two backward kernels: the queries' gradient, and the keys' and values'."""
    return _choose(BACKWARD_QUERIES, q), _choose(BACKWARD_KEYS_CAPPED if capped else BACKWARD_KEYS, q)


def _choose(table: dict[int, Tiles], q: Tensor) -> Tiles:
    if q.device.type == "cpu":
        return INTERPRETED
    return next(tiles for largest, tiles in table.items() if q.shape[3] <= largest)
