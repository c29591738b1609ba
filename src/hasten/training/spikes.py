"""Loss spikes: a step whose loss stands far above the ones before it, often the first sign of a diverging run."""

from collections.abc import Sequence
from statistics import fmean, pstdev

WINDOW = 64
FEWEST = 16
DEVIATIONS = 5.0


class SpikeDetector:
    """Compares each loss with the mean and the standard deviation of the last WINDOW ordinary ones."""

    def __init__(self, recent: Sequence[float] = (), count: int = 0) -> None:
        self.recent = list(recent)
        self.count = count

    def see(self, loss: float) -> bool:
        """Record the loss; whether it is a spike. Spikes do not enter the mean, unless they last for a whole window."""
        spike = False
        if len(self.recent) >= FEWEST:
            mean = fmean(self.recent)
            # Where the loss hardly moves, a thousandth of it is still no spike.
            deviation = max(pstdev(self.recent), 1e-3 * abs(mean))
            spike = loss > mean + DEVIATIONS * deviation
        self.count += spike
        if spike and len(self.recent) > FEWEST:
            self.recent.pop(0)
        else:
            self.recent = [*self.recent[-WINDOW + 1 :], loss]
        return spike
