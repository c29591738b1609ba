"""How the Triton products are cut: pure functions of a product's sizes, whatever the device, so that results repeat."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

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
    """A product of up to 16 rows. A warp has 32 weight rows; `warps` of a program lie along K.

    ahead: chunks of 16 words of each weight row that a warp has under way. registers: of a thread, at most; with 128,
    16 warps fit into a multiprocessor. side: times 32 weight rows of a program; 2 for gate and up.
    """

    warps: int
    ahead: int = 1
    registers: int = 128
    side: int = 1


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
    rounded: x becomes int8, and products of int8 are summed as integers.
    """

    n: int
    m: int
    splits: int = 1
    chunks: int = 1
    stages: int = 4
    rounded: bool = False

    @property
    def groups(self) -> int:
        """Of warps, which share the tile's weight rows."""
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


def choose_few_rows(bits: int, group_size: int, rows: int, n: int, k: int, *, gated: bool = False) -> FewRows:
    """For up to 16 rows of x, as measured on an H200: 16 warps for each of its 132 multiprocessors, in one wave.

    Where groups are small, their scales and 16 rows of x want more registers: with one program, that is a prediction.
    """
    side = 2 if gated else 1
    programs = -(-n // (32 * side))
    if rows == 1 and bits == 8 and not group_size and 264 < programs < 528:
        return FewRows(16 // side, registers=64, side=side)
    many_registers = rows > 8 and bits == 4 and group_size < 128
    if programs <= 132 and many_registers:
        return FewRows(8 // side, ahead=2, registers=255, side=side)
    warps = 16 if programs <= 132 else 8 if programs <= 264 else 4
    ahead = 2 if warps == 4 and not group_size else 1
    return FewRows(warps // side, ahead, 168 if warps == 4 and many_registers else 128, side)


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
RING = 192 << 10  # bytes of shared memory for tiles under way


def many_rows(bits: int, group_size: int, n: int, m: int, splits: int = 1, *, rounded: bool = False) -> ManyRows:
    """Tiles of n by m with as many stages as shared memory holds."""
    chunks = 1 if bits == 4 or group_size else 2
    stage = 128 * m * (1 if rounded else chunks * (2 if bits == 4 else 1)) + n * 64 * chunks
    return ManyRows(n, m, splits, chunks, max(2, min(8, RING // stage)), rounded)


@lru_cache(maxsize=4096)
def choose_many_rows(
    bits: int, group_size: int, rows: int, n: int, k: int, *, with_zeros: bool = False, rounds: bool = False
) -> ManyRows:
    """For rows of x from 17 on: the least time by what limits a multiprocessor, in cycles.

    with_zeros: the weight has zeros, for whose registers there is no room in the largest tile. rounds: x may be rounded
    to int8, which takes a launch and halves its bytes and the tensor cores' time; only with one scale a row.
    """
    found = []
    m = 32 if rows <= 32 else 64 if rows <= 64 else 128
    across = -(-rows // m)
    integers = (False, True) if rounds and m == 128 and bits == 8 and not group_size else (False,)
    for tile, rounded in product((128, 192) if with_zeros else (128, 192, 256), integers):
        words, side = 8 * bits * tile, (64 if rounded else 128) * m  # bytes of 64 features
        # A tensor core's product of 64 weight rows and 16 features (of int8 32), tiles out of the L2 cache, weights out
        # of memory. With weights out of registers products come no faster than one in 67 cycles on an H200.
        cycles = max(tile / (32 if rounded else 16) * max(67, m / 2 + 25), (words + side) / 40, words / across / 16)
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits > 1 and k < 512 * splits:
                continue
            waves = -(-(-(-n // tile) * across * splits) // PROCESSORS)
            joining = 0 if splits == 1 else 2000 + 600 * splits + tile * m * 8 * (splits - 1) / splits / 50
            if splits > 1 and tile > 128:
                joining += 4000
            time = waves * (k / 64 / splits * cycles + 7000 + joining) + (6000 if rounded else 0)
            found.append((time, splits, -tile, rounded))
    _, splits, tile, rounded = min(found)
    return many_rows(bits, group_size, -tile, m, splits, rounded=rounded)
