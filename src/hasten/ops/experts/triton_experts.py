"""Launches the kernels of a layer's experts: each pair of a row and an expert alone, or tiles of pairs by expert.

Import this file only where the kernels are taken; it imports Triton and registers the operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.experts.triton_kernels import (
    add_shares,
    packed_rows,
    plain_rows,
    sort_pairs,
    tiles_of_experts,
)
from hasten.ops.experts.weights import ExpertWeights
from hasten.ops.linear.beside import ACTIVATIONS
from hasten.ops.linear.layouts import Operands
from hasten.ops.triton_support import readable, registered

ONE = 0x3F800000  # the bits of 1.0
SORTED = 2048  # pairs that a program of the sort looks at in a step
ADDED = 1024  # features of a program that adds the shares
SCALE_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Form(NamedTuple):
    """How a weight is stored: bits and group size (WeightFormat), whether it has zero points, and its scales' dtype."""

    bits: int
    group_size: int
    zeros: bool
    scales: torch.dtype

    def row(self, k: int) -> tuple[int, int]:
        """Words and groups of a row of k features in the "chunks" layout (ops/linear/layouts.py)."""
        if self.bits == 16:
            return 0, 0
        side = max(512 // self.bits, self.group_size)
        padded = triton.cdiv(k, side) * side
        return padded * self.bits // 32, padded // (self.group_size or padded)


@dataclass(frozen=True, slots=True)
class ExpertsCut:
    """How the products are cut: programs of n weight rows by a tile of m pairs; m 0: by one pair, which is not sorted.

    k: features of 16-bit weights in a step.
    """

    m: int
    n: int
    k: int = 64
    warps: int = 4
    stages: int = 3


def cut_for(rows: int, top: int, experts: int, bits: int) -> ExpertsCut:
    """The cut of a step by its sizes alone. A prediction: it has not been measured.

    Pairs of few rows rarely share an expert, and each program reads weights at memory speed. From a quarter as many
    pairs as experts on they are sorted, in tiles for about as many pairs as an expert has in the mean.
    """
    pairs = rows * top
    if rows == 1 or 4 * pairs <= experts:
        return ExpertsCut(0, 8, k=512)
    mean = triton.cdiv(pairs, experts)
    m = min(max(16, triton.next_power_of_2(mean)), 128 if bits == 16 else 64)
    return ExpertsCut(m, 64) if m < 64 else ExpertsCut(m, 128, warps=8)


class TritonExperts:
    """The experts of a layer with all but the rows fixed: a call launches, and little else."""

    @torch.inference_mode(False)  # compiled graphs may read the table outside of it
    def __init__(self, weights: ExpertWeights) -> None:
        each = [*weights.gate, *weights.up], list(weights.down)
        self.forms = [_form(own[0]) for own in each]
        self.inner = weights.gate[0].out_features
        self.activation = ACTIVATIONS.index(weights.activation) + 1
        # Addresses are all that a launch is given: this holds the tensors.
        self.held = [_parts(own) for own in (weights.gate, weights.up, weights.down)]
        table = [
            [0 if t is None else t.data_ptr() for own in three for t in own] for three in zip(*self.held, strict=True)
        ]
        self.addresses = torch.tensor(table, dtype=torch.int64, device=weights.gate[0].data.device)

    def __call__(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """rows (R, C) in 16 bits, their shares (R, k) and the experts that they take, int64 (R, k) -> (R, C)."""
        first, second = self.forms
        return operator(rows, shares, chosen, self.addresses, self.inner, *first, *second, self.activation)


def _parts(weights: Sequence[Operands]) -> list[tuple[Tensor | None, ...]]:
    """Data, scales and zeros of each, as kernels read them."""
    return [tuple(None if t is None else readable(t) for t in (w.data, w.scales, w.zeros)) for w in weights]


def _form(weight: Operands) -> Form:
    scales = torch.float32 if weight.scales is None else readable(weight.scales).dtype
    return Form(weight.format.bits, weight.format.group_size, weight.zeros is not None, scales)


@registered("hasten_triton::experts")
def operator(
    rows: Tensor,
    shares: Tensor,
    chosen: Tensor,
    addresses: Tensor,
    inner_size: int,
    bits: int,
    group_size: int,
    zeros: bool,
    scales: torch.dtype,
    down_bits: int,
    down_group_size: int,
    down_zeros: bool,
    down_scales: torch.dtype,
    activation: int,
) -> Tensor:
    """rows (R, C) -> (R, C). addresses: int64 (E, 9), of data, scales and zeros of each expert's gate, up and down.

    inner_size: output features of gate and up. Then their `Form`, and that of down. activation: its place in
    ACTIVATIONS (ops/linear/beside.py), from 1 on.
    """
    forms = Form(bits, group_size, zeros, scales), Form(down_bits, down_group_size, down_zeros, down_scales)
    cut = cut_for(len(rows), chosen.shape[1], len(addresses), bits)
    return launch(rows, shares, chosen, addresses, inner_size, *forms, activation, cut=cut)


@operator.register_fake
def _fake(rows: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def launch(
    rows: Tensor,
    shares: Tensor,
    chosen: Tensor,
    addresses: Tensor,
    inner_size: int,
    first: Form,
    second: Form,
    activation: int,
    *,
    cut: ExpertsCut,
) -> Tensor:
    """`operator`, cut as `cut` says."""
    (count, hidden), top = rows.shape, chosen.shape[1]
    x, shares, chosen = readable(rows.contiguous()), shares.float().contiguous(), chosen.contiguous()
    out = torch.empty_like(x)
    if not count:
        return out.to(rows.dtype)
    inner, parts = x.new_empty(count * top, inner_size), x.new_empty(count * top, hidden)
    with torch.cuda.device_of(x):
        if cut.m == 0:
            _by_pair(x, addresses, chosen, inner, first, activation, top, cut, gated=True)
            _by_pair(inner, addresses, chosen, parts, second, 0, top, cut, gated=False)
        else:
            order = chosen.new_empty(count * top, dtype=torch.int32)
            tiles = order.new_empty(count * top // cut.m + len(addresses), 3)
            sort_pairs[(len(addresses),)](chosen, order, tiles, len(order), M=cut.m, BLOCK=SORTED, num_warps=8)
            _by_tile(x, addresses, order, tiles, inner, first, activation, top, cut, gated=True)
            _by_tile(inner, addresses, order, tiles, parts, second, 0, top, cut, gated=False)
        block = min(ADDED, triton.next_power_of_2(hidden))
        add_shares[(count, triton.cdiv(hidden, block))](parts, shares, out, hidden, TOP=top, BLOCK=block)
    return out.to(rows.dtype)


def _by_pair(
    x: Tensor,
    addresses: Tensor,
    chosen: Tensor,
    out: Tensor,
    form: Form,
    activation: int,
    top: int,
    cut: ExpertsCut,
    *,
    gated: bool,
) -> None:
    """Gate and up of x (R, K), or down of x (pairs, K), for each pair: out (pairs, N)."""
    (pairs, n), k = out.shape, x.shape[1]
    kind: dict[str, Any] = {"ACTIVATION": activation, "GATED": gated}
    if form.bits == 16:
        block, step = cut.n, min(cut.k, triton.next_power_of_2(k))
        plain_rows[(triton.cdiv(n, block), pairs)](
            *(x, addresses, chosen, out, n, k, top), **kind, BLOCK=block, T=step, num_warps=cut.warps
        )
        return
    words, groups = form.row(k)
    block, threads = cut.n // 4, 128 if words >= 128 else 32  # blocks of 4 rows of weights
    packed_rows[(triton.cdiv(n, 4 * (block // 2 if gated else block)), pairs)](
        *(x.view(torch.int64 if x.itemsize == 4 else torch.int32), addresses, chosen, out, n, k, top),
        *(words, groups, ONE),
        BITS=form.bits,
        GROUP=form.group_size,
        ZEROS=form.zeros,
        SCALES=SCALE_TYPES[form.scales],
        XBITS=8 * x.itemsize,
        HALF=x.dtype == torch.float16,
        **kind,
        BLOCK=block,
        T=threads,
        num_warps=threads // 32,
    )


def _by_tile(
    x: Tensor,
    addresses: Tensor,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
    form: Form,
    activation: int,
    top: int,
    cut: ExpertsCut,
    *,
    gated: bool,
) -> None:
    """The same for tiles of pairs."""
    n, k = out.shape[1], x.shape[1]
    words, groups = form.row(k)
    whole = k % cut.k == 0 if form.bits == 16 else words * 32 == k * form.bits
    tiles_of_experts[(triton.cdiv(n, cut.n), len(tiles))](
        *(x, addresses, order, tiles, out, n, k, top, words, groups),
        BITS=form.bits,
        GROUP=form.group_size,
        ZEROS=form.zeros,
        SCALES=SCALE_TYPES[form.scales],
        ACTIVATION=activation,
        GATED=gated,
        N=cut.n,
        M=cut.m,
        K=cut.k,
        STAGES=cut.stages,
        WHOLE=whole,
        WIDE=x.device.type == "cpu",
        num_warps=cut.warps,
    )
