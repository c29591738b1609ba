"""Which replica serves a request: the one where its answer begins soonest.

Replicas report the keys of the blocks that they hold (`hasten.engine.prefixes.prefix_keys`). The cost of sending a
request to a replica is counted in prompt tokens: its own that are not held there, those of other requests that are
waiting before it, and a few for each running request, which slows prefill down. So a replica that holds the
beginning is chosen until waiting there costs more than processing the beginning elsewhere; there is no threshold.

Numbers and keys only, so that benchmarks/replica_routing.py replays a day's traffic through the same code.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

RUNNING = 32  # tokens of a prompt that a request counts as that is being answered
KEY_BYTES = 8  # of each key in a report: two blocks that share them cost a detour, no more


@dataclass(slots=True, eq=False)
class Ask:
    """A request to be routed: the tokens of its prompt, and the keys of its full blocks in order."""

    tokens: int
    keys: Sequence[bytes] = ()
    block_size: int = 16
    sent: ReplicaState | None = None  # to that one
    unread: int = 0  # tokens that it has to read there, until it has
    over: bool = False

    def __reduce__(self) -> Any:  # the rest is the ingress's own
        return Ask, (self.tokens,)


@dataclass(slots=True)
class ReplicaState:
    """What is known about one replica. held: keys of the blocks that it reported; unread: prompt tokens that were sent
    there and are not processed yet; running: requests that were sent there and have not ended."""

    held: frozenset[bytes] = frozenset()
    unread: int = 0
    running: int = 0
    report: Mapping[str, Any] | None = None  # the last one, `hasten.replicas.replica.Report`

    def missing(self, ask: Ask) -> int:
        """Tokens of the prompt that the replica does not hold."""
        found = 0
        for key in ask.keys:
            if key not in self.held:
                break
            found += 1
        return ask.tokens - found * ask.block_size


def soonest(state: ReplicaState, ask: Ask) -> float:
    """Cost in tokens of sending a request to the replica; see the module's docstring."""
    return state.missing(ask) + state.unread + RUNNING * state.running


@dataclass(slots=True, eq=False, weakref_slot=True)
class Board:
    """What one ingress knows about its replicas. Thread-safe; the caller chooses the names.

    A request is `sent`, `begun` at its first output, and `ended` in any case.
    """

    cost: Callable[[ReplicaState, Ask], float] = soonest
    draw: random.Random = field(default_factory=random.Random)
    states: dict[str, ReplicaState] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, replicas: Iterable[str]) -> None:
        """Set the replicas that exist; forget all others."""
        with self._lock:
            self.states = {name: self.states.get(name) or ReplicaState() for name in replicas}

    def report(self, replica: str, report: Mapping[str, Any]) -> None:
        """Record that a replica holds exactly the blocks of these keys (cut to KEY_BYTES, concatenated)."""
        with self._lock:
            state = self.states.get(replica)
            if state is None or state.report is report:
                return
            keys: bytes = report["keys"]
            if state.report is None or state.report["keys"] != keys:
                state.held = frozenset(keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))
            state.report = report

    def rank(self, ask: Ask) -> list[str]:
        """The replicas, best first; equal ones in any order."""
        with self._lock:
            costs = [(self.cost(state, ask), self.draw.random(), name) for name, state in self.states.items()]
        return [name for _, _, name in sorted(costs)]

    def sent(self, ask: Ask, replica: str) -> None:
        """Record that a request was sent to a replica (again, after another one); ignored if it has ended."""
        with self._lock:
            self._leave(ask)
            state = None if ask.over else self.states.get(replica)
            if state is not None:
                ask.sent, ask.unread = state, state.missing(ask)
                state.unread += ask.unread
                state.running += 1

    def begun(self, ask: Ask) -> None:
        """Record the first output of a request: its prompt is processed."""
        with self._lock:
            self._read(ask)

    def ended(self, ask: Ask) -> None:
        """Record the end of a request."""
        with self._lock:
            ask.over = True
            self._leave(ask)

    def _read(self, ask: Ask) -> None:
        if ask.sent is not None:
            ask.sent.unread -= ask.unread
        ask.unread = 0

    def _leave(self, ask: Ask) -> None:
        self._read(ask)
        if ask.sent is not None:
            ask.sent.running -= 1
        ask.sent = None


_boards: WeakValueDictionary[str, Board] = WeakValueDictionary()


def publish(board: Board) -> str:
    """Register the board and return its name, by which objects that others create (Ray's router) find it."""
    name = secrets.token_hex(8)
    _boards[name] = board
    return name


def board_of(name: str) -> Board:
    """The board of that name; an empty one in a process that has none."""
    return _boards.get(name) or Board()
