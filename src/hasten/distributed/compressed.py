"""Mean over ranks of a tensor that is sent as one bit an element.

Every rank compresses its tensor, piece by piece, and sends piece j to rank j; each decompresses the pieces it received,
takes their mean, compresses that, and sends it to all. So all ranks end with the same bits. Each rank keeps its
compression error and adds it the next time (error feedback: 1-bit Adam, arXiv 2102.02888):

    c = x + worker_error      q = code(c)    worker_error = c - q      each rank, its whole tensor
    r = mean q + server_error p = code(r)    server_error = r - p      rank j, piece j
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: moves byte i to bit 56 + i, where no carry reaches
_SIGNS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float() * 2 - 1  # for each byte, the lowest bit first
_MULTIPLE = 256  # the elements of a piece are a multiple of it; checkpoints hold errors of this size


def pack(pieces: Tensor, kept: Tensor) -> Tensor:
    """Compress (P, n) float32 to (P, n / 8 + 4) uint8: the sign of each element and one size for all pieces.

    The size is ‖c‖/√(elements kept); sign(0) = +1. kept: (P, n) float32, 0 for elements that are always zero, else 1.
    """
    size = pieces.norm() / kept.sum(dtype=torch.float64).clamp(min=1).sqrt()
    sizes = size.float().reshape(1, 1).repeat(len(pieces), 1).view(torch.uint8)
    bits = ((pieces >= 0).view(torch.int64) * _GATHER) >> 56  # eight bytes of 0 or 1, gathered in the highest byte
    return torch.cat([sizes, bits.to(torch.uint8)], dim=1)


def unpack(packed: Tensor, n: int) -> Tensor:
    """Decompress the result of `pack`: (P, n / 8 + 4) uint8 -> (P, n) float32."""
    sizes = packed[:, :4].contiguous().view(torch.float32)
    signs = torch.nn.functional.embedding(packed[:, 4:].int(), _SIGNS.to(packed.device))
    return signs.view(len(packed), n).mul_(sizes)


@dataclass(frozen=True, slots=True)
class Errors:
    """Compression errors of one rank, float32.

    worker: of its own tensor, (n,) padded. server: of its piece of the mean, (n / ranks,).
    """

    worker: Tensor
    server: Tensor

    def to_state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name; each rank has its own."""
        return {"worker_error": self.worker, "server_error": self.server}

    @classmethod
    def of_state(cls, state: dict[str, Tensor], ranks: int, device: torch.device) -> "Errors | None":
        """Read what `to_state` returned; None if it is for another number of ranks, where errors begin at zero."""
        worker, server = state["worker_error"].to(device), state["server_error"].to(device)
        return cls(worker, server) if len(worker) == ranks * len(server) else None


def no_errors(n: int, ranks: int, device: torch.device) -> Errors:
    """Errors of zero for a tensor of n elements, padded to pieces of one size."""
    piece = -(-n // (_MULTIPLE * ranks)) * _MULTIPLE
    return Errors(torch.zeros(ranks * piece, device=device), torch.zeros(piece, device=device))


def compressed_mean(x: Tensor, errors: Errors, kept: Tensor) -> Tensor:
    """Compute the mean over all ranks of x (n,) float32, with the same bits on every rank, and update `errors`.

    kept: (n,) bool, the same on every rank; the mean is zero where it is False, whatever x is there.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    c, mask = errors.worker, torch.zeros_like(errors.worker)
    c[: len(x)] += x
    mask[: len(x)] = kept
    c *= mask
    pieces, masks = c.view(ranks, -1), mask.view(ranks, -1)
    n = pieces.shape[1]
    sent = pack(pieces, masks)
    pieces -= unpack(sent, n).mul_(masks)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    r = unpack(got, n).mul_(masks[me]).mean(0).add_(errors.server)
    answer = pack(r[None], masks[me : me + 1])
    torch.sub(r, unpack(answer, n)[0].mul_(masks[me]), out=errors.server)
    answers = torch.empty(ranks, answer.shape[1], dtype=torch.uint8, device=x.device)
    dist.all_gather(list(answers), answer[0])
    return unpack(answers, n).mul_(masks).flatten()[: len(x)]
