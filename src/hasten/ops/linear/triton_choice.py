"""How the Triton products are cut: pure functions of a product's sizes, whatever the device, so that results repeat."""

from dataclasses import dataclass, replace
from functools import lru_cache

# On other GPUs than Hopper, up to here weights are unpacked in front of the tensor cores; with more rows, first into a
# 16-bit matrix for PyTorch's product. On an H200 the former took 1.9 to 3.7 times a bfloat16 product's time at 256 and
# at 1,024 rows, the latter 1.9 to 2.2 and 1.2 to 1.4.
MOST_UNPACKED_ROWS = 128
MOST_FEW_ROWS = 16  # two tiles of the tensor core's 8


@dataclass(frozen=True, slots=True)
class OneRow:
    """A product of one row. A program has `block` (1, 2, 4 or 8) blocks of 4 weight rows, of 16-bit weights rows.

    threads: of a program, all along K; in a step each has 16 bytes of every block. stages: of packed weights, steps
    whose bytes are under way to shared memory; 1: only this one's, to registers. early: it may start while the kernel
    before it ends, and loads its first step's bytes then (Hopper GPUs); stages is 1.
    """

    block: int
    threads: int = 128
    stages: int = 3
    early: bool = False


@dataclass(frozen=True, slots=True)
class FewRows:
    """A product of few rows. A warp has 32 weight rows; `warps` of a program lie along K.

    ahead: chunks of 16 words of each weight row that a warp has under way. registers: of a thread, at most; with 128,
    16 warps fit into a multiprocessor. side: times 32 weight rows of a program; 2 for gate and up. tiles: of 8 rows of
    x of a program (1, 2 or 4). early: it may start while the kernel before it ends, and loads its first words then.
    """

    warps: int
    ahead: int = 1
    registers: int = 128
    side: int = 1
    tiles: int = 2
    early: bool = True


@dataclass(frozen=True, slots=True)
class SeveralRows:
    """A product of several rows, in tiles of n weight rows by m rows of x. K is cut into `splits` parts.

    chunks: of 16 words of each weight row, in a step. scaled: groups' scales multiply the weights, not their products.
    """

    n: int
    m: int
    splits: int = 1
    chunks: int = 1
    threads: int = 128
    stages: int = 4
    scaled: bool = True


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A product by the kernel for Hopper GPUs, in tiles of n (128, 192 or 256) weight rows by m rows of x.

    splits: parts of K. chunks: of 16 words of each weight row, in a step. stages: steps whose tiles are under way.
    rounded: x becomes int8, and products of int8 are summed as integers. early: it may start while the kernel before
    it ends, and fetches its first words then. programs: that fit into a multiprocessor, 1 or 2; 2 have fewer registers
    and less shared memory, so that those of the next product start beside those that end.
    """

    n: int
    m: int
    splits: int = 1
    chunks: int = 1
    stages: int = 4
    rounded: bool = False
    early: bool = False
    programs: int = 1

    @property
    def groups(self) -> int:
        """Number of warp groups, which share the tile's weight rows."""
        return 3 if self.n == 192 else 2


def choose_one_row(bits: int, group_size: int, n: int, k: int) -> OneRow:
    """For a product with a weight (n, k). Enough programs for 132 multiprocessors come first, then work for each.

    As measured on an H200 over the products of Llama shapes of 1.1 and 7 B. int4 goes to registers at once: through
    shared memory it took three to eight times as long.
    """
    if bits == 16:
        return OneRow(block=4, stages=1, early=True)
    if bits == 4:
        return OneRow(2 if n < 8192 else 4, threads=128 if n < 8192 else 64, stages=1, early=True)
    if n < 8192:
        return OneRow(block=2)
    return OneRow(block=4, threads=64) if n < 16384 else OneRow(block=4, threads=32, stages=4)


def norm_apart(bits: int, n: int, k: int) -> bool:
    """Whether one row has its norm in a launch of its own, for the kernel of few rows: where that took less time.

    Measured on an H200 with groups of 32: 21.8 µs instead of 23.8 for 22,016 x 4,096, 28 instead of 32 for 32,000 x
    4,096; 9.7 instead of 8.1 for 11,264 x 2,048. int8 takes 28 instead of 26 for 22,016 x 4,096.
    """
    return bits == 4 and n * k >= 1 << 25


def serves_few_rows(rows: int, n: int, k: int) -> bool:
    """Whether the kernel of few rows multiplies with a weight (n, k): up to 16 rows, up to 64 where it is small.

    Tried on an H200, 64 rows: 5.4 (int4) and 5.9 µs (int8) instead of 9.0 and 8.4 for 2048 x 2048, 16 instead of 13 for
    4096 x 4096.
    """
    return rows <= (64 if n * k <= 6 << 20 else MOST_FEW_ROWS)


