"""The training loop: one step after the other, with its log line, validation and checkpoints, until the end or a stop.

A step is `_queue_step` (learning rate, micro-batches, `TrainStep.run`) and `_record` (its loss, log and checkpoint).
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from types import FrameType
from typing import Any

from hasten.data import Batch
from hasten.errors import TrainingError
from hasten.machine.measured import known
from hasten.machine.signals import CAPTURED, capture_signals
from hasten.training import budget, checkpoints, display
from hasten.training.checkpoint_state import RandomState, TrainingState
from hasten.training.journal import Journal, is_spike
from hasten.training.layer_drop import block_scales_of_step, kept_share
from hasten.training.qat import bits_of_step, stretches
from hasten.training.recipe import Recipe
from hasten.training.run_folder import RunFolder
from hasten.training.schedules import factor, learning_rate
from hasten.training.setup import Setup
from hasten.training.step import StepResult

MOST_SKIPPED = 100  # float16 steps in a row whose gradients overflowed

OnStep = Callable[[Mapping[str, Any]], None]


class StopRequest:
    """A request to save and end the run. signal: the signal that was received, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def asked(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None


def stop_on_signals(request: StopRequest) -> AbstractContextManager[None]:
    """Record the first SIGINT or SIGTERM in `request` inside the context; a second one ends the process at once.

    In other threads than the main one, no signal is caught.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for caught in CAPTURED:
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)

    return capture_signals(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A queued step whose loss was not read yet. rate: its learning rate. started: time.perf_counter() before it."""

    result: StepResult
    rate: float
    started: float
    block_scales: list[list[float]] | None


@dataclass(eq=False)
class Loop:
    """A run, from the step in `state` to its end.

    A captured step is read one step late: the loop waits for its loss after queueing the next one, so that the GPU
    never waits for the host. All are read before anything depends on them (validation, a checkpoint, the end).
    """

    recipe: Recipe
    folder: RunFolder
    setup: Setup
    state: TrainingState
    _: KW_ONLY
    stop: StopRequest
    progress: display.Progress
    on_step: OnStep | None = None
    _pace: budget.Pace | None = field(default=None, init=False)
    _lowered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.device, self.ranks = self.setup.step.device, self.setup.step.ranks
        # With minutes, the warm-up begins before the number of steps is known, so no share of them may shorten it.
        timed, schedule = self.recipe.run.minutes is not None, self.recipe.schedule
        self.schedule = replace(schedule, warmup_share=1.0) if timed else schedule
        self.step_seconds: list[float] = []
        self._start = time.perf_counter() - self.state.seconds
        self._queued: deque[Queued] = deque()
        self._read_at = 0.0
        self._pending: checkpoints.Pending | None = None

    def run(self) -> bool:
        """Train to the end and return True; after a stop request save a checkpoint and return False."""
        state, run = self.state, self.recipe.run
        if state.total is None and run.minutes is None:
            state.total = budget.fixed_steps(self.recipe, windows=self.setup.batches.windows)
        logs: list[Journal | display.TensorBoard] = []
        if self.ranks.first:
            logs.append(Journal(self.folder.journal, keep_steps=state.step))
        if self.ranks.first and run.tensorboard:
            logs.append(display.TensorBoard(self.folder.tensorboard, after_step=state.step))
        batches = self.setup.batches.iterate(state.step * self.recipe.data.accumulation)
        try:
            while not self._all_queued():
                random = RandomState.capture(self.device)
                if not self._queue_step(batches):  # stopped inside the step: resume at its beginning
                    self._record(logs)
                    self._save(random)
                    return False
                self._record(logs, keep=1 if self._may_read_late() else 0)
                if not state.finished and self._asked_to_stop():
                    random = RandomState.capture(self.device)
                    self._record(logs)
                    if not state.finished:
                        self._save(random)
                        return False
            self._finish_save()
        finally:
            for log in logs:
                log.close()
        return True

    def _queue_step(self, source: Iterator[tuple[int, Batch]]) -> bool:
        """Run the next step without waiting for its loss; False if a stop request ended it."""
        state, recipe = self.state, self.recipe
        step, started = state.step + len(self._queued), time.perf_counter()
        rate = learning_rate(
            self.schedule,
            peak=recipe.optimizer.learning_rate,
            step=step,
            total=state.total,
            decay_start=state.bend,
        )
        batches = [next(source)[1] for _ in range(recipe.data.accumulation)]
        if recipe.qat.start_bits is not None:
            self._set_bits(step, batches[0])
        block_scales = None
        if recipe.techniques.layer_drop is not None:
            layers = len(self.setup.model.blocks)
            block_scales = block_scales_of_step(recipe, layers=layers, step=step, total=state.total)
        result = self.setup.step.run(batches, learning_rate=rate, block_scales=block_scales)
        if result is None:
            return False
        self._queued.append(Queued(result=result, rate=rate, started=started, block_scales=block_scales))
        return True

    def _set_bits(self, step: int, batch: Batch) -> None:
        """Set the number of bits that rounded weights have in a step (MoQ). batch: the first one, for its curvature."""
        if step == 0:
            found = stretches(self.setup.model, self.recipe.qat, batch)
            self.state.stretch = [int(self.ranks.broadcast_from_rank0(times)) for times in found]
        bits_of_step(self.setup.model, self.recipe.qat, step, self.state.stretch)

    def _all_queued(self) -> bool:
        total = self.state.total
        return total is not None and self.state.step + len(self._queued) >= total

    def _may_read_late(self) -> bool:
        """Whether the next step may be queued before this one's loss is read."""
        state, run, step = self.state, self.recipe.run, self.setup.step
        if not step.reads_late or run.minutes is not None or state.total is None or step.precision.scales:
            return False
        count = state.step + len(self._queued)
        return count < state.total and bool(count % run.validate_every) and bool(count % run.checkpoint_every)

    def _record(self, logs: Sequence[Journal | display.TensorBoard], *, keep: int = 0) -> None:
        """Read the queued steps except the last `keep`; log each, and validate and save where that is due."""
        state = self.state
        while len(self._queued) > keep:
            queued = self._queued.popleft()
            line = self._account(queued)
            if state.finished or (state.step % self.recipe.run.validate_every == 0 and not self._asked_to_stop()):
                line |= self._validate()
            for log in logs:
                log.write(line)
            self.progress.show(line, total=state.total, validation=state.validation_loss)
            self._save_where_due(line)
            if self.on_step is not None:
                self.on_step(line)

    def _asked_to_stop(self) -> bool:
        return self.ranks.any(self.stop.asked())

    def _seconds(self) -> float:
        """Seconds of the run so far, by the first rank's clock."""
        return self.ranks.broadcast_from_rank0(time.perf_counter() - self._start)

    def _account(self, queued: Queued) -> dict[str, Any]:
        """Wait for a step, update the state by it, and return its line for train.jsonl."""
        state, block_scales = self.state, queued.block_scales
        tokens = queued.result.tokens
        loss, norm = queued.result.read()
        now = time.perf_counter()
        elapsed = self.ranks.broadcast_from_rank0(now - max(queued.started, self._read_at))
        self._read_at = now
        skipped = self._check(loss, norm)
        state.step += 1
        state.tokens += tokens
        state.seconds = self._seconds()
        spike = math.isfinite(loss) and is_spike(loss, state.recent_losses)
        state.spikes += spike
        state.loss = loss if math.isfinite(loss) else state.loss
        self._set_total(elapsed)
        self._keep_to_minutes(elapsed)
        speed = tokens / elapsed
        line: dict[str, Any] = {
            "step": state.step,
            "loss": loss if math.isfinite(loss) else None,
            "learning_rate": queued.rate,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens": state.tokens,
            "tokens_per_second": round(speed, 1),
            "mfu": _rounded(self._mfu(speed, block_scales)),
            "seconds": round(state.seconds, 3),
            "spike": spike,
        }
        if block_scales is not None:
            line["kept_blocks"] = _rounded(kept_share(block_scales))
        if self.setup.step.precision.scales:
            line |= {"scale": self.setup.step.precision.scale(), "skipped": skipped}
        return line

    def _mfu(self, tokens_per_second: float, block_scales: Sequence[Sequence[float]] | None) -> float | None:
        """Model FLOPs utilization (arXiv 2204.02311, appendix B) of the matrix rate measured on this machine.

        block_scales: of each micro-batch; blocks of scale 0 did not run. None if no rate was measured.
        """
        setup = self.setup
        if setup.rate is None:
            return None
        flops = setup.flops_per_token
        if block_scales is not None:
            for scales in block_scales:
                skipped = sum(own for own, scale in zip(setup.block_flops, scales, strict=True) if not scale)
                flops -= skipped / len(block_scales)
        return flops * tokens_per_second / setup.rate

    def _check(self, loss: float, norm: float) -> bool:
        """Whether float16 skipped the step. Raises TrainingError if loss or norm are not finite otherwise."""
        state = self.state
        if math.isfinite(loss) and math.isfinite(norm):
            state.skipped_in_row = 0
            return False
        step = state.step + 1
        if self.setup.step.precision.scales:
            state.skipped_in_row += 1
            if state.skipped_in_row < MOST_SKIPPED:
                return True
            raise TrainingError(
                f"step {step}: {MOST_SKIPPED} steps in a row overflowed in float16; {self._last_good()}; try "
                "--techniques.precision bfloat16 or float32"
            )
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        clip = self.recipe.optimizer.clip
        clipped = "" if clip is not None and clip <= 1 else "--optimizer.clip 1, "
        exact = "" if self.recipe.techniques.precision == "float32" else ", or --techniques.precision float32"
        raise TrainingError(
            f"step {step}: {what}; {self._last_good()}; try a lower --optimizer.learning-rate, {clipped}or a longer "
            f"--schedule.warmup-steps{exact}"
        )

    def _last_good(self) -> str:
        stored = checkpoints.find(self.folder.last)
        if stored is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is of step {stored.step} in {stored.folder}"

    def _set_total(self, elapsed: float) -> None:
        """Fix the number of steps once the speed is known; from then on the schedule depends on the step alone."""
        state = self.state
        if state.total is not None:
            return
        self.step_seconds.append(elapsed)
        most = budget.fixed_steps(self.recipe, windows=self.setup.batches.windows)
        if budget.calibrated(self.recipe, steps=len(self.step_seconds), used=state.seconds):
            validation = self.setup.validation
            if validation is not None:
                validation.loss(self.setup.step)  # compiles, so that this time is known and spent
                state.seconds = self._seconds()
            more = budget.timed_steps(
                self.recipe,
                step_seconds=self.step_seconds,
                used=state.seconds,
                validation_batches=self.setup.validation_batches,
            ) - len(self.step_seconds)
            state.total = state.step + more if most is None else min(most, state.step + more)
        elif most is not None and state.step >= most:
            state.total = state.step

    def _keep_to_minutes(self, elapsed: float) -> None:
        """Lower the number of steps if the machine became slower; a checkpoint is then due at once."""
        state = self.state
        if self.recipe.run.minutes is None or state.total is None or state.finished:
            return
        if self._pace is None:
            batches = self.setup.validation_batches
            self._pace = budget.Pace(self.recipe, used=state.seconds, validation_batches=batches)
        total = self._pace.lowered(step=state.step, total=state.total, elapsed=elapsed, used=state.seconds)
        if total == state.total:
            return
        if state.step >= self.recipe.schedule.warmup_steps:
            now = factor(self.schedule, step=state.step, total=state.total, decay_start=state.bend)
            state.bend = (state.step, now)
        self.progress.note(
            f"the machine has become slower: {total:,} steps instead of {state.total:,}, to end in about "
            f"{self.recipe.run.minutes:g} minutes"
        )
        state.total, self._lowered = total, True

    def _validate(self) -> dict[str, float]:
        """Measure the validation loss, for the log line."""
        if self.setup.validation is None:
            return {}
        self.state.validation_loss = self.setup.validation.loss(self.setup.step)
        self.state.seconds = self._seconds()
        return {"validation_loss": self.state.validation_loss}

    def _save_where_due(self, line: Mapping[str, Any]) -> None:
        """Save a checkpoint if one is due. line: the step's log line, which has the validation loss if measured."""
        state = self.state
        if self._pending is not None and self._pending.written():
            self._finish_save()
        measured = line.get("validation_loss")
        best = measured is not None and measured < (math.inf if state.best_loss is None else state.best_loss)
        if best:
            state.best_loss, state.best_step = measured, state.step
        # A new total is stored before a step depends on it, so that a resumed run continues with the same one.
        if best or state.finished or self._lowered or state.step % self.recipe.run.checkpoint_every == 0:
            self._lowered = False
            self._save(RandomState.capture(self.device), best=best, background=self.recipe.run.background_checkpoints)

    def _finish_save(self) -> None:
        """Wait for a checkpoint that is being written, if any."""
        if self._pending is not None:
            self._pending.finish()
        self._pending = None

    def _save(self, random: RandomState, *, best: bool = False, background: bool = False) -> None:
        """Save a checkpoint of the state. best: it also becomes the best one."""
        self._finish_save()
        values = {
            "progress": self.state.to_json(),
            "data_position": self.state.step * self.recipe.data.accumulation,
            "data": self.setup.data.folder.name,
            "scaler": self.setup.step.precision.state(),
            "recipe": self.recipe.to_json(),
            "measured": known(),
        }
        self._pending = checkpoints.save(
            self.folder.last,
            placement=self.setup.step.where,
            optimizer=self.setup.step.optimizer,
            random=random,
            values=values,
            background=background,
            also=self.folder.best if best else None,
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
