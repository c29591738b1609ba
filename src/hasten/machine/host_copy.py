"""An asynchronous copy of a tensor to the host, after the work queued so far, while the host queues more."""

import torch
from torch import Tensor


class HostCopy:
    """Starts a copy; `tensor` waits for it, but not for work that was queued later."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))  # which need not be the current device
        else:
            self._tensor = tensor.clone()  # captured steps overwrite it

    def tensor(self) -> Tensor:
        """The copy on the host; waits until it is complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
