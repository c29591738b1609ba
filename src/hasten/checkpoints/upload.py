"""Copying tensors of memory-mapped files to a GPU.

A plain copy of pageable memory goes through one buffer of the driver, which one thread fills, waiting for each page of
the file. Here several threads fill pinned buffers, and each buffer is on its way while others fill.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

THREADS = 6
PIECE = 16 << 20  # bytes of a buffer


class Upload:
    """Copies host tensors to `device`. A context manager: its threads and buffers end with it.

    On a CPU it copies in the same pieces, which tests compare.
    """

    def __init__(self, device: torch.device, *, threads: int = THREADS, piece: int = PIECE) -> None:
        self.device, self.piece = device, piece
        self.buffers: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        on_gpu = device.type == "cuda"
        for _ in range(threads):
            # The stream first: pinning memory where no GPU is in use yet would start to use the current one.
            stream = torch.cuda.Stream(device) if on_gpu else None
            self.buffers.put((torch.empty(piece, dtype=torch.uint8, pin_memory=on_gpu), stream))
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="hasten-upload")

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; it may be used at once."""
        if tensor.nbytes <= self.piece or not tensor.is_contiguous():
            return tensor.to(self.device, copy=True)
        made = torch.empty_like(tensor, device=self.device)
        if made.is_cuda:  # its memory may still be read by what was queued before
            torch.cuda.current_stream(self.device).synchronize()
        pieces = (one.view(-1).view(torch.uint8).split(self.piece) for one in (made, tensor))
        for _ in self.pool.map(self._copy, *pieces):
            pass
        return made

    @torch.inference_mode()  # a thread does not inherit it, and its caller may have made the tensors in it
    def _copy(self, made: Tensor, piece: Tensor) -> None:
        buffer, stream = self.buffers.get()
        try:
            own = buffer[: len(piece)].copy_(piece)
            with _on(stream):
                made.copy_(own, non_blocking=stream is not None)
            if stream is not None:
                stream.synchronize()
        finally:
            self.buffers.put((buffer, stream))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown()


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
