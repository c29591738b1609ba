"""Times of a few milliseconds that overrule a rule about this processor where they contradict it clearly.

A rule (which instructions a processor has, which kernel comes first) decides. Where a small product or kernel then
turns out slower than its alternative by more than FACTOR, the times decide. Each comparison is made once for a
processor, torch and library, and stored on disk, so that a command repeats its choices; HASTEN_MEASURE=0 disables them,
and a resumed training run keeps those that it began with (`known`, `adopt`).
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping

from hasten.errors import ConfigError, ResourceError
from hasten.machine.caches import cache_folder, find_cached
from hasten.machine.files import write_atomically
from hasten.machine.processor import instruction_sets, processor_name

FACTOR = 1.3
VARIABLE = "HASTEN_MEASURE"
SECONDS = 0.1  # of one comparison, where its calls are not slower than that
# What changes torch's kernels besides its version.
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")

# On one thread the time of the processor is the better clock: on a shared machine the other one counts the neighbours.
CLOCK = time.thread_time if sys.platform == "linux" else time.perf_counter

Times = Mapping[str, float]  # seconds of each contender, by its name


def compare(
    what: str,
    contenders: Callable[[], Mapping[str, Callable[[], object]]],
    *,
    library: str = "",
    clock: Callable[[], float] = CLOCK,
) -> Times:
    """The shortest time of each call on one thread; from the cache where it was measured before, {} if switched off.

    contenders: makes the calls, by name. library: the native library among them, which its hash belongs to. clock:
    time.perf_counter for calls that wait for other processes. Raises ConfigError where HASTEN_MEASURE is neither 0 nor
    1.
    """
    key = _key(what, library)
    found = _store()
    if key not in found:  # what a resumed run brought along counts, switched off or not
        found[key] = _read(key) or _measured(key, contenders, clock) if _allowed() else {}
    return found[key]


def forget(what: str, *, library: str = "") -> None:
    """Drop a stored comparison, so that it is measured again when it is next needed."""
    key = _key(what, library)
    _store().pop(key, None)
    with contextlib.suppress(OSError, ResourceError):
        (cache_folder("measured") / _file(key)).unlink(missing_ok=True)


def _allowed() -> bool:
    value = os.environ.get(VARIABLE) or "1"
    if value not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} must be 0 or 1; found {value!r}")
    return value == "1"


def keep(what: str, times: Times) -> None:
    """Store times that were measured elsewhere, in the place of earlier ones; not if measuring is switched off."""
    if _allowed():
        _write(_key(what, ""), times)


def kept(what: str) -> Times:
    """The times that `keep` stored last, in any process; {} if there are none, or measuring is switched off."""
    return (_read(_key(what, "")) if _allowed() else None) or {}


def slower(one: str, other: str, times: Times) -> str | None:
    """The two times in words if `one` is slower than `other` by more than FACTOR; None if it is not, or unknown.

    Smaller differences do not count, because times on shared machines vary.
    """
    if one not in times or other not in times or times[one] <= FACTOR * times[other]:
        return None
    return f"measured here, {one} takes {1e3 * times[one]:.2f} ms where {other} takes {1e3 * times[other]:.2f} ms"


def known() -> dict[str, dict[str, float]]:
    """All comparisons that this process used, for a checkpoint or a report; {} if they are disabled."""
    return {key: dict(times) for key, times in _store().items()}


def adopt(times: Mapping[str, Mapping[str, float]]) -> None:
    """Use the comparisons of an earlier process, so that its run continues with the same kernels."""
    _store().update({key: dict(found) for key, found in times.items() if not found or _sound(found)})


@functools.cache
def _store() -> dict[str, dict[str, float]]:
    return {}


def _key(what: str, library: str) -> str:
    import torch

    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return "; ".join([what, _processor(), f"torch {torch.__version__}", *filter(None, [library]), *settings])


@functools.cache
def _processor() -> str:
    return f"{processor_name()} ({' '.join(instruction_sets())})"  # a virtual machine may hide some of them


def _file(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


def _read(key: str) -> dict[str, float] | None:
    try:
        found = find_cached("measured", _file(key))
        times = None if found is None else json.loads(found.read_text(encoding="utf-8"))["seconds"]
    except (OSError, ResourceError, ValueError, KeyError, TypeError):
        return None
    return times if _sound(times) else None


def _sound(times: object) -> bool:
    numbers = times.values() if isinstance(times, dict) else ()
    return bool(numbers) and all(isinstance(n, float) and math.isfinite(n) and n > 0 for n in numbers)


def _measured(
    key: str, contenders: Callable[[], Mapping[str, Callable[[], object]]], clock: Callable[[], float]
) -> dict[str, float]:
    import torch

    from hasten.machine.measure import limited_threads

    # Wherever a kernel is picked: under a caller's autocast, without gradients, while a model is made on "meta".
    with (
        limited_threads(1),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        calls = contenders()
        best = dict.fromkeys(calls, math.inf)
        end, rounds = time.perf_counter() + SECONDS, 0
        while rounds < 2 or time.perf_counter() < end:  # the first one warms up, and is never the shortest
            rounds += 1
            for name, call in calls.items():
                start = clock()
                call()
                best[name] = min(best[name], clock() - start)
    if (earlier := _read(key)) is not None:  # of a process that measured at the same time
        return earlier
    _write(key, best)
    return best


def _write(key: str, times: Times) -> None:
    with contextlib.suppress(OSError, ResourceError):  # then it holds for this process
        text = json.dumps({"key": key, "seconds": dict(times)}) + "\n"
        write_atomically(cache_folder("measured") / _file(key), text)
