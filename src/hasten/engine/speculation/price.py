"""What a step costs by its rows, or a draft by its tokens: a running estimate, learnt from those that run."""

from bisect import bisect_left

_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_MORE = 0.04  # of the price of one: what each further row is believed to cost before any was measured
_CHANGE = 0.1  # of an estimate by one measurement, at most, once it is settled: after _SETTLED measurements
_SETTLED = 8
_OTHERS = 0.2  # of a change of a settled estimate that also applies to others: a machine that slows down does for all


class Price:
    """Seconds by count. A measurement that is far off, as when another program had the processor, moves an estimate
    no further than one that is a little off.
    """

    def __init__(self) -> None:
        self.measured = 0
        self._counts: list[int] = []  # those with an estimate, sorted
        self._seconds: list[float] = []
        self._seen: list[int] = []

    def seconds(self, count: int) -> float:
        """The estimate for a count: on a line between its neighbours that were measured, and on the line through the
        first and the last of them beyond these.
        """
        counts, seconds = self._counts, self._seconds
        at = bisect_left(counts, count)
        if at < len(counts) and counts[at] == count:
            return seconds[at]
        if not counts:
            return _prior(count)
        if at == 0:
            return seconds[0] * _prior(count) / _prior(counts[0])
        if at < len(counts):
            share = (count - counts[at - 1]) / (counts[at] - counts[at - 1])
            return seconds[at - 1] * (1 - share) + seconds[at] * share
        if at == 1:
            return seconds[0] * _prior(count) / _prior(counts[0])
        slope = max(0.0, seconds[-1] - seconds[0]) / (counts[-1] - counts[0])
        return seconds[-1] + slope * (count - counts[-1])

    def learn(self, count: int, seconds: float) -> None:
        """Move the estimate half the way to a measurement, within bounds; the first two replace it."""
        kept = _COUNTS[min(bisect_left(_COUNTS, count), len(_COUNTS) - 1)]
        ratio = max(seconds, 1e-9) / self.seconds(count)
        at = bisect_left(self._counts, kept)
        if at == len(self._counts) or self._counts[at] != kept:
            expected = self.seconds(kept)
            self._counts.insert(at, kept)
            self._seconds.insert(at, expected)
            self._seen.insert(at, 0)
        self._seen[at] += 1
        self.measured += 1
        if self.measured == 1:
            self._seconds[at] *= ratio
            return
        seen = self._seen[at]
        most = max(_CHANGE, 3 / seen) if seen <= _SETTLED else _CHANGE
        change = ratio if seen <= 2 else (1 + ratio) / 2
        change = min(1 + most, max(1 / (1 + most), change))
        self._seconds[at] *= change
        if seen > _SETTLED:
            for i in range(len(self._seconds)):
                self._seconds[i] *= 1 if i == at else 1 + _OTHERS * (change - 1)


def _prior(count: int) -> float:
    return 1 + _MORE * (count - 1)
