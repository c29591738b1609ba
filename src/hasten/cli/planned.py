"""`--devices auto`: what a plan chooses for `hasten serve` (ranks and precision) and for `hasten train`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.cli.options import same_fields
from hasten.distributed import launched
from hasten.errors import ConfigError
from hasten.planning.choices import Wanted

if TYPE_CHECKING:
    from hasten.bench.plan import PlanOptions
    from hasten.cli.serve import Serve
    from hasten.cli.train import Train

# What a plan of training chooses that a run keeps until its end.
LASTING = (
    "parallel.policy",
    "techniques.precision",
    "techniques.checkpointing",
    "data.batch_size",
    "data.accumulation",
)
WANTED = {field.name: field.default for field in fields(Wanted)}


def by_plan(command: Any, arguments: list[str]) -> tuple[Any, list[str]]:
    """The command with the plan's choices, and the arguments with which another process parses the same."""
    if command.devices == "given":
        return command, arguments
    if launched():
        raise ConfigError(
            "--devices auto starts the ranks itself: run the command without torchrun, or leave out --devices auto"
        )
    from hasten.bench.choices import choose_plan
    from hasten.machine import configure

    configure(threads=command.threads)
    options = _options(command)
    print("measuring ranks and precisions …", file=sys.stderr)
    found = choose_plan(command.model, options)
    best = found.best
    quantize = best.weights if best.rounded else "none"
    chosen = ["--tensor-parallel", str(best.use.degree), "--quantize", quantize]
    ranks = "1 rank" if best.use.degree == 1 else f"{best.use.degree} ranks"
    cache = best.plan.memory.parts["cache"] / 1e9
    batch = f"{best.use.batch_size} at once in a cache of {cache:.2f} GB"
    speed = f"{1e3 * best.token_seconds:.1f} ms a token and {best.tokens_per_second:.1f} tokens/s predicted"
    print(f"{ranks}, {best.weights}, {batch}: {speed}; {found.why()}", file=sys.stderr)
    if best.replicas > 1:
        ranks_of_each = [] if best.use.degree == 1 else chosen[:2]
        line = ["hasten", "serve", command.model, "--replicas", str(best.replicas), *ranks_of_each, *chosen[2:]]
        all_of_them = f"the plan has {best.replicas} replicas, and this is one of them; all of them: {' '.join(line)}"
        print(all_of_them, file=sys.stderr)
    command = replace(command, devices="given", tensor_parallel=best.use.degree, quantize=quantize, **WANTED)
    return command, [*_without(arguments, {*WANTED, "devices"}), *chosen]


def training_by_plan(command: Train, arguments: list[str], given: Collection[str]) -> list[str]:
    """The arguments of `hasten train` with what a plan for this machine chooses.

    given: fields of the recipe that the arguments set, by dotted name; those are kept. So is what the run in the
    recipe's folder began with, if it is resumed.
    """
    if launched():
        raise ConfigError(
            "--devices auto starts the processes itself: run the command without torchrun, or leave out --devices auto"
        )
    from hasten.bench.training_choices import choose_for_recipe
    from hasten.machine import configure
    from hasten.training.recipe import flat
    from hasten.training.session import check_asked

    recipe, begun = command.recipe, _begun(command)
    check_asked(recipe, command.resume)
    lasting = {name: value for name, value in begun.items() if name not in given and value != flat(recipe)[name]}
    for name, value in lasting.items():
        recipe = _having(recipe, name, value)
    configure(threads=recipe.run.threads)
    ways = choose_for_recipe(recipe, kept={*given, *begun}, processes=command.processes)
    way = ways.best
    words = [word for name, value in lasting.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += " ".join(way.changes).split()
    rows = next(option for option in way.kept if option.startswith("--data.batch-size "))
    words += rows.split() if rows.split()[1] != str(recipe.data.batch_size) else []
    need = f"{way.plan.memory.peak / 1e9:.1f} of {way.plan.free / 1e9:.1f} GB"
    chosen = " ".join(words) or "no option to add"
    why = f"; {ways.note}" if ways.note else ""
    seconds = f"{way.step_seconds:,.0f} s" if way.step_seconds >= 10 else f"{1e3 * way.step_seconds:,.0f} ms"
    print(f"{way.plan.device.name}: {chosen}; predicted: {need}, {seconds} a step{why}", file=sys.stderr)
    return [*_without(arguments, {"devices"}), *words]


def _begun(command: Train) -> dict[str, Any]:
    """The values of `LASTING` with which the run began that the command resumes; empty for a new run."""
    from hasten.training.checkpoint_state import find
    from hasten.training.recipe import flat
    from hasten.training.run_folder import RunFolder

    recipe = command.recipe
    folder = RunFolder(path=Path(recipe.run.folder).expanduser() / recipe.name)
    stored = None if command.resume == "never" else find(folder.last) or find(folder.best)
    if stored is None:
        return {}
    values = flat(stored.recipe)
    asked = recipe.techniques.precision == "auto" and values["parallel.policy"] == "float32-weights"
    return {name: values[name] for name in LASTING if name != "techniques.precision" or not asked}


def _having(recipe: Any, path: str, value: Any) -> Any:
    """The recipe with another value of a field, by its dotted name."""
    section, _, name = path.partition(".")
    return replace(recipe, **{section: replace(getattr(recipe, section), **{name: value})})


def _without(arguments: list[str], names: Container[str]) -> list[str]:
    """The arguments without these options, each of which takes a value."""
    found, skip = [], False
    for word in arguments:
        option, equals, _ = word.partition("=")
        asked = option.startswith("--") and option[2:].replace("-", "_") in names
        if not asked and not skip:
            found.append(word)
        skip = asked and not equals
    return found


def _options(command: Serve) -> PlanOptions:
    """The server's use as a plan's options; a quarter of the longest text is the answer."""
    from hasten.bench.plan import PlanOptions, config_of
    from hasten.training.recipe import Techniques

    _, config, *_ = config_of(command.model)
    length = command.engine.max_length or 1024
    new, length = length // 4, min(length, config.max_positions)
    return PlanOptions(
        use="serve",
        device=command.device,
        **{"goal": "latency"} | same_fields(command, Wanted),
        length=length,
        new_tokens=min(new, length - 1),
        weights="auto" if command.quantize == "none" else command.quantize,
        kv_cache_dtype=command.engine.kv_cache_dtype,
        tensor_parallel=command.tensor_parallel,
        techniques=Techniques(compile=False, precision=command.dtype),
    )
