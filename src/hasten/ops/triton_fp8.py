"""A row rounded to FP8 in the kernel that makes it: a program has the whole row, so its scale is known at once.

Scales are powers of two: multiplying by one loses nothing, so a scale can move from one factor of a product to the
other. Import this file only where a Triton kernel is taken; it imports Triton.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # of e4m3
LEAST = tl.constexpr(1e-15)  # of a row's largest magnitude: the product of two scales is still a normal number


@triton.jit
def scale_of(largest):
    """The smallest power of two that brings numbers of that magnitude into e4m3's range."""
    bits = (tl.maximum(largest, LEAST) / LARGEST).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def store_rounded(x, narrow, scales, row, places, inside):
    """Write x, 0 outside, divided by its scale, in narrow's dtype; and the scale."""
    scale = scale_of(tl.max(tl.abs(x), axis=0))
    tl.store(narrow + places, (x * (1.0 / scale)).to(narrow.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
