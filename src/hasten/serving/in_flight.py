"""The requests in flight: by id, by number, by sequence, and by deadline."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator

from hasten.serving.groups import SequenceGroup
from hasten.serving.request import QueueFull
from hasten.serving.samples import Sample
from hasten.serving.sequences import Sequence


class InFlight:
    """Every request from its arrival to its end."""

    def __init__(self) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.samples: dict[Sequence, Sample] = {}  # by the sequence whose tokens they draw; prompts and beams have none
        self.scoring = 0  # those that want their prompt's log-probabilities
        self._by_number: dict[int, SequenceGroup] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._ends: deque[float] = deque(maxlen=32)

    def add(self, group: SequenceGroup) -> None:
        self.groups[group.request.id] = self._by_number[group.number] = group
        self.scoring += group.prompt_logprobs is not None
        if group.deadline is not None:
            heapq.heappush(self._deadlines, (group.deadline, group.request.id))

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        return self._by_number[sequence.request]

    def forget(self, group: SequenceGroup) -> None:
        """The request is complete, or given up."""
        del self.groups[group.request.id], self._by_number[group.number]
        self.scoring -= group.prompt_logprobs is not None
        self._ends.append(time.monotonic())
        if len(self._deadlines) > 2 * len(self.groups) + 64:  # most are of requests that have ended
            self._deadlines = [(one.deadline, name) for name, one in self.groups.items() if one.deadline is not None]
            heapq.heapify(self._deadlines)

    def expired(self) -> Iterator[SequenceGroup]:
        """Those whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            deadline, request_id = heapq.heappop(self._deadlines)
            group = self.groups.get(request_id)
            if group is not None and group.deadline == deadline:
                yield group

    def check_room(self, waiting: int, *, limit: int) -> None:
        """Raise QueueFull if so many that wait are the limit."""
        if waiting >= limit:
            pace = (time.monotonic() - self._ends[0]) / len(self._ends) if len(self._ends) > 1 else 1.0
            raise QueueFull(
                f"{waiting} requests wait already, the limit is {limit}; try again later",
                retry_after=max(1.0, pace),  # when a place should get free, by how fast the last requests ended
            )

    def check(self, known: set[Sequence]) -> None:
        """Raise AssertionError unless the sequences are those that the scheduler knows."""
        sequences = {sequence for group in self.groups.values() for sequence in group.sequences}
        assert sequences == known, "sequences without a request"
        assert set(self.samples) <= sequences, "samples without a sequence"
