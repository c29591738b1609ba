"""The training loop: steps, validation, checkpoints, and a clean end whatever happens."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from hasten.errors import TrainingError
from hasten.machine.measured import known
from hasten.training import budget, checkpoints, display
from hasten.training.checkpoint_state import TrainingState
from hasten.training.journal import Journal
from hasten.training.layer_drop import block_scales_of_step, kept_share
from hasten.training.qat import bits_of_step, stretches
from hasten.training.random_state import RandomState
from hasten.training.reading import Reading
from hasten.training.recipe import Recipe
from hasten.training.run_folder import RunFolder
from hasten.training.schedules import factor, learning_rate
from hasten.training.setup import Setup
from hasten.training.spikes import is_spike
from hasten.training.stopping import StopRequest

MOST_SKIPPED = 100  # float16 steps in a row whose gradients overflowed

OnStep = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A step that was queued, and whose loss is still to be read. started: when it was."""

    reading: Reading
    tokens: int
    rate: float
    started: float
    block_scales: list[list[float]] | None


@dataclass(eq=False)
class Loop:
    """One run from where its state says to its end. `run()` gives whether it was finished, not stopped.

    A captured step is read one step late: its loss is waited for when the next one is queued, so that the GPU never
    waits for the host. Before anything depends on it (validation, a checkpoint, the end) all are read.
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
        # While minutes become a number of steps, the warm-up has begun: it stays as long as it is.
        timed, schedule = self.recipe.run.minutes is not None, self.recipe.schedule
        self.schedule = replace(schedule, warmup_share=1.0) if timed else schedule
        self.step_seconds: list[float] = []
        self._start = time.perf_counter() - self.state.seconds
        self._queued: deque[Queued] = deque()
        self._read_at = 0.0
        self._pending: checkpoints.Pending | None = None

    def run(self) -> bool:
        state, run = self.state, self.recipe.run
        if state.total is None and run.minutes is None:
            state.total = budget.fixed_steps(self.recipe, windows=self.setup.batches.windows)
        micro = self.recipe.data.accumulation
        logs: list[Journal | display.TensorBoard] = []
        if self.ranks.first:
            logs.append(Journal(self.folder.journal, keep_steps=state.step))
        if self.ranks.first and run.tensorboard:
            logs.append(display.TensorBoard(self.folder.tensorboard, after_step=state.step))
        source = self.setup.batches.iterate(state.step * micro)
        try:
            while not self._all_queued():
                step = state.step + len(self._queued)
                random = RandomState.capture(self.device)
                started = time.perf_counter()
                rate = learning_rate(
                    self.schedule,
                    peak=self.recipe.optimizer.learning_rate,
                    step=step,
                    total=state.total,
                    decay_start=state.bend,
                )
                batches = [next(source)[1] for _ in range(micro)]
                layers = len(self.setup.model.blocks)
                if step == 0:
                    found = stretches(self.setup.model, self.recipe.qat, batches[0])
                    state.stretch = [int(self.ranks.of_first(times)) for times in found]
                bits_of_step(self.setup.model, self.recipe.qat, step, state.stretch)
                block_scales = block_scales_of_step(self.recipe, layers=layers, step=step, total=state.total)
                result = self.setup.step.run(batches, learning_rate=rate, block_scales=block_scales)
                if result is None:  # stopped inside the step: go on from its beginning
                    self._record(logs)
                    self._save(random)
                    return False
                self._queued.append(
                    Queued(
                        reading=Reading(result),
                        tokens=result.tokens,
                        rate=rate,
                        started=started,
                        block_scales=block_scales,
                    )
                )
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

    def _all_queued(self) -> bool:
        total = self.state.total
        return total is not None and self.state.step + len(self._queued) >= total

    def _may_read_late(self) -> bool:
        """Whether nothing needs to know the last queued step before another one is."""
        state, run, step = self.state, self.recipe.run, self.setup.step
        if not step.reads_late or run.minutes is not None or state.total is None or step.precision.scales:
            return False
        count = state.step + len(self._queued)
        return count < state.total and bool(count % run.validate_every) and bool(count % run.checkpoint_every)

    def _record(self, logs: Sequence[Journal | display.TensorBoard], *, keep: int = 0) -> None:
        """Read the queued steps but the last `keep`, and do what is due after each."""
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
        """Seconds of the run up to now."""
        return self.ranks.of_first(time.perf_counter() - self._start)

    def _account(self, queued: Queued) -> dict[str, Any]:
        """Wait for the step, count it, and give its line for train.jsonl."""
        state, block_scales = self.state, queued.block_scales
        loss, norm = queued.reading.values()
        now = time.perf_counter()
        elapsed, self._read_at = self.ranks.of_first(now - max(queued.started, self._read_at)), now
        skipped = self._check(loss, norm)
        state.step += 1
        state.tokens += queued.tokens
        state.seconds = self._seconds()
        spike = math.isfinite(loss) and is_spike(loss, state.recent_losses)
        state.spikes += spike
        state.loss = loss if math.isfinite(loss) else state.loss
        self._set_total(elapsed)
        self._keep_to_minutes(elapsed)
        speed = queued.tokens / elapsed
        line: dict[str, Any] = {
            "step": state.step,
            "loss": loss if math.isfinite(loss) else None,
            "learning_rate": queued.rate,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens": state.tokens,
            "tokens_per_second": round(speed, 1),
            "mfu": _rounded(self.setup.mfu(speed, block_scales)),
            "seconds": round(state.seconds, 3),
            "spike": spike,
        }
        if block_scales is not None:
            line["kept_blocks"] = _rounded(kept_share(block_scales))
        if self.setup.step.precision.scales:
            line |= {"scale": self.setup.step.precision.scale(), "skipped": skipped}
        return line

    def _check(self, loss: float, norm: float) -> bool:
        """Whether the step was skipped (float16 only). Raises TrainingError for a run that went wrong."""
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
        """Once the speed is known, fix the number of steps: from then on the schedule depends on the step alone."""
        state = self.state
        if state.total is not None:
            return
        self.step_seconds.append(elapsed)
        most = budget.fixed_steps(self.recipe, windows=self.setup.batches.windows)
        if budget.calibrated(self.recipe, steps=len(self.step_seconds), used=state.seconds):
            validation = self.setup.validation
            if validation is not None:
                validation.loss(self.setup.step)  # compiles; that time is then spent, and known
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
        """Lower the number of steps where the machine has become slower; the next checkpoint, at once, says so."""
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
        if self.setup.validation is None:
            return {}
        self.state.validation_loss = self.setup.validation.loss(self.setup.step)
        self.state.seconds = self._seconds()
        return {"validation_loss": self.state.validation_loss}

    def _save_where_due(self, line: Mapping[str, Any]) -> None:
        state = self.state
        if self._pending is not None and self._pending.written():
            self._finish_save()
        measured = line.get("validation_loss")
        best = measured is not None and measured < (math.inf if state.best_loss is None else state.best_loss)
        if best:
            state.best_loss, state.best_step = measured, state.step
        # A new total is stored before a step depends on it, so that whoever goes on goes on with the same one.
        if best or state.finished or self._lowered or state.step % self.recipe.run.checkpoint_every == 0:
            self._lowered = False
            self._save(RandomState.capture(self.device), best=best, background=self.recipe.run.background_checkpoints)

    def _finish_save(self) -> None:
        if self._pending is not None:
            self._pending.finish()
        self._pending = None

    def _save(self, random: RandomState, *, best: bool = False, background: bool = False) -> None:
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
