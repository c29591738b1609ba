"""The weights of a step in FP8: rows for the forward products, columns for the gradients of inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hasten.ops.fp8.products import E4M3, Fp8, on_triton, scale_of


class Fp8Weight(NamedTuple):
    """A weight (N, K): `rows` is (N, K), `columns` the same numbers transposed, (K, N); one scale, repeated."""

    rows: Fp8
    columns: Fp8


class Fp8Weights:
    """Matrices of a model in FP8, made by `refresh` of its parameters and of the largest magnitude of each.

    `made` has one for each group of parameters (n, K), whose rows follow each other in it; at fixed addresses. Who
    changes the parameters writes the magnitudes, too (`largest`, `largest_of`), or has them measured.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self.groups = [[member.detach() for member in members] for members in groups]
        self.slots = {member: index for index, members in enumerate(groups) for member in members}
        first = self.groups[0][0]
        self.largest = first.new_zeros(len(groups), dtype=torch.float32)
        self._indices = torch.tensor(list(self.slots.values()), device=first.device)
        self.made: list[Fp8Weight] = []
        forms: list[Any] = []
        for index, members in enumerate(self.groups):
            n, k = sum(len(member) for member in members), members[0].shape[1]
            rows, columns = first.new_empty((n, k), dtype=E4M3), first.new_empty((k, n), dtype=E4M3)
            scales = first.new_empty((max(n, k), 1), dtype=torch.float32)
            forms.append((rows, columns, scales, self.largest[index : index + 1]))
            self.made.append(Fp8Weight(Fp8(rows, scales[:n]), Fp8(columns, scales[:k])))
        self._table: Any = None
        if on_triton(first):
            from hasten.ops.fp8.triton_weights import Forms, Table

            self._table = Table(self.groups, [Forms(*one) for one in forms])

    def largest_of(self, parameter: Tensor) -> Tensor | None:
        """Where the largest magnitude of a parameter's matrix is, (1,); None: it has none here."""
        index = self.slots.get(parameter)
        return None if index is None else self.largest[index : index + 1]

    @torch.no_grad()
    def measure(self) -> None:
        """Find the largest magnitudes of the parameters as they are now."""
        members = [member for members in self.groups for member in members]
        found = torch.stack(torch._foreach_norm(members, math.inf)).float()
        self.largest.zero_().scatter_reduce_(0, self._indices, found, "amax")

    def refresh(self) -> None:
        """Round the parameters as they are now."""
        if self._table is not None:
            self._table.round()
            return
        for members, made, largest in zip(self.groups, self.made, self.largest, strict=True):
            scale = scale_of(largest)
            made.rows.values.copy_((torch.cat(members).float() / scale).to(E4M3))
            made.columns.values.copy_(made.rows.values.t())
            made.rows.scales.fill_(scale)
            made.columns.scales.fill_(scale)
