"""Loss spikes: a step whose loss is far above the ones before it, often the first sign of a diverging run."""

from statistics import fmean, pstdev

WINDOW = 64
FEWEST = 16
DEVIATIONS = 5.0


def is_spike(loss: float, recent: list[float]) -> bool:
    """Compare a loss with mean and standard deviation of the `recent` ones, up to WINDOW, and count it as one of them.

    Spikes do not enter the mean, unless they last for a whole window.
    """
    spike = False
    if len(recent) >= FEWEST:
        mean = fmean(recent)
        # Where the loss hardly moves, a thousandth of it is still no spike.
        deviation = max(pstdev(recent), 1e-3 * abs(mean))
        spike = loss > mean + DEVIATIONS * deviation
    if spike and len(recent) > FEWEST:
        recent.pop(0)
    else:
        recent[:] = [*recent[-WINDOW + 1 :], loss]
    return spike
