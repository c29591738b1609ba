"""Memory shared by the ranks of one machine, for what they exchange in every step of a model.

It has no name in the file system: rank 0 creates it (memfd), the others open it through rank 0's open files, and the
system frees it when the last process has ended, however it ended.
"""

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

from hasten.distributed.ranks import Ranks
from hasten.ops.collective import RankGroup
from hasten.ops.native import library


def open_group(ranks: Ranks) -> RankGroup:
    """Create the group of all ranks: through shared memory if they are on one Linux machine with native operators.

    Otherwise the group communicates by torch.distributed. Called on every rank at once.
    """
    native, file = library(), -1
    able = native is not None and ranks.local_size == ranks.size and hasattr(os, "memfd_create")
    size = native.ops.segment_bytes(ranks.size) if able and native is not None else 0
    segment: Tensor | None = None
    peers: list[int] = []
    with suppress(OSError):
        if ranks.first and able:
            file = os.memfd_create("hasten")
            os.ftruncate(file, size)
    found = [text.split() for text in ranks.texts(f"{os.getpid()} {file} {int(able)}")]
    if all(able == "1" for _, _, able in found) and found[0][1] != "-1":
        with suppress(OSError):
            if not ranks.first:
                file = os.open(f"/proc/{found[0][0]}/fd/{found[0][1]}", os.O_RDWR)
            segment = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            peers = [-1 if rank == ranks.rank else os.pidfd_open(int(one[0])) for rank, one in enumerate(found)]
    shared = not ranks.any(len(peers) < ranks.size)  # returns after all ranks have opened it
    if file >= 0:
        os.close(file)  # the mapping keeps it
    return RankGroup(ranks.rank, ranks.size, segment if shared else None, tuple(peers))
