"""Ways to train a model on several devices, predicted: ZeRO stage, experts, offload, recomputing, masters, rows."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from hasten.bench.plan import PlanOptions, Subject, config_of, groups_of, settle, settled, training_plan
from hasten.errors import ConfigError, ResourceError
from hasten.planning.devices import ONE_SOCKET
from hasten.planning.memory import TrainingUse
from hasten.planning.plan import Plan
from hasten.training.recipe import CheckpointingName, OffloadName, Parallel, PolicyName, Recipe, StageName

SHOWN = 12  # ways in a table
GIVEN_ROWS = {"data.batch_size", "data.accumulation"}  # fields with which rows are not divided
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
        """Device-seconds for a million tokens; ranks that share a processor are one device."""
        return 1e6 * self.devices / self.plan.device.parts / self.plan.tokens_per_second

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
    """Ways to train that fit, best first; of two that take as long, the one with fewer changes.

    note: why not all devices are used, or "".
    """

    goal: str
    rows: tuple[Way, ...]
    thought_of: int
    note: str = ""

    @property
    def best(self) -> Way:
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the first way is the best."""
        plan = self.best.plan
        head = {"schema": 1, "kind": "ways to train", "model": plan.model, "device": plan.device.name}
        head |= {"goal": self.goal, "note": self.note, "settings": dict(plan.settings)}
        return head | {"ways": [one.to_json() for one in self.rows]}


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
    count = options.gpus or 1
    subject = settle(model, replace(options, ranks=count))
    if options.goal == "cost" and not subject.shares_cores:
        counts = sorted({1 << i for i in range(count.bit_length())} | {count})
    else:
        counts = [count]
    return _best(subject, counts, goal=options.goal or "throughput")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(PlanOptions):
    """What is to be done, as a recipe says it; batch_size: rows of a micro-batch that a rank reads."""

    asked: Recipe

    def recipe(self) -> Recipe:
        data = replace(self.asked.data, context=self.length or self.asked.data.context)
        data = replace(data, batch_size=self.batch_size or data.batch_size, accumulation=self.accumulation)
        return replace(self.asked, data=data, techniques=self.techniques, parallel=self.parallel)


def choose_for_recipe(recipe: Recipe, *, kept: Collection[str] = (), processes: int = 0) -> Ways:
    """Find how to train a recipe the fastest on this machine, with the rows of its updates.

    kept: fields that are not changed, by dotted name; so are those that differ from their defaults. processes: as many
    as these; 0: the most that pay. Raises as `choose_training` does.
    """
    if recipe.teacher is not None:
        raise ConfigError("a plan does not count a teacher's memory; leave out --devices auto, or --teacher")
    subject = _subject_of(recipe, processes or 1)
    count, groups = processes or _devices_here(subject), groups_of(recipe.parallel)[0]
    rows = recipe.data.batch_size * recipe.parallel.tensor
    counts = [number for number in range(count, 0, -1) if rows % number == 0 and number % groups == 0][:1]
    if processes and counts != [processes]:
        raise ConfigError(
            f"data.batch_size is {recipe.data.batch_size}, which {processes} processes cannot share evenly; make it a "
            "multiple, or leave out --processes"
        )
    kept = {*kept, "processes"} if processes else kept
    return _best(subject, counts or [groups], goal="throughput", kept=kept, rows=rows)


def _subject_of(recipe: Recipe, ranks: int) -> Subject:
    """A recipe as the subject of a plan. The vocabulary of a tokenizer that is yet to be trained is its largest."""
    from hasten.data.preparation import load_tokenizer
    from hasten.training.build import shape_config, training_config

    data = recipe.data
    use = "lora" if recipe.lora.rank is not None else "train" if recipe.init is None else "finetune"
    options = RecipeOptions(
        asked=recipe,
        use=use,  # type: ignore[arg-type]
        device=recipe.run.device,
        batch_size=data.batch_size,
        accumulation=data.accumulation,
        length=data.context,
        ranks=max(ranks, groups_of(recipe.parallel)[0]),
        techniques=recipe.techniques,
        optimizer=recipe.optimizer,
        lora=recipe.lora,
        parallel=recipe.parallel,
        measure=False,
    )
    if recipe.init is not None:
        name, config, checkpoint, own = config_of(recipe.init)
    else:
        vocab = data.vocab_size if data.tokenizer is None else load_tokenizer(Path(data.tokenizer)).vocab_size
        name, checkpoint, own = recipe.name, None, "float32"
        config = shape_config(recipe.model, vocab_size=vocab, positions=data.context)
    options = replace(options, length=min(data.context, config.max_positions))
    return settled(name, training_config(recipe, config), checkpoint, own, options)


def _devices_here(subject: Subject) -> int:
    """Devices of this machine."""
    if subject.device.kind == "cpu":
        return 1
    import torch

    return torch.cuda.device_count()


