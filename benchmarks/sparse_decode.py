"""What a token costs with a sparse pattern, after so many tokens, beside dense attention.

    python benchmarks/sparse_decode.py --output benchmarks/results/sparse-decode.json

The fused steps of one model shape whose attention is large: its time without attention is told by a step after 64
tokens. Every pattern takes turns in every round.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from timing import interleaved

PATTERNS = {
    "dense": None,
    "Local, radius 1": "local:block=64,radius=1",
    "Atrous, every 4th block of 64": "atrous:block=64,stride=4",
    "Atrous, every 4th position": "atrous:block=1,stride=4",
    "Atrous, every 16th position": "atrous:block=1,stride=16",
}
SHORT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseDecode:
    """Measure, print and write."""

    tokens: int = 8192
    """That the cache holds."""

    layers: int = 8
    hidden_size: int = 512
    heads: int = 8
    rounds: int = 40
    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(self.threads)
        calls = {}
        for name, text in PATTERNS.items():
            decoder = self.decoder(text)
            calls |= {(name, at): partial(step, decoder, at) for at in (SHORT, self.tokens)}
        with torch.inference_mode():
            times = interleaved(calls, self.rounds)
        dense = [whole - short for whole, short in zip(times["dense", self.tokens], times["dense", SHORT], strict=True)]
        rows = []
        for name in PATTERNS:
            own = [whole - short for whole, short in zip(times[name, self.tokens], times[name, SHORT], strict=True)]
            row: dict[str, Any] = {"name": name, "step_seconds": median(times[name, self.tokens])}
            row |= {"attention_seconds": median(own), "of_dense": median(own) / median(dense)}
            print(row, flush=True)
            rows.append(row)
        settings = {"tokens": self.tokens, "layers": self.layers, "hidden_size": self.hidden_size, "heads": self.heads}
        settings |= {"dtype": "bfloat16", "threads": self.threads, "rounds": self.rounds}
        if self.output is not None:
            result = {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": rows}
            write_json(self.output, result)

    def decoder(self, pattern: str | None) -> Any:
        """Of a model with the pattern."""
        import torch

        from hasten.engine.given_texts import GivenTexts
        from hasten.model.families import read_config
        from hasten.model.fused import fuse_where_it_fits, is_fused
        from hasten.model.initialize import initialize
        from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
        from hasten.planning.shapes import llama

        sizes = (self.hidden_size, 3 * self.hidden_size, self.layers, self.heads, self.heads)
        values: dict[str, Any] = llama(*sizes, max_position_embeddings=self.tokens + 64) | {"vocab_size": 1024}
        if pattern is not None:
            values["hasten"] = {"attention_pattern": pattern_values(parse_pattern(pattern))}
        model = fuse_where_it_fits(initialize(read_config(values), seed=0, dtype=torch.bfloat16).eval())
        if not is_fused(model):
            raise SystemExit("these are times of fused steps, which this machine has none of")
        return GivenTexts(model, batch=1, capacity=self.tokens + 64)


def step(decoder: Any, at: int) -> None:
    """A token after so many."""
    import torch

    decoder.suppose(at)
    decoder.decode(torch.tensor([1]))


if __name__ == "__main__":
    import tyro

    tyro.cli(SparseDecode).run()
