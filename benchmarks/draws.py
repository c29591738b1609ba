"""What drawing tokens costs: rows of logits to tokens at temperature 0.8, natively and by PyTorch's operators.

    python benchmarks/draws.py --output benchmarks/results/draws.json

The two take turns; medians. Logits are a normal distribution's times 3 with a few tokens above, as after a text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from timing import interleaved

FILTERS: dict[str, dict[str, Any]] = {"none": {}, "top-p 0.95": {"top_p": 0.95}, "top-k 50": {"top_k": 50}}
LIBRARIES = ("native", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Measure, print, and write."""

    rows: tuple[int, ...] = (1, 8, 32)

    vocabularies: tuple[int, ...] = (32_000, 152_000)

    rounds: int = 15
    """After one that warms up."""

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(self.threads)
        calls = {
            (vocabulary, name, rows, library): self.call(vocabulary, filters, rows, library)
            for vocabulary in self.vocabularies
            for name, filters in FILTERS.items()
            for rows in self.rows
            for library in LIBRARIES
        }
        times = interleaved(calls, self.rounds)
        found = []
        for (vocabulary, name, rows, library), own in times.items():
            if library == "native":
                other = times[vocabulary, name, rows, "none"]
                ratio = median(b / a for a, b in zip(own, other, strict=True))
                found.append({"vocabulary": vocabulary, "filter": name, "rows": rows, "seconds": median(own)})
                found[-1] |= {"pytorch_seconds": median(other), "ratio": ratio}
                print(*(f"{value:.2e}" if isinstance(value, float) else value for value in found[-1].values()))
        report = {"schema": 1, "machine": describe().to_json(), "threads": self.threads, "rounds": self.rounds}
        write_json(self.output, report | {"rows": found})

    def call(self, vocabulary: int, filters: dict[str, Any], rows: int, library: str) -> Callable[[], object]:
        """Draws with other noise in each call."""
        import torch

        from hasten.engine.params import SamplingParams
        from hasten.engine.sampling import RowParams, next_tokens
        from hasten.ops import draw

        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(rows, vocabulary, generator=generator) * 3
        logits[:, :20] += torch.linspace(16, 8, 20)
        params = RowParams.stack([SamplingParams(temperature=0.8, seed=1, **filters)] * rows, vocab_size=vocabulary)
        steps, native = torch.arange(rows), draw.operator.library

        def call() -> None:
            draw.operator.library = native if library == "native" else lambda: None
            steps.add_(rows)
            next_tokens(logits, params, steps=steps)
            draw.operator.library = native

        return call


if __name__ == "__main__":
    tyro.cli(Draws).run()
