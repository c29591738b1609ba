"""A rung's process, from both sides: the parent starts it, asks it and notices when it dies; the child measures.

A process of its own per rung, because memory once touched is never fully given back: only so is a peak one rung's own.
They measure in turns, round after round, so that all of them see the same states of a shared machine.
"""

import contextlib
import math
import multiprocessing
import os
import pkgutil
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from hasten.errors import HastenError
from hasten.machine import configure, peak_memory, process_memory, product_limits, reset_peak_memory
from hasten.machine.threads import Threads

SKIPPED = "skipped: "  # how the error of a rung begins that was left out to save time


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of a ladder.

    `setup` names a function as "module:function"; called with `arguments` in a fresh process it returns an object with
    `measure() -> dict[str, float]` and optionally `describe() -> dict`: facts such as bytes_per_token,
    flops_per_token and matrix_dtype, from which the utilisation is formed. `techniques` are all that are switched on,
    in their order. `memory_bytes` is an estimate of what the rung keeps while it waits for its turn.

    A rung may have further rows, such as the same model with more sequences at once: "rows" in what it describes holds
    for each ending of a name the facts of that row, and metrics named "ending|metric" are that row's.

    `twice`: the set-up leaves something behind (compiled code), so it is done in two processes, one after the other;
    the report has the seconds of both, and the second is measured.

    `processes`: how many do the set-up and work together; each is given its `ranks`, and the first one's
    figures count.

    The last four are the process's own; a ladder fills them in. `compile_cache`: torch.compile's folder, if not the
    user's.
    """

    name: str
    techniques: tuple[str, ...]
    setup: str
    arguments: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    twice: bool = False
    processes: int = 1
    device: str = "cpu"
    threads: Threads | None = None
    seed: int | None = None
    compile_cache: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What the child sends in place of an answer: one line, and its traceback if it raised something unforeseen."""

    message: str
    traceback: str = ""


@dataclass(slots=True)
class RungRun:
    """One rung while its ladder runs: its processes, and its rounds so far or the error that ended it.

    It failed when a child says so, was killed, or took longer than `timeout` seconds for an answer.
    """

    rung: Rung
    timeout: float = 3600.0
    rounds: list[dict[str, float]] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] | None = None  # the description after the second set-up
    peak_memory_bytes: int = 0
    error: str | None = None
    traceback: str = ""
    _children: list[tuple[BaseProcess, Connection]] = field(default_factory=list, init=False)
    _store: Any = field(default=None, init=False, repr=False, compare=False)  # in which several of them meet

    def start(self) -> None:
        """Set up a process, or two of a rung that leaves something behind; nothing after an error."""
        if self.rung.twice and self.again is None:
            self._set_up()
            self.end()
        self._set_up()

    def measure(self, *, counts: bool) -> None:
        """Measure once; nothing without a process."""
        if not self._children or (answers := self._ask("measure")) is None:
            return
        self.peak_memory_bytes = max(self.peak_memory_bytes, *(peak for _, peak in answers))
        if counts:
            self.rounds.append(answers[0][0])

    def end(self, *, at_once: bool = False) -> None:
        """End the processes: politely first, so that they can end their helpers, then by force. Can be called twice.

        at_once: by force, in the middle of whatever they do.
        """
        for process, connection in self._children:
            if at_once:
                process.terminate()
            elif process.is_alive():
                with contextlib.suppress(OSError):
                    connection.send("stop")
            connection.close()
        for process, _ in self._children:
            process.join(2)
            for force in (process.terminate, process.kill):
                if process.is_alive():
                    force()
                    process.join(5)
        self._children, self._store = [], None

    def _set_up(self) -> None:
        if self.error is not None:
            return
        # Not forked from here: the child would share our threads, memory and CUDA state. It is forked from a server
        # that has imported torch and done nothing else, which saves each rung the seconds of the import.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        places: list[dict[str, str]] = [{}]
        if self.rung.processes > 1:
            from hasten.distributed.launch import meeting

            self._store, places = meeting(self.rung.processes)
        for place in places:
            ours, theirs = context.Pipe()
            # Not a daemon: daemons may have no children, and rungs compile and load data in processes.
            arguments = (theirs, self.rung, os.environ | place)
            process = context.Process(target=serve, args=arguments, name="hasten rung")
            process.start()
            self._children.append((process, ours))
            theirs.close()  # else the end of the child would not be noticed
        if (answers := self._ask()) is None:
            return
        if not self.description:  # a restarted process finds what the first one compiled and cached
            self.description = answers[0]
        elif self.again is None:
            self.again = answers[0]

    def _ask(self, question: str | None = None) -> list[Any] | None:
        """The next answer of each process; None where one failed, which ends all."""
        answers = []
        for _, connection in self._children if question is not None else ():
            with contextlib.suppress(OSError):  # it is gone, which its answer says
                connection.send(question)
        for process, connection in self._children:
            answer: Any = Failure(f"no answer within {self.timeout:.0f} s")
            try:
                if connection.poll(self.timeout):
                    answer = connection.recv()
            except (EOFError, ConnectionResetError, BrokenPipeError):
                answer = Failure(self._last_words(process))
            if isinstance(answer, Failure):
                self.error, self.traceback = answer.message, answer.traceback
                self.end(at_once=True)
                return None
            answers.append(answer)
        return answers

    def _last_words(self, process: BaseProcess) -> str:
        process.join(10)
        status = process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            hint = ", most likely because the memory ran out" if name == "SIGKILL" else ""
            return f"the process was killed ({name}){hint}"
        return f"the process ended by itself with exit status {status}"


