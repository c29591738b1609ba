"""A tensor's copy to the host that runs behind the work queued so far, while the host queues more."""

import torch
from torch import Tensor


class HostCopy:
    """Starts the copy; `tensor` waits for it, and for nothing that was queued later."""

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
        """The copy, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
