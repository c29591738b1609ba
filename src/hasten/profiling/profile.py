"""`hasten.profile`: a profile of a recipe's training step, or of a model that generates or serves."""

import gc
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from hasten.checks import whole
from hasten.distributed import launched
from hasten.distributed.launch import joined
from hasten.distributed.ranks import ALONE, Ranks
from hasten.errors import ConfigError
from hasten.machine import describe, product_limits
from hasten.machine.files import save_json
from hasten.machine.limits import Limits
from hasten.model.binding import Binding, explain
from hasten.model.transformer import Transformer, require_model
from hasten.model.wide import product_dtype
from hasten.ops.attention.train import flop_formulas
from hasten.ops.linear.modules import PackedLinear
from hasten.planning.cost import parameters
from hasten.profiling.meter import Meter
from hasten.profiling.ranks import Exchange, Exchanges, RankTimes, check_clocks, fastest_of, times_of_ranks
from hasten.profiling.steps import Answers, ServedAnswers, Work, least_of, training
from hasten.profiling.trace import TracedStep, traced
from hasten.profiling.tree import PartTime, tree
from hasten.profiling.walk import parts_of
from hasten.training.display import TensorBoard
from hasten.training.recipe import Recipe
from hasten.training.run_folder import writing
from hasten.training.setup import set_up

