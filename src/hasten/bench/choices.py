"""Candidates for running a model on several devices, predicted here or on a known device: `hasten plan --goal`."""

from collections.abc import Iterator

from hasten.bench.plan import PlanOptions, Subject, Weights, inference_plan, measured_cost, require_degree, settle
from hasten.distributed.communication import require_cores
from hasten.errors import ConfigError
from hasten.machine import available_cores
from hasten.planning.choices import Candidate, Choices, choose

MOST_AT_ONCE = 64  # sequences of a replica that are thought of


def choose_plan(model: str, options: PlanOptions) -> Choices:
    """What serves options.goal best on at most options.gpus devices: degree, replicas, weights and batch.

    options.tensor_parallel above 1, a batch_size and weights that are given are kept. Raises ConfigError for options
    that make no sense and where no candidate is as fast as asked, ResourceError where none fits in memory.
    """
    if options.goal is None or options.training:
        raise ConfigError("several devices want a --goal (latency, throughput or cost), and --use generate or serve")
    options.check()
    subject = settle(model, options)
    return choose(_candidates(subject, _count(subject)), subject.options)


def _count(subject: Subject) -> int:
    """How many devices may be used."""
    options, device = subject.options, subject.device
    if subject.shares_cores:
        require_cores(options.gpus or 1)
    if options.gpus is not None or not device.measured:
        count = options.gpus or 1
    elif device.kind == "cpu":
        count = available_cores().physical
    else:
        import torch

        count = torch.cuda.device_count()
    if options.tensor_parallel > count:
        raise ConfigError(f"--tensor-parallel is {options.tensor_parallel} and there are {count} devices")
    return count


def _candidates(subject: Subject, count: int) -> Iterator[Candidate]:
    options = subject.options
    require_degree(subject)
    degrees = [options.tensor_parallel] if options.tensor_parallel > 1 else _doubled(count)
    batches = [options.batch_size] if options.batch_size else [1]
    if options.batch_size is None and options.use == "serve":
        batches = _doubled(MOST_AT_ONCE)
    for weights, refused in _formats(subject):
        rounded, rounds = subject.having(weights=weights), weights.startswith("int")
        cost = measured_cost(rounded, batches)
        for degree in degrees:
            own, rejected = rounded.having(tensor_parallel=degree), refused
            try:
                require_degree(own)
            except ConfigError as error:
                rejected = refused or str(error)
            for replicas in sorted({1, count // degree} - {0}):
                for batch in batches:
                    plan = inference_plan(own.having(batch_size=batch), replicas=replicas, cost=cost)
                    label = own.weights
                    yield Candidate(plan=plan, weights=label, rounded=rounds, replicas=replicas, rejected=rejected)


def _formats(subject: Subject) -> Iterator[tuple[Weights, str]]:
    """Those of the weights, and why not them: the model's own, or what was asked for, and what it can be rounded to."""
    options = subject.options
    yield options.weights, ""
    if options.weights == "auto" and "float" in subject.own:
        yield "int8", ""
        yield "int4", "rounding loses more; --weights int4 plans with it"


def _doubled(most: int) -> list[int]:
    """1, 2, 4, … and the most."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})
