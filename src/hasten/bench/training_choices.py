"""Ways to train a model on several devices, predicted: ZeRO stage, offload, recomputation, masters, micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from hasten.bench.plan import PlanOptions, Subject, settle, training_plan
from hasten.errors import ConfigError, ResourceError
from hasten.planning.memory import TrainingUse
from hasten.planning.plan import Plan
from hasten.training.recipe import CheckpointingName, OffloadName, Parallel, PolicyName, StageName

SHOWN = 12  # ways in a table
SAME = 1.02  # times the seconds of another way: then the one that asks for less is better


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train. changes: the options of `hasten train` that it takes, but for defaults and what was asked for.

    kept: the other options that make it: rows, tokens of a row, rank of an adapter, and what was asked for.
    """

    plan: Plan
    changes: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def options(self) -> str:
        """All options of `hasten train`, as written."""
        return " ".join((*self.changes, *self.kept))

    @property
    def use(self) -> TrainingUse:
        """The use that `plan` is for, of one rank."""
        assert isinstance(self.plan.use, TrainingUse)
        return self.plan.use

    @property
    def devices(self) -> int:
        return self.use.ranks * self.use.replicas

    @property
    def fits(self) -> bool:
        """Whether the plan fits in a rank's memory."""
        return self.plan.memory.peak <= self.plan.free

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of all ranks."""
        return self.plan.phases[0].seconds(self.plan.device)

    @property
    def device_seconds(self) -> float:
        """Device-seconds for a million tokens."""
        return 1e6 * self.devices / self.plan.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "options": self.options,
            "devices": self.devices,
            "peak_bytes": self.plan.memory.peak,
            "free_bytes": self.plan.free,
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.plan.tokens_per_second,
            "device_seconds_per_million": self.device_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Ways to train that fit, best first; of two that take as long, the one with fewer changes."""

    goal: str
    rows: tuple[Way, ...]
    thought_of: int

    @property
    def best(self) -> Way:
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the first way is the best."""
        plan = self.best.plan
        head = {"schema": 1, "kind": "ways to train", "model": plan.model, "device": plan.device.name}
        return head | {"goal": self.goal, "settings": dict(plan.settings), "ways": [one.to_json() for one in self.rows]}


def choose_training(model: str, options: PlanOptions) -> Ways:
    """Find how to train on options.gpus devices the fastest ("throughput"), or on at most as many with the fewest
    device-seconds ("cost").

    What differs from the defaults of `parallel`, and checkpointing, is kept as it was asked for; the rows of an update
    are kept and may be read in more micro-batches. Raises ConfigError for options that make no sense, ResourceError
    where nothing fits.
    """
    if options.goal == "latency" or options.token_ms is not None or options.price is not None:
        raise ConfigError("training has --goal throughput or cost, without --token-ms and --price")
    if options.ranks > 1:
        raise ConfigError("--ranks plans for that number of devices; with --goal give --gpus instead")
    count, parallel = options.gpus or 1, options.parallel
    subject = settle(model, replace(options, ranks=count))
    if subject.shares_cores and count > 1:
        raise ConfigError(
            "ranks of one processor share its cores and memory: plan for one device, or name another (--device h100)"
        )
    counts = [count] if options.goal != "cost" else sorted({1 << i for i in range(count.bit_length())} | {count})
    counts = [number for number in counts if number % (parallel.replicas * parallel.tensor) == 0]
    ways = [way for number in counts for way in _ways(subject, number)]
    if not ways:
        training_plan(subject)  # raises what is wrong with each of them
    fitting = [way for way in ways if way.fits]
    if not fitting:
        raise _nothing_fits(ways)
    rows: list[Way] = []
    for way in sorted(fitting, key=lambda way: (len(way.changes), way.device_seconds)):
        if not any(_makes_needless(one, way) for one in rows):
            rows.append(way)
    best = min(way.device_seconds for way in rows)

    def rank(way: Way) -> tuple[float, ...]:
        behind = way.device_seconds > SAME * best
        return (behind, 0 if behind else len(way.changes), way.device_seconds)

    rows.sort(key=rank)
    return Ways(goal=options.goal or "throughput", rows=tuple(rows[:SHOWN]), thought_of=len(ways))


def _makes_needless(one: Way, other: Way) -> bool:
    """Whether `one` is as fast as `other`, and asks for a part of what that does or needs no more memory."""
    if len(one.changes) > len(other.changes) or one.device_seconds > SAME * other.device_seconds:
        return False
    return set(one.changes) <= set(other.changes) or one.plan.memory.peak <= other.plan.memory.peak


def _ways(subject: Subject, devices: int) -> Iterator[Way]:
    """Every combination of what may be changed, on a number of devices."""
    options = subject.options
    parallel, techniques, rows = options.parallel, options.techniques, options.batch_size or 8
    stages = get_args(StageName) if devices > 1 and not parallel.zero else (parallel.zero,)
    free = subject.device.kind != "cpu" and parallel.offload == "none"
    offloads: tuple[OffloadName, ...] = ("none", "optimizer") if free else (parallel.offload,)
    policies = get_args(PolicyName) if parallel.policy == "float32-weights" else (parallel.policy,)
    kept: tuple[CheckpointingName, ...] = (techniques.checkpointing,)
    if techniques.checkpointing == "none":
        kept = ("none", "selective", "full")
    splits = [count for count in (1 << i for i in range(rows.bit_length())) if rows % count == 0]
    for zero, offload, policy, checkpointing, split in product(stages, offloads, policies, kept, splits):
        own = subject.having(
            ranks=devices,
            batch_size=rows // split,
            accumulation=options.accumulation * split,
            measure=False,
            parallel=replace(parallel, zero=zero, offload=offload, policy=policy),
            techniques=replace(techniques, checkpointing=checkpointing),
        )
        try:
            own.options.recipe().check()
            plan = training_plan(own)
        except ConfigError:
            continue
        changes = [f"--processes {devices}"] if devices > 1 else []
        changes += [f"--parallel.zero {zero}"] * (zero != parallel.zero)
        changes += [f"--parallel.offload {offload}"] * (offload != parallel.offload)
        changes += [f"--parallel.policy {policy}"] * (policy != parallel.policy)
        changes += [f"--data.accumulation {own.options.accumulation}"] * (split > 1)
        changes += [f"--techniques.checkpointing {checkpointing}"] * (checkpointing != techniques.checkpointing)
        batch = rows // split * devices // parallel.tensor
        sizes = [f"--data.batch-size {batch}", f"--data.context {options.length}"]
        sizes += [f"--data.accumulation {options.accumulation}"] * (split == 1)
        sizes += [f"--lora.rank {options.recipe().lora.rank}"] * (options.use == "lora")
        yield Way(plan=plan, changes=tuple(changes), kept=(*sizes, *_asked_for(options)))


def _asked_for(options: PlanOptions) -> Iterator[str]:
    """The options, of those that ways are made of, that were given."""
    usual, parallel = Parallel(), options.parallel
    for name in ("zero", "offload", "policy", "tensor", "replicas"):
        if getattr(parallel, name) != getattr(usual, name):
            yield f"--parallel.{name} {getattr(parallel, name)}"
    if options.techniques.checkpointing != "none":
        yield f"--techniques.checkpointing {options.techniques.checkpointing}"


def _nothing_fits(ways: list[Way]) -> ResourceError:
    """The error where no way fits, which names the smallest."""
    least = min(ways, key=lambda way: way.plan.memory.peak)
    need, free = least.plan.memory.peak / 1e9, max(0, least.plan.free) / 1e9
    adapter = "" if least.use.adapter is not None else ", an adapter beside the weights (--use lora)"
    return ResourceError(
        f"no way to train fits: the smallest ({least.options}) needs {need:.1f} GB on each of "
        f"{least.devices} x {least.plan.device.name}, and {free:.1f} GB are free; use more devices{adapter}, or a "
        "shorter --length"
    )
