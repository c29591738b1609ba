"""How much memory a block took."""

from __future__ import annotations

import torch

from hasten.machine import peak_memory, process_memory, reset_peak_memory


class PeakMemory:
    """Measures the peak above what was there at entry.

        with PeakMemory() as peak:
            ...
        print(peak.bytes, peak.exact)

    `exact` is False when the peak could not be reset and an earlier, higher peak hides the one of the block; `bytes` is
    then an upper bound. Until the block ends they are 0 and False.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = device
        self.bytes, self.exact = 0, False

    def __enter__(self) -> PeakMemory:
        self._reset = reset_peak_memory(self.device)
        self._earlier_peak = peak_memory(self.device)
        self._baseline = process_memory(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        peak = peak_memory(self.device)
        self.exact = self._reset or peak > self._earlier_peak
        self.bytes = max(0, peak - self._baseline)
