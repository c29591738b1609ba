"""`hasten explain`: which kernel each layer of a model runs, and why not the others; `explain attention`: one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hasten.cli.explain_attention import ExplainAttention
from hasten.cli.options import AdapterOptions, JsonOption
from hasten.cli.parsing import parse
from hasten.machine.measured import known

if TYPE_CHECKING:
    from hasten.model.binding import Binding


def explain(arguments: list[str]) -> None:
    """Parse what follows `hasten explain`, a model or "attention", and run it. (A folder of that name: ./attention.)"""
    if arguments and arguments[0] == "attention":
        parse(ExplainAttention, arguments[1:], prog="hasten explain attention").run()
        return
    note = "`hasten explain attention` explains one call of attention instead of a model."
    parse(ExplainModel, arguments, prog="hasten explain", description=f"{ExplainModel.__doc__} {note}").run()


@dataclass(frozen=True, kw_only=True)
class ExplainModel(JsonOption, AdapterOptions):
    """List the kernel that each operator of a model runs here, and for every other kernel the reason against it."""

    json: str | None = None
    """Write {"precision": {dtype, reason}, "operators": [{layer, operator, kernel, others: [{kernel, reason}]}],
    "uncaptured": why decode steps are no CUDA graphs in serving, or null, "measured": {comparison: {name: seconds}}} to
    this file; "-": to stdout."""

    def run(self) -> None:
        from hasten.engine.runner import capture_refusal
        from hasten.model.binding import explain
        from hasten.model.wide import precision_of

        model = self.load()
        bindings, precision, uncaptured = explain(model), precision_of(model), capture_refusal(model)
        operators = [asdict(binding) for binding in bindings]
        found: dict[str, Any] = {"precision": precision.to_json(), "operators": operators}
        found |= {"uncaptured": uncaptured, "measured": known()}
        if not self.write(found):
            return
        print(f"precision: {precision}")
        print_kernels(bindings)
        how = "captured as CUDA graphs" if uncaptured is None else f"not captured: {uncaptured}"
        print(f"decode steps in serving: {how}")


def print_kernels(bindings: Iterable[Binding]) -> None:
    """Print the kernel of each layer and the reasons against the others; layers with the same answer share a line."""
    from hasten.model.binding import grouped

    for layers, binding in grouped(bindings):
        print(f"{binding.operator}, {layers}: {binding.kernel}")
        for other in binding.others:
            print(f"    not {other.kernel}: {other.reason}")
