"""What several rows of one sequence cost beside one, as when drafts are checked: whole steps of the 1.1 B Llama shape.

    python benchmarks/rows.py --output benchmarks/results/rows.json
    benchmarks/as_avx2.sh python benchmarks/rows.py --output benchmarks/results/rows-avx2.json

The bound of R rows is the larger of one row's time and the operations of R rows (two for each weight) over the rate of
PyTorch's product of 512 rows. `of_bound_with_attention` counts attention's operations too, in the dtype that it has:
four for each key of a head and element of it. All are measured in turn; ratios are formed within a round, and the
median counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from timing import interleaved

FORMATS = ("bf16", "int8", "int4 g128", "int4 g32")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Measure, print, and write."""

    shape: str = "llama-1.1b"

    layers: int = 22
    """Of the shape."""

    context: int = 544
    """Tokens of the sequence before the rows."""

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)

    formats: tuple[str, ...] = FORMATS

    rounds: int = 15
    """After one that warms up."""

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json
        from hasten.ops.native import choose_isa

        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            found = self.measure()
        for row in found:
            print(
                f"{row['format']:>9}, {row['rows']} rows: {row['seconds'] * 1e3:.2f} ms, {row['of_one_row']:.2f} of "
                f"one row, bound {row['bound_of_one_row']:.2f}, {row['of_bound']:.2f} of it"
            )
        names = ("shape", "layers", "context", "rounds", "threads")
        settings = {name: getattr(self, name) for name in names}
        report = {"schema": 1, "machine": describe().to_json(), "isa": choose_isa(), "settings": settings}
        write_json(self.output, report | {"rows": found})

    def measure(self) -> list[dict[str, Any]]:
        """Every format with every number of rows."""
        from hasten.machine.measure import product
        from hasten.machine.precision import emulated

        plain = "bfloat16" if emulated("bfloat16", "cpu") is None else "float32"
        dtypes = {name: plain if name == "bf16" else "int8" for name in self.formats}
        calls: dict[Any, Callable[[], object]] = {}
        for name in self.formats:
            weights, seen, steps = self.steps(name)
            calls |= {(name, rows): step for rows, step in steps.items()}
        size = (512, 5632, 2048)
        calls |= {dtype: product(dtype, *size, "cpu") for dtype in {plain, *dtypes.values()}}
        times = interleaved(calls, self.rounds)
        found = []
        for name in self.formats:
            own, attention = (
                [seconds / (2 * size[0] * size[1] * size[2]) for seconds in times[dtype]]
                for dtype in (dtypes[name], plain)
            )
            for rows in self.rows:
                ones = times[name, 1]
                each = list(zip(ones, own, attention, strict=True))
                bounds = [max(1.0, 2 * rows * weights * o / s) for s, o, _ in each]
                both = [max(1.0, rows * (2 * weights * o + seen * a) / s) for s, o, a in each]
                ratios = [seconds / one for seconds, one in zip(times[name, rows], ones, strict=True)]
                found.append(
                    {
                        "format": name,
                        "rows": rows,
                        "seconds": median(times[name, rows]),
                        "giga_operations_per_second": 1e-9 / median(own),
                        "of_one_row": median(ratios),
                        "bound_of_one_row": median(bounds),
                        "of_bound": median(r / b for r, b in zip(ratios, bounds, strict=True)),
                        "of_bound_with_attention": median(r / b for r, b in zip(ratios, both, strict=True)),
                    }
                )
        return found

    def steps(self, name: str) -> tuple[int, int, dict[int, Callable[[], object]]]:
        """Multiplied weights of a model in this format, a row's operations of attention, and steps by their rows."""
        from hasten.planning.cost import parameters

        model = fused_shape(self.shape, name, layers=self.layers)
        config = model.config
        seen = 4 * self.context * config.heads * config.head_dim * self.layers
        return parameters(config).active, seen, steps_of(model, self.context, self.rows)


def fused_shape(shape: str, name: str, *, layers: int | None = None) -> Any:
    """A shape with random weights in one of `FORMATS`, fused where native kernels are."""
    import torch

    import hasten
    from hasten.model.families import read_config
    from hasten.model.fused import fuse_where_it_fits
    from hasten.model.initialize import initialize
    from hasten.planning.shapes import SHAPES

    config = read_config(SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers}))
    model: Any = initialize(config, seed=0, dtype=torch.bfloat16).eval()
    if name != "bf16":
        scheme = hasten.Int8() if name == "int8" else hasten.Int4(group_size=int(name.removeprefix("int4 g")))
        hasten.quantize(model, scheme)
    return fuse_where_it_fits(model)


def steps_of(model: Any, context: int, counts: Sequence[int]) -> dict[int, Callable[[], object]]:
    """Steps of so many rows of one sequence, after so many tokens."""
    from hasten.engine.given_texts import GivenTexts

    decoder = GivenTexts(model, batch=1, capacity=context + max(counts))
    decoder.prefill([[token % model.config.vocab_size for token in range(3, 3 + context)]])

    def step(rows: int) -> Callable[[], object]:
        def call() -> None:
            decoder.truncate(context)
            decoder.verify([list(range(5, 5 + rows))])

        return call

    return {rows: step(rows) for rows in counts}


if __name__ == "__main__":
    tyro.cli(RowCosts).run()
