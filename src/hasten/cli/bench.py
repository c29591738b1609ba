"""`hasten bench LADDER`: a benchmark, as a table, JSON and a picture. Its options are the benchmark's own fields."""

import os
from typing import Any

from hasten.bench.attention import AttentionGrowth
from hasten.bench.generate import GenerateLadder
from hasten.bench.heads import HeadsLadder
from hasten.bench.largest_batch import LargestBatch
from hasten.bench.race import Race
from hasten.bench.train import TrainLadder
from hasten.cli.bench_serve import ServeBenchmark
from hasten.cli.parsing import parse, with_model_option
from hasten.distributed import launched
from hasten.errors import ConfigError
from hasten.machine.files import require_writable, write_json

LADDERS: dict[str, Any] = {
    "generate": GenerateLadder,
    "train": TrainLadder,
    "race": Race,
    "batch": LargestBatch,
    "heads": HeadsLadder,
    "attention": AttentionGrowth,
    "serve": ServeBenchmark,
}


def bench(arguments: list[str]) -> None:
    """Parse what follows `hasten bench` and run that ladder."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<10} {kind.__doc__}" for name, kind in LADDERS.items()]
        usage = "usage: hasten bench LADDER [options]      (LADDER --help for its options)"
        print("\n".join([usage, "       hasten bench generate|serve MODEL [options]", "", *lines]))
        return
    name = arguments[0]
    if name not in LADDERS:
        raise ConfigError(f"there is no ladder {name!r}; known: {', '.join(LADDERS)}")

    if launched():  # the first one measures, in ranks that it starts itself
        option = {"generate": "--tensor-parallel", "train": "--processes"}.get(name)
        if option is None:
            raise ConfigError(
                f"torchrun has started this; only the ladders generate and train measure ranks, not {name}"
            )
        if os.environ.get("LOCAL_WORLD_SIZE", size := os.environ["WORLD_SIZE"]) != size:
            raise ConfigError(f"torchrun has started {size} processes on several machines; a ladder measures one")
        if os.environ["RANK"] != "0":
            return
        arguments = [*arguments, option, size]
        # torchrun's one thread is for its ranks; rungs of one process take all cores.
        if os.environ.get("OMP_NUM_THREADS") == "1":
            del os.environ["OMP_NUM_THREADS"]
    kind, options, may_follow = LADDERS[name], arguments[1:], ""
    if name in ("generate", "serve"):
        options, may_follow = with_model_option(options, kind), "MODEL"
    run(parse(kind, options, prog=f"hasten bench {name}", description=kind.__doc__, may_follow=may_follow))


def run(benchmark: Any) -> None:
    """Measure, and leave the report where it is wanted. Exit status 1 where nothing could be measured."""
    pictures = () if benchmark.picture is None else benchmark.pictures(benchmark.picture)
    for path in (benchmark.json, *pictures):
        require_writable(path)
    report = benchmark.run()
    write_json(benchmark.json, report)
    if pictures:
        benchmark.draw(report, *pictures)
    if not benchmark.show(report):
        raise SystemExit(1)