WARMING = 3  # steps: compile, fill caches


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledPhase:
    """One kind of step. seconds: of an unobserved step; overhead: how much longer a step with timed parts takes.

    Both are medians. dtype: of most products. limits: measured in the same run. rows: the tree of the fastest step (on
    a shared machine some steps take ten times as long). held: bytes of all tensors before a step. checks: pairs of
    numbers, each found in two ways. ranks: what each of several ranks did in that step; the rest is of rank 0.
    """

    name: str
    tokens: int
    seconds: float
    overhead: float
    dtype: str
    limits: Limits
    rows: tuple[PartTime, ...]
    traced: TracedStep
    held: int
    checks: dict[str, tuple[float, float]]
    ranks: tuple[RankTimes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of one use: its kinds of steps, and the kernels that each layer runs, with the reasons."""

    use: str
    phases: tuple[ProfiledPhase, ...]
    kernels: tuple[Binding, ...]
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, and the machine."""
        head = {"schema": 1, "kind": "profile", "machine": describe().to_json()}
        return head | asdict(self) | {"folder": self.folder.name}


def profile(
    subject: Recipe | Transformer,
    folder: str | Path,
    *,
    use: str | None = None,
    batch: int = 1,
    prompt_tokens: int = 512,
    steps: int = 8,
    tensorboard: bool = False,
) -> Profile:
    """Measure where the time of a step goes; write profile.json, profile.png and traces for Perfetto into a folder.

    In processes that torchrun has started (on one machine) a recipe's ranks are profiled together: rank 0 writes, also
    what each of them computes, waits and sends, and each writes a trace.

    subject: a recipe, whose training step is measured (nothing is learned, and no run is touched), or a model that
    generates or, with use="serve", serves: `batch` random prompts of at most `prompt_tokens` tokens. steps: how many of
    each kind are measured, and how many more run unobserved for comparison. tensorboard: also write its scalars (needs
    the package). Raises ConfigError, and what `train` raises before its first step.
    """
    from torch._inductor import config as inductor_config

    from hasten.profiling.show import draw

    for key, value in {"batch": batch, "prompt_tokens": prompt_tokens, "steps": steps}.items():
        whole(key, value, low=1)
    use = use or ("train" if isinstance(subject, Recipe) else "generate")
    if use not in (("train",) if isinstance(subject, Recipe) else ("generate", "serve")):
        raise ConfigError(f"use is {use!r} of a {type(subject).__name__}; a recipe trains, a model generates or serves")
    if launched() and use != "train":
        raise ConfigError(f"a profile of {use} is of one process: run it without torchrun")
    with joined() if use == "train" else nullcontext(ALONE) as ranks:
        check_clocks(ranks)
        folder = Path(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        board = TensorBoard(folder / "tensorboard", after_step=0) if tensorboard and ranks.first else None
        # Compiled kernels of the CPU get their own names in the trace.
        with inductor_config.patch({"cpp.enable_kernel_profile": True}):
            if isinstance(subject, Recipe):
                ranks = ranks.split(subject.parallel.tensor)
                works, dtype = _training(subject, ranks)
            else:
                require_model(subject, "hasten.profile")
                kind = ServedAnswers if use == "serve" else Answers
                works, dtype = kind(subject, batch=batch, prompt_tokens=prompt_tokens).works(), product_dtype(subject)
            limits = product_limits(works[0].model.device, (dtype,))
            phases = tuple(measure(work, limits, dtype, steps=steps, folder=folder, ranks=ranks) for work in works)
        found = Profile(use=use, phases=phases, kernels=tuple(explain(works[0].model)), folder=folder)
        if ranks.first:
            with writing(folder):
                save_json(folder / "profile.json", found.to_json())
                draw(found, folder / "profile.png")
    if board is not None:
        for phase in phases:
            board.write({"step": 0} | {f"{phase.name}/{row.name or 'step'}": row.seconds for row in phase.rows})
        board.close()
    return found


def _training(recipe: Recipe, ranks: Ranks) -> tuple[list[Work], str]:
    """The training step of a recipe, and the dtype of its products."""
    recipe.check()
    if recipe.teacher is not None:
        raise ConfigError("the tree of a step has no teacher in it; profile the recipe without one")
    # Block by block: inside one graph of all blocks no parts can be timed.
    apart = replace(recipe, techniques=replace(recipe.techniques, whole_model=False))
    setup = set_up(apart, progress=ranks.first, ranks=ranks)
    batches = [setup.batches.batch(position) for position in range(recipe.data.accumulation)]
    return [training(setup, batches)], cast(str, setup.step.precision.name)


def measure(work: Work, limits: Limits, dtype: str, *, steps: int, folder: Path, ranks: Ranks = ALONE) -> ProfiledPhase:
    """Profile a step: alternates `steps` observed and as many unobserved ones, then traces one."""
    meter = Meter(work.model, work.calls)
    exchanges = Exchanges(meter) if ranks.size > 1 else None
    alone: list[dict[tuple[str, str], float]] = []
    observed: list[dict[tuple[str, str], float]] = []
    exchanged: list[list[Exchange]] = []
    for _ in range(WARMING + steps):
        for watched, found in ((False, alone), (True, observed)):
            with ExitStack() as sight:
                work.prepare()
                if ranks.size > 1:
                    torch.distributed.barrier()  # all begin the step together
                if watched:
                    sight.enter_context(meter)
                meter.restart()
                if watched and exchanges is not None:
                    exchanges.restart()
                    sight.enter_context(exchanges)
                work.step()
                found.append(meter.spent())
            if watched and exchanges is not None:
                exchanged.append(exchanges.found)
    plain, totals = ([sum(parts.values()) for parts in found[WARMING:]] for found in (alone, observed))
    best = fastest_of(ranks, totals)  # that which others disturbed the least
    fastest = observed[WARMING:][best]
    together = () if exchanges is None else times_of_ranks(ranks, fastest, exchanged[WARMING:][best])
    rows = tree(parts_of(work.model), fastest, least_of(work), rate=limits.rates.get(dtype), bandwidth=limits.bandwidth)
    checks: dict[str, tuple[float, float]] = {
        "seconds: the parts' sum, a step unobserved": (rows[0].seconds, min(plain)),
        "parameters: the parts' sum, the config's": (rows[0].parameters, parameters(work.model.config).total),
    }
    packed = any(isinstance(module, PackedLinear) for module in work.model.modules())
    if not packed and work.split == 1:  # the counter does not see how tensors are split
        checks["FLOPs: from shapes, torch's FlopCounterMode"] = (rows[0].flops, counted_flops(work))
    work.prepare()
    held = storages(work.model.device)  # until the step is traced: torch's profiler warns where older memory is freed
    own = f".rank{ranks.rank}" if ranks.size > 1 else ""

    def watched_step() -> None:
        with exchanges or nullcontext():
            work.step()

    step = traced(meter, watched_step, folder / f"{work.name}{own}.trace.json")
    return ProfiledPhase(
        name=work.name,
        tokens=sum(new for _, new in work.spans),
        seconds=median(plain),
        overhead=median(seen / one for seen, one in zip(totals, plain, strict=True)) - 1,
        dtype=dtype,
        limits=limits,
        rows=rows,
        traced=step,
        held=sum(storage.nbytes() for storage in held),
        checks=checks,
        ranks=together,
    )


def storages(device: torch.device) -> list[torch.UntypedStorage]:
    """Storages of all plain tensors of this process on a device, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device == device:
            storage = one.untyped_storage()
            with suppress(RuntimeError):  # it has no memory: such tensors are left by what traces a model
                found[storage.data_ptr()] = storage
    return list(found.values())


def counted_flops(work: Work) -> float:
    """Count FLOPs of a step with torch's FlopCounterMode; compiled blocks run uncompiled."""

    def loss(x: Any, weight: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
        return 3 * 2 * int(x[0]) * int(x[1]) * int(weight[0])  # logits, and both gradients

    formulas = dict(flop_formulas())
    if hasattr(torch.nn.functional, "linear_cross_entropy"):  # PyTorch's chunked loss hides its products
        import_module("torch.nn.modules.linear_cross_entropy")  # it is registered there
        formulas[torch.ops.torch_nn._linear_cross_entropy_batch_chunked] = loss
    work.prepare()
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        work.step()
    return float(counter.get_total_flops())
