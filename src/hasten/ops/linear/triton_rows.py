"""Triton kernels beside a product of many rows that PyTorch computes: the norm before it, what follows it."""

import triton
import triton.language as tl

from hasten.ops.linear.triton_parts import GATE_ROWS, activate, finish, row_of_output


@triton.jit
def norm_row(
    x,  # (rows, K)
    weight,  # (K,)
    bias,
    out,  # (rows, K)
    k_size,
    eps,
    offset,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, RMS or layer norm, in float32."""
    k = tl.arange(0, BLOCK)
    inside = k < k_size
    row = tl.program_id(0).to(tl.int64) * k_size
    values = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values) / k_size, 0.0)
    values *= tl.rsqrt(tl.sum(values * values) / k_size + eps)
    values *= tl.load(weight + k, mask=inside, other=0.0).to(tl.float32) + offset
    if bias is not None:
        values += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + k, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate_rows(
    y,  # (rows, N)
    out,  # (rows, outputs)
    size,  # rows · outputs
    outputs,
    n_size,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The activation of a product, or of its gate times its up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    output = place % outputs
    row = y + place // outputs * n_size
    first = tl.load(row + row_of_output(output, 0, GATED, GATE_ROWS), mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(row + row_of_output(output, 1, GATED, GATE_ROWS), mask=inside, other=0.0).to(tl.float32)
        finish(activate(first, ACTIVATION) * up, None, out, place, inside, 0)
    else:
        finish(first, None, out, place, inside, ACTIVATION)