def run_interleaved(
    rungs: Sequence[Rung],
    *,
    rounds: int,
    timeout: float = 3600.0,
    warmup: int = 0,
    keep: bool = True,
    room: int | None = None,
    seconds: float = math.inf,
    tell: Callable[[str], None] = lambda text: None,
) -> list[RungRun]:
    """Run the rungs in turns. The warm-up's rounds are not counted; one that fails is left out from there on.

    keep: all processes stay alive until the end; else each is started again for each round. room: bytes of a GPU;
    rungs that fit there together are prepared side by side, measured in turns, and end before the next ones start.
    seconds: of the whole ladder, where there is no room; rungs and rounds that would exceed it are left out
    (`TimeBudget`). tell: called with a line about each step.
    """
    runs = [RungRun(rung, timeout) for rung in rungs]
    if room is not None:
        return _in_groups(runs, room, rounds=rounds, warmup=warmup, tell=tell)
    budget = TimeBudget(seconds, rounds=rounds)

    def prepare(run: RungRun) -> None:
        tell(f"setting up: {run.rung.name}")
        run.start()
        for _ in range(warmup):
            tell(f"warm-up: {run.rung.name}")
            with budget.measuring(run):
                run.measure(counts=False)

    try:
        for run in runs if keep else ():
            if budget.takes(run, rounds_ahead=rounds):
                with budget.preparing():
                    prepare(run)
        for number in range(1, rounds + 1):
            if not budget.has_round(number):
                tell(f"{number - 1} of {rounds} rounds, because more would take longer than {seconds:.0f} s")
                break
            for run in runs:
                if number == 1 and not keep and not budget.takes(run, rounds_ahead=rounds - 1):
                    continue
                with budget.measuring(run):
                    if not keep:
                        prepare(run)
                    tell(f"round {number} of {rounds}: {run.rung.name}")
                    run.measure(counts=True)
                if not keep:
                    run.end()
    except BaseException:
        for run in runs:
            run.end(at_once=True)
        raise
    for run in runs:
        run.end()
    return runs


class TimeBudget:
    """The seconds that a ladder may take. What has been measured says whether a further rung or round fits."""

    def __init__(self, seconds: float, *, rounds: int) -> None:
        self.seconds, self.rounds = seconds, rounds
        self._begun = time.monotonic()
        self._preparations: list[float] = []
        self._measurements: dict[str, float] = {}  # of each rung, the latest

    def takes(self, run: RungRun, *, rounds_ahead: int) -> bool:
        """Whether a further rung fits, if it takes as long as those before it on average; else it has an error.

        rounds_ahead: of the rungs before it.
        """
        further = _mean(self._preparations) + self.rounds * _mean(self._measurements.values())
        if self._spent() + rounds_ahead * self._round() + further > self.seconds:
            run.error = f"{SKIPPED}with the rungs before it, it would take longer than {self.seconds:.0f} s"
        return run.error is None

    def has_round(self, number: int) -> bool:
        """Whether one more round fits. The first one is measured in any case."""
        return number == 1 or self._spent() + self._round() <= self.seconds

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Time the set-up and warm-up of a rung."""
        begun = time.monotonic()
        yield
        self._preparations.append(time.monotonic() - begun)

    @contextlib.contextmanager
    def measuring(self, run: RungRun) -> Iterator[None]:
        """Time a rung's part of a round."""
        begun = time.monotonic()
        yield
        self._measurements[run.rung.name] = time.monotonic() - begun

    def _round(self) -> float:
        return sum(self._measurements.values())

    def _spent(self) -> float:
        return time.monotonic() - self._begun


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _in_groups(
    runs: list[RungRun], room: int, *, rounds: int, warmup: int, tell: Callable[[str], None]
) -> list[RungRun]:
    """Run rungs on a GPU in groups that fit its memory. A rung that failed beside others is measured again alone."""
    how: dict[str, Any] = {"rounds": rounds, "warmup": warmup, "tell": tell}
    begin = 0
    while begin < len(runs):
        end, held = begin + 1, _held(runs[begin])
        while end < len(runs) and held + _held(runs[end]) <= room:
            held += _held(runs[end])
            end += 1
        _side_by_side(runs[begin:end], **how)
        for index in range(begin, end) if end - begin > 1 else ():
            if runs[index].error is not None:
                runs[index] = RungRun(runs[index].rung, runs[index].timeout)
                _side_by_side(runs[index : index + 1], **how)
        begin = end
    return runs


