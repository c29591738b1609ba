"""What every trace file must hold."""

import json
from itertools import pairwise
from pathlib import Path


def check_trace(file: Path, *names: str) -> None:
    """The trace event format, as Perfetto reads it: what each kind of event must have. names: parts that are there."""
    events = json.loads(file.read_text())["traceEvents"]
    needed = {"X": {"ts", "dur", "tid"}, "M": {"args"}, "i": {"ts", "s"}, "C": {"ts", "args"}}
    needed |= {kind: {"ts", "id", "tid"} for kind in "sft"}
    for event in events:
        assert event.keys() >= {"ph", "name", "pid"} | needed[event["ph"]], event
        numbers = [event[name] for name in ("ts", "dur") if name in event]
        assert all(isinstance(number, int | float) and number >= 0 for number in numbers), event
    ours = [event for event in events if event["pid"] == "hasten"]
    assert {event["name"] for event in ours} >= set(names)
    nanoseconds = 0.002  # as few as a float of so many microseconds can tell
    assert all(one["ts"] + one["dur"] <= other["ts"] + nanoseconds for one, other in pairwise(ours)), "one by one"