def choose_few_rows(bits: int, group_size: int, rows: int, n: int, k: int, *, gated: bool = False) -> FewRows:
    """Choose tiles by what was measured on an H200: 16 warps for each of its 132 multiprocessors, in one wave.

    Where groups are small, their scales and 16 rows of x want more registers: with one program, that is a prediction.
    """
    side = 2 if gated else 1
    programs = -(-n // (32 * side))
    if rows > MOST_FEW_ROWS:
        if programs * -(-rows // 16) <= 264:
            return FewRows(8 // side, side=side)
        return FewRows(4 // side, registers=168, side=side, tiles=2 if bits == 4 else 4)
    early = bits == 4 or n * k >= 1 << 25  # with int8's small weights whole steps took 1% longer
    if rows == 1 and bits == 8 and not group_size and programs > 264:
        return FewRows(8 // side, registers=80, side=side, early=early)
    many_registers = rows > 8 and bits == 4 and group_size < 128
    if programs <= 132 and many_registers:
        return FewRows(8 // side, ahead=2, registers=255, side=side, early=early)
    warps = 16 if programs <= 132 else 8 if programs <= 264 else 4
    ahead = 2 if warps == 4 and not group_size else 1
    return FewRows(warps // side, ahead, 168 if warps == 4 and many_registers else 128, side, early=early)


def choose_several_rows(bits: int, group_size: int, rows: int, n: int, k: int) -> SeveralRows:
    """For rows of x from 17 on, where the kernel for Hopper GPUs does not serve."""
    chunks = 1 if bits == 4 or group_size else 2
    if rows <= 64:
        m, tile, threads, stages, wanted = 32 if rows <= 32 else 64, 64, 128, 3, 256
    else:
        m, tile, threads, stages, wanted = 128, 128, 256, 3, 132
    steps = -(-k // ((128 if bits == 4 else 64) * chunks))
    tiles = -(-n // tile) * -(-rows // m)
    splits = 1
    while splits < 16 and tiles * splits < wanted and steps // (2 * splits) >= stages:
        splits *= 2
    return SeveralRows(tile, m, splits, chunks, threads, stages)


PROCESSORS = 132  # multiprocessors of a Hopper GPU
RING = {1: 192 << 10, 2: 104 << 10}  # bytes of a program's shared memory for tiles under way


def many_rows(
    bits: int, group_size: int, n: int, m: int, splits: int = 1, *, rounded: bool = False, programs: int = 1
) -> ManyRows:
    """Tiles of n by m with as many stages as shared memory holds."""
    chunks = 1 if bits == 4 or group_size or m == 256 else 2
    stage = 128 * m * (1 if rounded else chunks * (2 if bits == 4 else 1)) + n * 64 * chunks
    stages = max(2, min(8, RING[programs] // stage))
    return ManyRows(n, m, splits, chunks, stages, rounded, programs=programs)


@lru_cache(maxsize=4096)
def choose_many_rows(
    bits: int, group_size: int, rows: int, n: int, k: int, *, with_zeros: bool = False, rounds: bool = False
) -> ManyRows:
    """For rows of x from 17 on: the least time by what limits a multiprocessor, in cycles.

    with_zeros: the weight has zeros, for whose registers there is no room in the largest tile. rounds: x may be rounded
    to int8, which takes a launch and halves its bytes and the tensor cores' time; only with one scale a row.
    """
    found = []
    for tile, m, rounded in _tiles(rows, with_zeros=with_zeros, rounds=rounds and bits == 8 and not group_size):
        across = -(-rows // m)
        words, side = 8 * bits * tile, (64 if rounded else 128) * m  # bytes of 64 features
        # A tensor core's product of 64 weight rows and 16 features (of int8 32), tiles out of the L2 cache, weights out
        # of memory. With weights out of registers products come no faster than one in 67 cycles on an H200.
        cycles = max(tile / (32 if rounded else 16) * max(67, m / 2 + 25), (words + side) / 40, words / across / 16)
        # Where it pays: not for int8 and 32 MB and more. Zeros need registers.
        pair = tile == 128 and m <= 64 and not with_zeros and (bits == 4 or n * k < 1 << 25)
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits > 1 and (k < 512 * splits or m < min(rows, 128)):
                continue
            waves = -(-(-(-n // tile) * across * splits) // PROCESSORS)
            joining = 0.0
            if splits > 1:
                joining = 600 * splits + tile * m * 8 * (splits - 1) / splits / 50
                joining += (5000 if m > 64 else 2000) + (4000 if tile > 128 else 0)
            begin = 4000 if pair else 7000
            time = waves * (k / 64 / splits * cycles + begin + joining) + (6000 if rounded else 0)
            found.append((time, splits, -tile, m, rounded, pair))
    _, splits, tile, m, rounded, pair = min(found)
    config = many_rows(bits, group_size, -tile, m, splits, rounded=rounded, programs=2 if pair else 1)
    return replace(config, early=pair)  # the others, alone up to 2 µs faster for it, made layers slower


def _tiles(rows: int, *, with_zeros: bool, rounds: bool) -> list[tuple[int, int, bool]]:
    """Weight rows of a tile, its rows of x, and whether these are rounded."""
    m = 32 if rows <= 32 else 64 if rows <= 64 else 128
    found = [(128, m, False), (192, m, False)]
    found += [] if with_zeros else [(256, m, False)]
    if m == 128:
        found += [(tile, m, True) for tile in (128, 192, 256)] if rounds else []
        found += [] if with_zeros else [(128, 64, False), (128, 256, False)]
    return found