def _held(run: RungRun) -> float:
    """Bytes of a GPU while a rung waits for its turn: what its allocator keeps, and its context and graphs."""
    return 1.2 * run.rung.memory_bytes + (1 << 30)


def _side_by_side(runs: list[RungRun], *, rounds: int, warmup: int, tell: Callable[[str], None]) -> None:
    """Set up and warm up all at once, since compiling takes the host's cores; then measure one at a time."""

    def prepare(run: RungRun) -> None:
        tell(f"setting up: {run.rung.name}")
        run.start()
        for _ in range(warmup):
            tell(f"warm-up: {run.rung.name}")
            run.measure(counts=False)

    pool = ThreadPoolExecutor(len(runs))
    try:
        list(pool.map(prepare, runs))
        for number in range(1, rounds + 1):
            for run in runs:
                tell(f"round {number} of {rounds}: {run.rung.name}")
                run.measure(counts=True)
    except BaseException:
        for run in runs:
            run.end(at_once=True)
        raise
    finally:
        pool.shutdown()
        for run in runs:  # also one that was still starting when another one failed
            run.end()


def serve(connection: Connection, rung: Rung, environment: dict[str, str]) -> None:
    """Runs in the child until the parent says "stop" or goes away. `environment` is the parent's, as it is now."""
    os.environ.update(environment)
    # Ctrl-C reaches the whole group; the parent then ends its children, and only it reports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output may be carrying the parent's JSON.
    os.dup2(2, 1)
    if rung.compile_cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = rung.compile_cache
    try:
        _work(connection, rung)
    except (EOFError, BrokenPipeError):  # the parent is gone: there is nobody to tell
        return
    except HastenError as error:
        connection.send(Failure(str(error)))
    except BaseException as error:
        text = str(error).strip().splitlines()
        connection.send(Failure(f"{type(error).__name__}: {text[0] if text else ''}", traceback.format_exc()))


def _work(connection: Connection, rung: Rung) -> None:
    import torch  # noqa: F401 - the baseline is a process that has it

    threads = max(1, rung.threads // rung.processes) if isinstance(rung.threads, int) else rung.threads
    configure(threads=threads, seed=rung.seed)
    reset_peak_memory()
    baseline = process_memory(rung.device)
    arguments = dict(rung.arguments)
    with contextlib.ExitStack() as stack:
        if rung.processes > 1:
            from hasten.distributed.launch import joined

            arguments["ranks"] = stack.enter_context(joined())
        start = time.perf_counter()
        made = pkgutil.resolve_name(rung.setup)(**arguments)
        seconds = time.perf_counter() - start
        connection.send(getattr(made, "describe", dict)() | {"setup_seconds": seconds})
        while connection.recv() == "measure":
            metrics = {name: float(value) for name, value in made.measure().items()}
            connection.send((metrics, max(0, peak_memory(rung.device) - baseline)))


class LimitsProbe:
    """Measures the machine's limits like a rung: "bandwidth" in bytes/s and "rate <dtype>" in FLOP/s."""

    def __init__(self, *, device: str, dtypes: Sequence[str], seconds: float) -> None:
        self.device, self.dtypes, self.seconds = device, dtypes, seconds

    def measure(self) -> dict[str, float]:
        limits = product_limits(self.device, self.dtypes, seconds=self.seconds)
        return {"bandwidth": limits.bandwidth} | {f"rate {dtype}": rate for dtype, rate in limits.rates.items()}
