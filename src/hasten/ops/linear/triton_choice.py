"""How the Triton products are cut: pure functions of a product's sizes, whatever the device, so that results repeat."""

from dataclasses import dataclass

from hasten.ops.triton_support import launches_early

PDL = launches_early()  # programmatic dependent launch: a product fetches weights while the kernel before it ends

# Up to here weights are unpacked in front of the tensor cores; with more rows, first into a 16-bit matrix for PyTorch's
# product. On an H200 the former took 1.9 to 3.7 times a bfloat16 product's time at 256 and at 1,024 rows; the latter
# moves 2.5 to 3 bytes a weight beside it.
MOST_UNPACKED_ROWS = 128


@dataclass(frozen=True, slots=True)
class OneRow:
    """A product of one row. A program has `block` (1, 2, 4 or 8) blocks of 4 weight rows, of 16-bit weights rows.

    threads: of a program, all along K; in a step each has 16 bytes of every block. stages: steps whose bytes are under
    way to shared memory; 1: only this one's, to registers.
    """

    block: int
    threads: int = 128
    stages: int = 3
    pdl: bool = PDL


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
    pdl: bool = PDL


def choose_one_row(bits: int, group_size: int, n: int, k: int) -> OneRow:
    """For a product with a weight (n, k). Enough programs for 132 multiprocessors come first, then work for each.

    As measured on an H200 over the products of Llama shapes of 1.1 and 7 B. int4 goes to registers at once: through
    shared memory it took three to eight times as long.
    """
    if bits == 16:
        return OneRow(block=8 if n >= 8192 else 4)
    if bits == 4:
        few = n < 8192
        return OneRow(block=2 if few else 4, threads=128 if few or n * k > 1 << 26 else 64, stages=1)
    if n < 8192:
        return OneRow(block=2)
    return OneRow(block=4, threads=64) if n < 16384 else OneRow(block=4, threads=32, stages=4)


def choose_several_rows(bits: int, group_size: int, rows: int, n: int, k: int) -> SeveralRows:
    """For rows of x from 2 on."""
    chunks = 1 if bits == 4 or group_size else 2
    if rows <= 64:
        m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        tile, threads, stages, wanted, scaled = 64, 128, 3, 396 if m == 16 else 256, True
    else:
        m, tile, threads, stages, wanted, scaled = 128, 128, 256, 3, 132, True
    steps = -(-k // ((128 if bits == 4 else 64) * chunks))
    tiles = -(-n // tile) * -(-rows // m)
    splits = 1
    while splits < 16 and tiles * splits < wanted and steps // (2 * splits) >= stages:
        splits *= 2
    return SeveralRows(tile, m, splits, chunks, threads, stages, scaled)
