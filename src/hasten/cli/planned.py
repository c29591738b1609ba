"""`hasten serve --devices auto`: choose the ranks and the precision of a server by a plan."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hasten.cli.options import same_fields
from hasten.distributed import launched
from hasten.errors import ConfigError
from hasten.planning.choices import Wanted

if TYPE_CHECKING:
    from hasten.bench.plan import PlanOptions
    from hasten.cli.serve import Serve

WANTED = {field.name: field.default for field in fields(Wanted)}


def by_plan(command: Any, arguments: list[str]) -> tuple[Any, list[str]]:
    """The command with the plan's choices, and the arguments with which another process parses the same."""
    if command.devices == "given":
        return command, arguments
    if launched():
        raise ConfigError("--devices auto starts ranks by itself; leave torchrun away, or --devices auto")
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
        line = " ".join(["hasten", "serve", command.model, "--replicas", str(best.replicas), "--quantize", quantize])
        others = f"all of them: {line}" if best.use.degree == 1 else "start the others like it, on devices of their own"
        print(f"the plan has {best.replicas} replicas, and this is one of them; {others}", file=sys.stderr)
    command = replace(command, devices="given", tensor_parallel=best.use.degree, quantize=quantize, **WANTED)
    return command, [*_without(arguments, {*WANTED, "devices"}), *chosen]


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
