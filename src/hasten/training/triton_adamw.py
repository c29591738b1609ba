"""Norm, clipping, AdamW and 16-bit copies of any number of parameters, in three kernels.

PyTorch reads and writes the gradients three more times, for the norm, the multiplication by the clipping factor and the
cast of 16-bit gradients to float32, and casts the weights in every step. Here the gradients are read once for the norm
and once for the update, in the dtype in which the products left them.

A program updates BLOCK numbers of one parameter, found through tables of addresses. Import this file only if the kernel
is used; it imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hasten.training.update import Update

BLOCK = 2048  # numbers that a program updates
WARPS = 4
ALIGNED = 16  # alignment of every tensor in bytes; its number of elements is a multiple of it too
FIELDS = 9  # columns of the table, see adamw_kernel
NORM_BLOCK = 4096


@triton.jit
def place_of(table, blocks, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Row of this program's parameter in the table, positions of its numbers, and which of these exist."""
    program = tl.program_id(0)
    parameter = tl.load(blocks + 2 * program)
    first = tl.load(blocks + 2 * program + 1)
    row = table + parameter * FIELDS
    size = tl.multiple_of(tl.load(row + 5), 16)
    places = tl.multiple_of(first, 16) + tl.arange(0, BLOCK)
    return row, places, places < size


@triton.jit
def gradient_of(row, places, inside, DTYPE: tl.constexpr):
    """Load the gradient in float32 from a tensor of float32 or DTYPE."""
    address = tl.load(row + 4)
    if tl.load(row + 6) == 1:
        g = tl.load(tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + places, mask=inside, other=0.0).to(
            tl.float32
        )
    else:
        g = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + places, mask=inside, other=0.0)
    return g


