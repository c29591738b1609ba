"""`RankGroup`: the processes that hold one model together, and their communication in a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hasten.ops.native import native_ops


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Rank `rank` of `size`. All call the same methods in the same order with tensors of the same shape.

    Whatever carries the numbers, a sum is made in float32 in the order of the ranks: all have the same bits, on every
    run and in every batch. segment: of processes of one machine that share memory (`hasten.distributed.shared_memory`),
    uint8; they exchange 8 KB in microseconds, and inside the native steps. None: by torch.distributed, the reference.
    peers: a pidfd of each rank (-1: our own), by which one that has died is noticed: a RuntimeError, and no hang.
    """

    rank: int
    size: int
    segment: Tensor | None = None
    peers: Sequence[int] = ()

    @functools.cached_property
    def plan(self) -> Tensor | None:
        """The form for native steps; None if the ranks share no memory."""
        if self.segment is None:
            return None
        return native_ops().plan_ranks.default(self.segment, self.rank, self.size, list(self.peers))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of any shape and floating dtype, in x's dtype."""
        if self.plan is not None and x.device.type == "cpu":
            kept = x.dtype in (torch.float32, torch.bfloat16)
            summed = x.to(x.dtype if kept else torch.float32, copy=True, memory_format=torch.contiguous_format)
            native_ops().sum_of_ranks(self.plan, summed)
            return summed.to(x.dtype)
        first, *others = (part.float() for part in self._of_all(x))
        for other in others:
            first = first + other
        return first.to(x.dtype)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x (…, sizes[rank]) float32 of all ranks side by side: (…, sum of sizes)."""
        if self.plan is not None and x.device.type == "cpu":
            return native_ops().gather_ranks(self.plan, x, list(sizes))
        parts = self._of_all(pad(x, (0, max(sizes) - x.shape[-1])))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def of_first(self, numbers: Sequence[int] = ()) -> list[int]:
        """Broadcast the numbers of rank 0 (at least one) to all ranks; the others pass none."""

        def broadcast(own: Sequence[int], count: int) -> Tensor:  # int64 sent as the bits of float32
            sizes = [2 * count, *[2] * (self.size - 1)]
            bits = torch.tensor(own if self.rank == 0 else [0], dtype=torch.int64).view(torch.float32)
            return self.gather(bits, sizes)[: 2 * count].view(torch.int64)

        return broadcast(numbers, int(broadcast([len(numbers)], 1))).tolist()

    def abandon(self) -> None:
        """Signal that this rank has failed; ranks that wait for it raise an error."""
        if self.plan is not None:
            native_ops().abandon_ranks(self.plan)

    def _of_all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return parts
