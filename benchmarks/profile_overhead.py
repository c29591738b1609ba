"""What watching a step costs, and whether its parts take what other timers say.

    python benchmarks/profile_overhead.py MODEL --output benchmarks/results/profile-overhead.json

Steps with and without a `hasten.profiling.meter.Meter` by turns: a training step of a recipe, one of a model that
appends a token, and one of the engine; the ratio of both is formed in each round. Beside some parts stands a timer of
its own, which is all that looks at such a step.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOverhead:
    """Measure what watching a step costs."""

    model: Annotated[Path, tyro.conf.Positional]
    """A folder of a model, run in bfloat16 and fused where it fits."""

    recipe: str = "demo"
    """The recipe whose training step is measured, its blocks not compiled: most parts, and most to watch."""

    rounds: int = 30
    """Of training steps; ten times as many of a token, and twice as many of the engine, which reads prompts anew."""

    threads: int = 1
    """Threads of torch. One by default: where others work, two wait for each other, and that is no step's own time."""

    output: Path | None = None
    """Where to write the JSON; printed in any case."""

    def run(self) -> None:
        from dataclasses import replace

        import hasten
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json
        from hasten.model.fused import fuse_where_it_fits
        from hasten.profiling.steps import Answers, ServedAnswers, training
        from hasten.training.recipes import RECIPES
        from hasten.training.setup import set_up

        configure(threads=self.threads)
        recipe = RECIPES[self.recipe]
        techniques, run = replace(recipe.techniques, compile=False), replace(recipe.run, threads=self.threads)
        made = replace(recipe, techniques=techniques, run=run)
        setup = set_up(made, progress=False)
        batches = [setup.batches.batch(position) for position in range(recipe.data.accumulation)]
        model = fuse_where_it_fits(hasten.load(self.model, dtype="bfloat16"))
        _, decode = Answers(model, batch=1, prompt_tokens=128).works()
        _, serve = ServedAnswers(model, batch=8, prompt_tokens=128).works()
        step = setup.step
        token = [(model.stack, "run", "model.blocks", "forward"), (model.stack, "scores", "model.head", "forward")]
        block = setup.model.blocks[0]
        learning = [
            (block.attention, "forward", "model.blocks.0.attention", "forward"),
            (block.mlp, "forward", "model.blocks.0.mlp", "forward"),
            (setup.model, "forward", "model", "forward"),
            (step.precision, "backward", "model", "backward"),
            (step, "update", "update", "forward"),
        ]
        rows = []
        for name, work, timers, times in (
            ("training", training(setup, batches), learning, 1),
            ("decode", decode, token, 10),
            ("serve, 8 requests", serve, token, 2),
        ):
            owned = [timer for timer in timers if timer[0] is not None]
            rows.append({"step": name} | measured(work, owned, times * self.rounds))
            print(rows[-1], flush=True)
        machine = describe().to_json()
        write_json(
            self.output,
            {"schema": 1, "recipe": self.recipe, "machine": machine, "threads": self.threads, "profile_overhead": rows},
        )


Timer = tuple[Any, str, str, str]  # the owner of a method, its name, and the part and the phase that it is


def measured(work: Any, timers: list[Timer], rounds: int) -> dict[str, Any]:
    """A step without and with a meter, and parts beside their timers."""
    from hasten.profiling.meter import Meter

    meter = Meter(work.model, work.calls)
    plain, seen = list[float](), list[float]()
    watched: dict[tuple[str, str], list[float]] = {(part, phase): [] for _, _, part, phase in timers}
    timed: dict[tuple[str, str], list[float]] = {part: [] for part in watched}
    for number in range(-5, rounds):
        work.prepare()
        start = time.perf_counter()
        work.step()
        alone = time.perf_counter() - start
        with meter:
            work.prepare()
            meter.restart()
            start = time.perf_counter()
            work.step()
            observed = time.perf_counter() - start
            spent = meter.spent()
        work.prepare()
        seconds = step_with_timers(work, timers)
        if number < 0:  # warms up
            continue
        plain.append(alone)
        seen.append(observed)
        for part, phase in watched:
            inside = [s for (name, own), s in spent.items() if f"{name}.".startswith(f"{part}.") and own == phase]
            watched[part, phase].append(sum(inside))
            timed[part, phase].append(seconds[part, phase])
    # The fastest of each: where others work, a median is theirs as well.
    parts = {
        part if phase == "forward" else f"{part}, {phase}": {"watched": min(own), "timed": min(timed[part, phase])}
        for (part, phase), own in watched.items()
    }
    return {
        "rounds": rounds,
        "parts_watched": len(spent),
        "seconds": statistics.median(plain),
        "overhead": statistics.median(one / other for one, other in zip(seen, plain, strict=True)) - 1,
        "overhead_of_the_fastest": min(seen) / min(plain) - 1,
        "parts": parts,
    }


def step_with_timers(work: Any, timers: list[Timer]) -> dict[tuple[str, str], float]:
    """Take a step; the seconds inside these methods, by the part and phase that each is."""
    seconds = {(part, phase): 0.0 for _, _, part, phase in timers}

    def put(owner: Any, name: str, *part: str) -> None:
        call = getattr(owner, name)

        def timed(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            made = call(*given, **options)
            seconds[part[0], part[1]] += time.perf_counter() - start
            return made

        setattr(owner, name, timed)

    for timer in timers:
        put(*timer)
    work.step()
    for owner, name, *_ in timers:
        delattr(owner, name)
    return seconds


if __name__ == "__main__":
    tyro.cli(ProfileOverhead).run()