@triton.jit
def squares_kernel(table, blocks, parts, DTYPE: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of squares of a program's gradients in parts[program]."""
    row, places, inside = place_of(table, blocks, FIELDS, BLOCK)
    g = gradient_of(row, places, inside, DTYPE)
    tl.store(parts + tl.program_id(0), tl.sum(g * g, axis=0))


@triton.jit
def norm_kernel(parts, norm, count, BLOCK: tl.constexpr):
    """Store the root of the sum of all parts in norm[0]."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(parts + place, mask=place < count, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def adamw_kernel(
    table,  # (parameters, FIELDS) int64: addresses of parameter, means, squares, copy (0: none), gradient; the size;
    # 1 for a gradient in DTYPE; the group; the address of its matrix's largest magnitude (0: none)
    blocks,  # (programs, 2) int64: whose numbers, and the first
    scalars,  # learning rates of the groups, then the two bias corrections
    decays,  # (groups,) float32
    norm,  # (1,)
    groups,
    beta1,
    rest1,  # 1 - beta1
    beta2,
    rest2,
    eps,
    clip,  # 0: not clipped
    DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute PyTorch's fused AdamW on clipped gradients."""
    row, places, inside = place_of(table, blocks, FIELDS, BLOCK)
    g = gradient_of(row, places, inside, DTYPE)
    if clip > 0:
        g *= tl.minimum(clip / (tl.load(norm) + 1e-6), 1.0)
    group = tl.load(row + 7)
    rate = tl.load(scalars + group)
    decay = tl.load(decays + group)
    correction = tl.load(scalars + groups)
    root_correction = tl.load(scalars + groups + 1)
    parameters = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + places
    means = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + places
    squares = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + places
    p = tl.load(parameters, mask=inside, other=0.0)
    m = tl.load(means, mask=inside, other=0.0)
    v = tl.load(squares, mask=inside, other=0.0)
    p -= rate * decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= rate / correction * m / (tl.sqrt(v) / root_correction + eps)
    tl.store(parameters, p, mask=inside)
    tl.store(means, m, mask=inside)
    tl.store(squares, v, mask=inside)
    copy = tl.load(row + 3)
    if copy != 0:
        tl.store(tl.multiple_of(copy.to(tl.pointer_type(DTYPE)), 16) + places, p.to(DTYPE), mask=inside)
    largest = tl.load(row + 8)
    if largest != 0:
        tl.atomic_max(largest.to(tl.pointer_type(tl.float32)), tl.max(tl.abs(p), axis=0), sem="relaxed")


def why_not(update: Update) -> str | None:
    """Why these kernels do not support an update, or None."""
    groups = update.optimizer.param_groups
    if any(group["betas"] != groups[0]["betas"] or group["eps"] != groups[0]["eps"] for group in groups):
        return "its groups differ in more than rate and decay"
    for parameter in update.parameters:
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            return "a parameter is not contiguous float32"
        if parameter.numel() % ALIGNED:
            return f"a parameter has {parameter.numel()} numbers, no multiple of {ALIGNED}"
        copy = None if update.copies is None else update.copies.of(parameter)
        if copy is not None and copy.data_ptr() % ALIGNED:
            return f"the rows of a copy do not begin at a multiple of {ALIGNED} bytes"
    return None


class FusedUpdate:
    """Runs an `Update` with the kernels, through tables of its tensors' addresses."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.device = update.parameters[0].device
        groups = update.optimizer.param_groups
        self.decays = torch.tensor([group["weight_decay"] for group in groups], dtype=torch.float32).to(self.device)
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self._groups = [group_of[parameter] for parameter in update.parameters]
        rows = [
            (index, first)
            for index, parameter in enumerate(update.parameters)
            for first in range(0, parameter.numel(), BLOCK)
        ]
        self.blocks = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.parts = torch.empty(len(rows), dtype=torch.float32, device=self.device)
        # A table that each call fills, and one for a captured call, which must not be overwritten.
        size = (len(update.parameters), FIELDS)
        self._called, self._captured = (torch.zeros(size, dtype=torch.int64, device=self.device) for _ in range(2))
        self._pending: Tensor | None = None

    def rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Build the table, on the host."""
        update, rows = self.update, []
        fp8 = None if update.copies is None else update.copies.fp8
        for parameter, gradient, group in zip(update.parameters, gradients, self._groups, strict=True):
            state = update.optimizer.state[parameter]
            copy = None if update.copies is None else update.copies.of(parameter)
            tensors = (parameter, state["exp_avg"], state["exp_avg_sq"], copy, gradient)
            addresses = [0 if one is None else one.data_ptr() for one in tensors]
            assert not any(address % ALIGNED for address in addresses)
            largest = None if fp8 is None else fp8.largest_of(parameter)
            numbers = [parameter.numel(), int(gradient.dtype != torch.float32), group]
            rows.append([*addresses, *numbers, 0 if largest is None else largest.data_ptr()])
        return torch.tensor(rows, dtype=torch.int64)

    def flush(self) -> None:
        """Fill the captured call's table after the capture, during which nothing can be copied."""
        if self._pending is not None:
            self._captured.copy_(self._pending)
            self._pending = None

    def run(self, gradients: Sequence[Tensor]) -> Tensor:
        """Run like `Update.run`."""
        update = self.update
        gradients = [one.contiguous() for one in gradients]  # kept alive until the kernels are queued
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            table, self._pending = self._captured, self.rows(gradients)
        else:
            table = self._called
            table.copy_(self.rows(gradients))
        copies = update.copies
        narrow = next((one.dtype for one in gradients if one.dtype != torch.float32), torch.bfloat16)
        if copies is not None:
            narrow = copies.dtype
        dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(narrow, tl.float32)
        first = update.optimizer.param_groups[0]
        beta1, beta2 = first["betas"]
        norm = torch.empty(1, dtype=torch.float32, device=self.device)
        shared = {"DTYPE": dtype, "FIELDS": FIELDS, "BLOCK": BLOCK, "num_warps": WARPS}
        grid = (len(self.blocks),)
        if copies is not None and copies.fp8 is not None:
            copies.fp8.largest.zero_()
        squares_kernel[grid](table, self.blocks, self.parts, **shared)
        norm_kernel[(1,)](self.parts, norm, len(self.parts), BLOCK=NORM_BLOCK, num_warps=8)
        adamw_kernel[grid](
            *(table, self.blocks, update.scalars, self.decays, norm, len(update.optimizer.param_groups)),
            *(beta1, 1 - beta1, beta2, 1 - beta2, first["eps"], update.clip or 0.0),
            **shared,
        )
        return norm[0]
