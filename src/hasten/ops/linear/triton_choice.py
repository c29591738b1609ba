"""How the Triton products are cut: pure functions of a product's sizes, whatever the device, so that results repeat."""

from dataclasses import dataclass
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
    whose bytes are under way to shared memory; 1: only this one's, to registers. early: of 16-bit weights, it may start
    while the kernel before it ends, and loads its first step's bytes then (Hopper GPUs).
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
    """A product by the kernel for Hopper GPUs, in tiles of n (128 or 256) weight rows by m rows of x.

    splits: parts of K. chunks: of 16 words of each weight row, in a step. stages: steps whose tiles are under way.
    """

    n: int
    m: int
    splits: int = 1
    chunks: int = 1
    stages: int = 4


def choose_one_row(bits: int, group_size: int, n: int, k: int) -> OneRow:
    """For a product with a weight (n, k). Enough programs for 132 multiprocessors come first, then work for each.

    As measured on an H200 over the products of Llama shapes of 1.1 and 7 B. int4 goes to registers at once: through
    shared memory it took three to eight times as long.
    """
    if bits == 16:
        return OneRow(block=4, early=True)
    if bits == 4:
        few = n < 8192
        return OneRow(block=2 if few else 4, threads=128 if few or n * k > 1 << 26 else 64, stages=1)
    if n < 8192:
        return OneRow(block=2)
    return OneRow(block=4, threads=64) if n < 16384 else OneRow(block=4, threads=32, stages=4)


def choose_few_rows(bits: int, group_size: int, rows: int, n: int, k: int, *, gated: bool = False) -> FewRows:
    """For up to 16 rows of x, as measured on an H200: 16 warps for each of its 132 multiprocessors, in one wave.

    Where groups are small, their scales and 16 rows of x want more registers: with one program, that is a prediction.
    """
    side = 2 if gated else 1
    programs = -(-n // (32 * side))
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


def many_rows(bits: int, group_size: int, n: int, m: int, splits: int = 1) -> ManyRows:
    """Tiles of n by m with as many stages as shared memory holds."""
    chunks = 1 if bits == 4 or group_size else 2
    stage = 128 * m * chunks * (2 if bits == 4 else 1) + n * 64 * chunks
    return ManyRows(n, m, splits, chunks, max(2, min(8, RING // stage)))


@lru_cache(maxsize=4096)
def choose_many_rows(bits: int, group_size: int, rows: int, n: int, k: int, with_zeros: bool = False) -> ManyRows:
    """For rows of x from 17 on: the least time by what limits a multiprocessor, in cycles.

    with_zeros: the weight has zeros, whose registers leave room for the smaller tile only.
    """
    found = []
    m = 32 if rows <= 32 else 64 if rows <= 64 else 128
    across = -(-rows // m)
    for tile in (128,) if with_zeros else (128, 256):
        words = 8 * bits * tile  # bytes of 64 features, as of x
        # Tensor cores; tiles out of the L2 cache; weights out of memory; instructions that unpack.
        cycles = max(tile * m / 32, (words + 128 * m) / 30, words / across / 16, tile * 2.9)
        cycles *= 1.2 if tile == 256 else 1.0  # as measured on an H200, like what else is added below
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits > 1 and k < 512 * splits:
                continue
            waves = -(-(-(-n // tile) * across * splits) // PROCESSORS)
            joining = 0 if splits == 1 else 2000 + 600 * splits + tile * m * 8 * (splits - 1) / splits / 50
            found.append((waves * (k / 64 / splits * cycles + 5000 + joining), splits, -tile))
    _, splits, tile = min(found)
    return many_rows(bits, group_size, -tile, m, splits)