def _best(
    subject: Subject, counts: Collection[int], *, goal: str, kept: Collection[str] = (), rows: int | None = None
) -> Ways:
    """The ways on these numbers of devices, the best first. rows: of a micro-batch, of all ranks together."""
    parallel, most, note = subject.options.parallel, max(counts), ""
    divided = parallel.zero or parallel.tensor > 1 or parallel.experts > 1 or "processes" in kept
    if subject.shares_cores and most > 1 and not divided:
        counts, note = [1], ONE_SOCKET
    groups, what = groups_of(parallel)
    counts = [number for number in counts if number % groups == 0]
    ways = [way for number in counts for way in _ways(subject, number, kept, rows)]
    if not ways:
        training_plan(subject)  # raises what is wrong with each of them, if it is not their number
        raise ConfigError(f"{most} devices are no multiple of {what} ({groups})")
    fitting = [way for way in ways if way.fits]
    if not fitting:
        raise _nothing_fits(ways, subject.options, divides=not GIVEN_ROWS & {*kept})
    found: list[Way] = []
    for way in sorted(fitting, key=lambda way: (len(way.changes), way.device_seconds)):
        if not any(_makes_needless(one, way) for one in found):
            found.append(way)
    best = min(way.device_seconds for way in found)

    def rank(way: Way) -> tuple[float, ...]:
        behind = way.device_seconds > SAME * best
        return (behind, 0 if behind else len(way.changes), way.device_seconds)

    found.sort(key=rank)
    return Ways(goal=goal, rows=tuple(found[:SHOWN]), thought_of=len(ways), note=note)


def _makes_needless(one: Way, other: Way) -> bool:
    """Whether `one` is as fast as `other`, and asks for a part of what that does or needs no more memory."""
    if len(one.changes) > len(other.changes) or one.device_seconds > SAME * other.device_seconds:
        return False
    return set(one.changes) <= set(other.changes) or one.plan.memory.peak <= other.plan.memory.peak


def _ways(subject: Subject, devices: int, kept: Collection[str], rows: int | None) -> Iterator[Way]:
    """Every combination of what may be changed, on a number of devices. rows: see `_best`; None: the same on each."""
    options = subject.options
    parallel, techniques = options.parallel, options.techniques
    rows = options.batch_size or 8 if rows is None else rows // devices

    def free(name: str, unchanged: bool) -> bool:
        return unchanged and name not in kept

    if subject.shares_cores:
        subject = replace(subject, device=subject.device.part(devices))
    stages = get_args(StageName) if devices > 1 and free("parallel.zero", not parallel.zero) else (parallel.zero,)
    moves = subject.device.kind != "cpu" and free("parallel.offload", parallel.offload == "none")
    offloads: tuple[OffloadName, ...] = ("none", "optimizer") if moves else (parallel.offload,)
    usual = free("parallel.policy", parallel.policy == "float32-weights")
    policies = get_args(PolicyName) if usual else (parallel.policy,)
    recomputed: tuple[CheckpointingName, ...] = (techniques.checkpointing,)
    if free("techniques.checkpointing", techniques.checkpointing == "none"):
        recomputed = ("none", "selective", "full")
    splits = [count for count in (1 << i for i in range(rows.bit_length())) if rows % count == 0]
    if GIVEN_ROWS & {*kept}:
        splits = [1]
    divisors = [parallel.experts]  # ranks that divide the experts: all of them, or none
    if devices > 1 and subject.config.experts and free("parallel.experts", parallel.experts == 1):
        divisors = [1, devices]
    ways = product(stages, divisors, offloads, policies, recomputed, splits)
    for zero, experts, offload, policy, checkpointing, split in ways:
        own = subject.having(
            ranks=devices,
            batch_size=rows // split,
            accumulation=options.accumulation * split,
            measure=False,
            parallel=replace(parallel, zero=zero, experts=experts, offload=offload, policy=policy),
            techniques=replace(techniques, checkpointing=checkpointing),
        )
        try:
            own.options.recipe().check()
            plan = training_plan(own)
        except ConfigError:
            continue
        changes = [f"--processes {devices}"] if devices > 1 or zero else []
        changes += [f"--parallel.zero {zero}"] * (zero != parallel.zero)
        changes += [f"--parallel.experts {experts}"] * (experts != parallel.experts)
        changes += [f"--parallel.offload {offload}"] * (offload != parallel.offload)
        if policy != parallel.policy:
            changes += [f"--parallel.policy {policy} --techniques.precision {techniques.precision}"]
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
    for name in ("zero", "offload", "policy", "tensor", "experts", "replicas"):
        if getattr(parallel, name) != getattr(usual, name):
            yield f"--parallel.{name} {getattr(parallel, name)}"
    if parallel.policy != usual.policy:
        yield f"--techniques.precision {options.techniques.precision}"
    if options.techniques.checkpointing != "none":
        yield f"--techniques.checkpointing {options.techniques.checkpointing}"


def _nothing_fits(ways: list[Way], options: PlanOptions, *, divides: bool) -> ResourceError:
    """The error where no way fits, which names the smallest. divides: rows were divided into micro-batches."""
    least = min(ways, key=lambda way: way.plan.memory.peak)
    need, free = least.plan.memory.peak / 1e9, max(0, least.plan.free) / 1e9
    if not isinstance(options, RecipeOptions):
        adapter = "" if least.use.adapter is not None else ", an adapter beside the weights (--use lora)"
        advice = f"use more devices{adapter}, or a shorter --length"
    elif options.use == "finetune":
        advice = "train an adapter beside the weights (--lora.rank 16), or take a shorter --data.context"
    else:
        advice = f"take a smaller {'model (--model.layers)' if options.use == 'train' else '--init'}, or a shorter "
        advice += "--data.context"
    if not divides:
        advice = f"give fewer --data.batch-size and more --data.accumulation, or {advice}"
    return ResourceError(
        f"no way to train fits: the smallest ({least.options}) needs {need:.1f} GB on each of "
        f"{least.devices} x {least.plan.device.name}, and {free:.1f} GB are free; {advice}"
    )
