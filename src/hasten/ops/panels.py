"""The shape of panels, in which native kernels keep a weight (linear/gemm.h)."""

PANEL = 64  # output rows that are interleaved
PADDING = 32  # K of a weight without groups is filled up to a multiple of it


def steps(size: int, step: int) -> int:
    """How many steps cover a size, the last one filled up."""
    return -(-size // step)


def panel_shape(rows: int, in_features: int, bits: int, group_size: int = 0) -> tuple[int, int, int, int]:
    """The packed tensor of a weight (N, K): bytes, except those of 16 bits, which are values."""
    multiple = group_size or PADDING
    words = steps(in_features, multiple) * multiple * bits // 32  # of 4 bytes
    return steps(rows, PANEL), words, PANEL, 2 if bits == 16 else 4
