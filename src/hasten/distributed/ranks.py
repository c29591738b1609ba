"""The ranks of a run, as one process sees them, and the small values they exchange.

Numbers and texts are exchanged between hosts (gloo), whatever backend carries the tensors: nothing here waits for a
GPU.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's rank of `size` processes, `local_rank` of `local_size` on this machine; by default a single one.

    joined: a process group exists, even if it has one member. tensor: neighbouring ranks that split every block and
    read the same rows (tensor parallelism in training).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    joined: bool = False
    tensor: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank prints, and writes the files that exist once."""
        return self.rank == 0

    def split(self, tensor: int) -> "Ranks":
        """Group the ranks by `tensor` neighbours that split every block. Raises ConfigError for a remainder."""
        if self.size % tensor:
            raise ConfigError(
                f"parallel.tensor is {tensor}, which does not divide the number of processes ({self.size})"
            )
        return replace(self, tensor=tensor)

    @property
    def reader(self) -> int:
        """Which part of a batch's rows this process reads, from 0 to readers - 1."""
        return self.rank // self.tensor

    @property
    def readers(self) -> int:
        """Parts that a batch's rows are divided into: tensor-parallel neighbours read the same rows."""
        return self.size // self.tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def broadcast_from_rank0(self, number: float) -> float:
        """The first rank's number, as float64: decisions that depend on a clock are made there."""
        if self.size == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64)
        dist.broadcast(found, 0)
        return found.item()

    def texts(self, own: str) -> list[str]:
        """The texts of all ranks, in the order of ranks."""
        if self.size == 1:
            return [own]
        found = [""] * self.size
        dist.all_gather_object(found, own)
        return found

    def require_same(self, facts: dict[str, str]) -> None:
        """Raise ConfigError, on every rank, if one differs from the first in a fact; names the rank and both values."""
        found = self.texts("\0".join(facts.values()))
        for rank, other in enumerate(found):
            for name, first, here in zip(facts, found[0].split("\0"), other.split("\0"), strict=False):
                if first != here:
                    raise ConfigError(
                        f"rank {rank} has another {name} than rank 0 ({here:.80}, not {first:.80}): give every process "
                        "the same"
                    )

    def rows(self, batch_size: int) -> int:
        """Rows of a micro-batch that this rank computes. Raises ConfigError if they cannot be divided evenly."""
        if batch_size % self.readers:
            raise ConfigError(
                f"data.batch_size is {batch_size}, which {self.readers} processes cannot share evenly; make it a "
                f"multiple of {self.readers} (it counts the rows of all processes together)"
            )
        return batch_size // self.readers


ALONE = Ranks()
