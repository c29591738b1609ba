"""What the Triton products share: x in pairs of registers, activations, gated outputs, the end of a product."""

import triton
import triton.language as tl

ROWS = tl.constexpr(4)  # output rows that the "chunks" layout keeps together
GATE_ROWS = tl.constexpr(32)  # rows of gate, then as many of up, where both are one matrix


@triton.jit
def load_pair(pointer, mask, BITS: tl.constexpr, HALF: tl.constexpr):
    """Two neighbouring numbers as float32, read as one integer: of 16 bits each (HALF: float16), or float32."""
    pair = tl.load(pointer, mask=mask, other=0)
    if BITS == 32:
        low = pair.to(tl.int32).to(tl.float32, bitcast=True)
        high = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif HALF:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu, gelu_tanh, relu (1 to 4), or nothing (0), in float32."""
    if ACTIVATION == 1:
        return x * tl.sigmoid(x)
    elif ACTIVATION == 2:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == 4:  # NaN stays NaN
        return tl.where(x < 0.0, 0.0, x)
    else:
        return x


@triton.jit
def row_of_output(output, half, GATED: tl.constexpr, SIDE: tl.constexpr):
    """The weight row of an output: where gated, of its gate (half 0) or its up (half 1), in blocks of SIDE rows."""
    if GATED:
        return output // SIDE * (2 * SIDE) + output % SIDE + SIDE * half
    else:  # noqa: RET505
        return output


@triton.jit
def root_mean_square(squares, k_size, eps):
    """1 / rms of x, out of the sum of its squares."""
    return tl.rsqrt(squares / k_size + eps)


@triton.jit
def moments(x, k_size, eps, XBITS: tl.constexpr, HALF: tl.constexpr, T: tl.constexpr):
    """Mean and 1 / standard deviation of one row of x, read in pairs, twice."""
    i = tl.arange(0, T)
    total = tl.zeros((T,), dtype=tl.float32)
    for start in range(0, k_size // 2, T):
        low, high = load_pair(x + start + i, start + i < k_size // 2, XBITS, HALF)
        total += low + high
    mean = tl.sum(total) / k_size
    squares = tl.zeros((T,), dtype=tl.float32)
    for start in range(0, k_size // 2, T):
        inside = start + i < k_size // 2
        low, high = load_pair(x + start + i, inside, XBITS, HALF)
        low, high = tl.where(inside, low - mean, 0.0), tl.where(inside, high - mean, 0.0)
        squares += low * low + high * high
    return mean, tl.rsqrt(tl.sum(squares) / k_size + eps)


@triton.jit
def normed_pair(
    x,
    norm_weight,
    norm_bias,
    place,
    NEXT: tl.constexpr,  # pairs further than `place`: a constant of the load
    mask,
    mean,
    scale,
    offset,
    XBITS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    GBITS: tl.constexpr,
):
    """A pair of x, normed; for the RMS norm (1) without its last factor, which all products share. And the squares."""
    low, high = load_pair(x + place + NEXT, mask, XBITS, HALF)
    squares = low * low + high * high
    if NORM == 2:
        low, high = (low - mean) * scale, (high - mean) * scale
    if NORM > 0:
        first, second = load_pair(norm_weight + place + NEXT, mask, GBITS, HALF)
        low, high = low * (first + offset), high * (second + offset)
    if NORM == 2:
        if norm_bias is not None:
            first, second = load_pair(norm_bias + place + NEXT, mask, GBITS, HALF)
            low, high = low + first, high + second
        low, high = tl.where(mask, low, 0.0), tl.where(mask, high, 0.0)
    return low, high, squares


@triton.jit
def finish(y, residual, out, places, mask, ACTIVATION: tl.constexpr):
    """The activation, the residual, the store."""
    y = activate(y, ACTIVATION)
    if residual is not None:
        y += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, y.to(out.dtype.element_ty), mask=mask)
