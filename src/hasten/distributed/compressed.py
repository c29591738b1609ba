"""The mean over ranks of a tensor that travels as one bit, or eight, or sixteen an element.

Every rank compresses its tensor, piece by piece, and sends piece j to rank j; each decompresses the pieces that it got,
takes their mean, compresses that, and sends it to all. So all ranks end with the same bits. What compressing left out
is kept by whoever compressed, and added the next time (error feedback: 1-bit Adam, arXiv 2102.02888):

    c = x + worker_error      q = code(c)    worker_error = c - q      each rank, its whole tensor
    r = mean q + server_error p = code(r)    server_error = r - p      rank j, piece j
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Code(Protocol):
    """How pieces of a tensor travel."""

    def pack(self, pieces: Tensor, kept: Tensor) -> Tensor:
        """(P, n) float32 -> (P, bytes) uint8. kept: (P, n) bool, the elements that are not zero for good."""

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """(P, bytes) uint8 -> (P, n) float32."""


class OneBit:
    """The sign of each element, times one size for all pieces: ‖c‖/√(elements kept). sign(0) = +1. n / 8 + 4 bytes."""

    def pack(self, pieces: Tensor, kept: Tensor) -> Tensor:
        size = pieces.norm() / kept.sum().clamp(min=1).sqrt()
        sizes = size.float().reshape(1, 1).repeat(len(pieces), 1).view(torch.uint8)
        bits = (pieces >= 0).view(len(pieces), -1, 8).to(torch.uint8)
        return torch.cat([sizes, (bits * _PLACES.to(bits.device)).sum(-1, dtype=torch.uint8)], dim=1)

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        sizes = packed[:, :4].contiguous().view(torch.float32)
        bits = (packed[:, 4:, None] & _PLACES.to(packed.device)) > 0
        return torch.where(bits.view(len(packed), n), sizes, -sizes)


_PLACES = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class EightBits:
    """Whole numbers up to 127 times a size for each 256 elements. n + n / 64 bytes."""

    group = 256

    def pack(self, pieces: Tensor, kept: Tensor) -> Tensor:
        groups = pieces.view(len(pieces), -1, self.group)
        sizes = groups.abs().amax(-1, keepdim=True) / 127
        numbers = (groups / sizes.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        whole = numbers.view(torch.uint8).flatten(1)
        return torch.cat([sizes.squeeze(-1).contiguous().view(torch.uint8).view(len(pieces), -1), whole], dim=1)

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        sizes = packed[:, : 4 * n // self.group].contiguous().view(torch.float32)
        numbers = packed[:, 4 * n // self.group :].contiguous().view(torch.int8).view(len(packed), -1, self.group)
        return (numbers * sizes.unsqueeze(-1)).flatten(1)


class SixteenBits:
    """bfloat16. 2n bytes."""

    def pack(self, pieces: Tensor, kept: Tensor) -> Tensor:
        return pieces.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        return packed.contiguous().view(torch.bfloat16).float()


@dataclass(frozen=True, slots=True)
class Errors:
    """What compressing left out so far: of this rank's tensor (n, padded), and of its piece of the mean (n / ranks)."""

    worker: Tensor
    server: Tensor

    def to_state(self) -> dict[str, Tensor]:
        """For a checkpoint; they are this rank's alone."""
        return {"worker_error": self.worker, "server_error": self.server}

    @classmethod
    def of_state(cls, state: dict[str, Tensor], ranks: int, device: torch.device) -> "Errors | None":
        """The inverse; None where it was another number of ranks, whose pieces were others: they begin anew."""
        worker, server = state["worker_error"].to(device), state["server_error"].to(device)
        return cls(worker, server) if len(worker) == ranks * len(server) else None


def no_errors(n: int, ranks: int, device: torch.device) -> Errors:
    """Of a tensor of n elements, padded to a piece of whole groups for each rank, before anything was left out."""
    piece = -(-n // (EightBits.group * ranks)) * EightBits.group
    return Errors(torch.zeros(ranks * piece, device=device), torch.zeros(piece, device=device))


def compressed_mean(
    x: Tensor, errors: Errors, code: Code, *, kept: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean over all ranks of x (n,) float32, the same bits on every rank; `errors` are brought up to date.

    kept: (n,) bool, the same on every rank: elements that are not have the mean zero, whatever x has there.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    c = errors.worker.clone()
    c[: len(x)] += x
    mask = torch.zeros(len(c), dtype=torch.bool, device=x.device)
    mask[: len(x)] = True if kept is None else kept
    c *= mask
    pieces, masks = c.view(ranks, -1), mask.view(ranks, -1)
    n = pieces.shape[1]
    sent = code.pack(pieces, masks)
    errors.worker.copy_(c - (code.unpack(sent, n) * masks).flatten())
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    r = (code.unpack(got, n) * masks[me]).mean(0) + errors.server
    answer = code.pack(r[None], masks[me : me + 1])
    errors.server.copy_(r - (code.unpack(answer, n) * masks[me])[0])
    answers = torch.empty(ranks, answer.shape[1], dtype=torch.uint8, device=x.device)
    dist.all_gather(list(answers), answer[0], group=group)
    return (code.unpack(answers, n) * masks).flatten()[: len(x)]
