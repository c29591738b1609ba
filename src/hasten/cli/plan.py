"""`hasten plan MODEL`: predict memory and speed of a model before anything is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from hasten.bench.plan import PlanOptions, make_plan
from hasten.bench.training_choices import Ways
from hasten.cli.options import JsonOption
from hasten.errors import ConfigError, HastenError
from hasten.machine.files import require_writable
from hasten.planning.choices import Choices
from hasten.planning.devices import ONE_SOCKET
from hasten.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanCommand(JsonOption, PlanOptions):
    """Predict the memory and time of training, generating or serving a model, here or on a known device."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder, a hub id, a named shape (llama-7b, gpt2-124m, …) or a config.json alone."""
    picture: str | None = None
    """Draw the bytes of each moment as stacked bars into this PNG."""

    def run(self) -> None:
        require_writable(self.picture)
        if self.goal is not None or self.gpus is not None:
            self._choose()
            return
        plan = make_plan(self.model, self)
        title = f"{plan.model}, {self.use}, {plan.use.dtype}, on {plan.device.name}"
        if self.picture is not None:
            from hasten.measure.draw import draw_memory

            draw_memory(plan.memory, self.picture, title=title, free=plan.free)
        if not self.write(plan.to_json()):
            return
        from rich.console import Console
        from rich.table import Table

        console, shown = Console(highlight=False), Table(box=None, show_header=False, pad_edge=False)
        for line in lines(plan):
            shown.add_row(*line)
        console.print(f"{title}\n", style="bold")
        console.print(shown)
        if plan.memory.peak > plan.free:
            console.print(f"\nit does not fit: {self._what_helps()}", style="red")

    def _what_helps(self) -> str:
        """What makes a plan fit that does not."""
        if not self.training:
            return "docs/planning.md says what helps"
        from hasten.bench.training_choices import choose_training

        try:
            asked = replace(self, goal="throughput", gpus=self.ranks, ranks=1, token_ms=None, price=None)
            way = choose_training(self.model, asked).best
        except HastenError as error:
            return str(error)
        peak, free = way.plan.memory.peak / 1e9, way.plan.free / 1e9
        return f"the fastest way that does is {way.options} ({peak:,.1f} of {free:,.1f} GB)"

    def _choose(self) -> None:
        """Show how to run it best on several devices."""
        if self.picture is not None:
            raise ConfigError("--picture draws one plan; leave --goal and --gpus out, or --picture")
        from hasten.bench.choices import choose_plan
        from hasten.bench.training_choices import choose_training

        if self.training:
            ways = choose_training(self.model, self)
            if self.write(ways.to_json()):
                show_ways(ways)
            return

        found = choose_plan(self.model, self)
        if self.write(found.to_json()):
            show(found)


def show(choices: Choices) -> None:
    """Print the candidates as a table, with the chosen one."""
    from rich.console import Console
    from rich.table import Table

    console, best, price = Console(highlight=False), choices.best, choices.wanted.price
    console.width = max(console.width, 140)  # wrapped lines are easier to read than wrapped cells
    table = Table(box=None, pad_edge=False)
    names = ["ranks", "replicas", "weights", "batch", "GB a rank", "cache, GB", "prompt, ms", "token, ms", "tokens/s"]
    names += ["device-s a million", *(["a million costs"] if price is not None else []), "why not"]
    for name in names:
        table.add_column(name, justify="left" if name in ("weights", "why not") else "right")
    for one in choices.rows:
        row = one.to_json(price)
        cells = [one.use.degree, one.replicas, one.weights, one.use.batch_size]
        numbers = [row["peak_bytes"] / 1e9, row["cache_bytes"] / 1e9, 1e3 * row["prompt_seconds"]]
        numbers += [1e3 * one.token_seconds, one.tokens_per_second, one.device_seconds]
        numbers += [] if price is None else [row["price_per_million"]]
        shown = (f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in numbers)
        table.add_row(*map(str, cells), *shown, one.rejected or "taken", style="bold" if one is best else None)
    plan = best.plan
    console.print(f"{plan.model} on {plan.device.name}, for {choices.wanted.goal}\n", style="bold")
    console.print(table)
    console.print(f"\n{choices.why()}; between ranks: {plan.device.link.source}")
    if plan.device.measured and plan.device.kind == "cpu":
        console.print(ONE_SOCKET)


def show_ways(ways: Ways) -> None:
    """Print ways to train as a table, the best first, and the options of `hasten train` for it."""
    from rich.console import Console
    from rich.table import Table

    console, plan = Console(highlight=False), ways.best.plan
    console.width = max(console.width, 140)
    table = Table(box=None, pad_edge=False)
    for name in ("devices", "GB a device", "step, ms", "tokens/s", "device-s a million", "options of hasten train"):
        table.add_column(name, justify="left" if name.startswith("options") else "right")
    for one in ways.rows:
        numbers = (1e3 * one.step_seconds, one.plan.tokens_per_second, one.device_seconds)
        shown = (f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in numbers)
        size = f"{one.plan.memory.peak / 1e9:.1f}"
        table.add_row(str(one.devices), size, *shown, one.options, style="bold" if one is ways.best else None)
    console.print(
        f"training {plan.model} on {plan.device.name}, {plan.free / 1e9:.1f} GB free, for {ways.goal}\n", style="bold"
    )
    console.print(table)
    if ways.note:
        console.print(f"\n{ways.note}")
    console.print(f"\n{ways.thought_of} ways thought of; what asks for more than another and is no faster is left out")


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """A plan as text: names and values."""
    device, memory, training = plan.device, plan.memory, len(plan.phases) == 1
    for name, size in memory.parts.items():
        if size:
            yield name, f"{size / 1e9:,.3f} GB"
    yield f"peak, {memory.moment}", f"{memory.peak / 1e9:,.3f} GB of {plan.free / 1e9:,.1f} GB free"
    for phase in plan.phases:
        times, limits = (phase.seconds(device), phase.limit(device)), phase.limits(device)
        took, least = (f"{s:,.2f} s" if s >= 1 else f"{1e3 * s:,.2f} ms" for s in times)
        how = "expected" if phase.measured is None else "by measured blocks"
        bound = f"at best {least}, set by {max(limits, key=limits.__getitem__)}"
        work = f"{(phase.flops + phase.update_flops) / 1e9:,.1f} GFLOP, {phase.moved / 1e9:,.2f} GB moved"
        yield f"{phase.name} ({phase.tokens:,} tokens)", f"{took} {how}; {bound}: {work}"
    yield "speed", f"{plan.tokens_per_second:,.1f} tokens/s {'trained' if training else 'of answers'}"
    yield "largest batch that fits", f"{plan.largest_batch:,} {'rows' if training else 'sequences'}"
    yield "longest context that fits", f"{plan.longest:,} tokens"
