"""The shape of panels, in which native kernels keep a weight (linear/gemm.h)."""

PANEL = 64  # output rows interleaved in a panel
PADDING = 32  # K is padded to a multiple of it in weights without groups


def steps(size: int, step: int) -> int:
    """The number of steps that cover a size (the last one padded)."""
    return -(-size // step)


def panel_shape(rows: int, in_features: int, bits: int, group_size: int = 0) -> tuple[int, int, int, int]:
    """Shape of the packed tensor of a weight (N, K): bytes, or values where these have 16 bits."""
    multiple = group_size or PADDING
    words = steps(in_features, multiple) * multiple * bits // 32  # of 4 bytes
    return steps(rows, PANEL), words, PANEL, 2 if bits == 16 else 4
