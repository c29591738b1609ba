"""Which share of a decode step passes outside the native kernels: Python, and PyTorch's small operators.

    python benchmarks/decode_overhead.py FOLDER --output benchmarks/results/decode-overhead.json

A decode step of a fused model is two native calls (all blocks; last norm and head) and what is around them: the
embedding, the rotary angles, the cache's bookkeeping, the choice of the next token. `hasten.profiling.meter` times the
calls from Python, so that handing them their arguments counts as theirs only from the operator's handle on; the rest of
the step is the overhead. Medians over the steps.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

LIMIT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOverhead:
    """Measure the share of a decode step that is not spent in native kernels."""

    model: Annotated[Path, tyro.conf.Positional]
    """A folder of a model that fuses (bfloat16, or quantized; dense)."""

    steps: int = 200
    """Decode steps that are measured."""

    context: int = 16
    """Tokens in the cache before each step."""

    threads: int = 2
    """Threads of torch."""

    output: Path | None = None
    """Where to write the JSON; printed in any case."""

    def run(self) -> None:
        import torch

        import hasten
        from hasten.engine.decoder import Decoder
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json
        from hasten.profiling.meter import Meter

        configure(threads=self.threads)
        model = hasten.fuse(hasten.load(self.model, dtype="bfloat16"))
        decoder = Decoder(model, batch=1, capacity=self.context + 1)
        decoder.prefill([list(range(3, 3 + self.context))])
        token = torch.tensor([7])
        steps: list[dict[str, float]] = []
        with Meter(model) as meter:
            for number in range(-20, self.steps):  # those below zero warm up
                decoder.truncate(self.context)
                meter.restart()
                token = decoder.decode(token).argmax(-1)
                spent = {name: seconds for (name, _), seconds in meter.spent().items()}
                native = sum(
                    seconds for name, seconds in spent.items() if name.startswith(("model.blocks", "model.head"))
                )
                if number >= 0:
                    steps.append({"step": sum(spent.values()), "native": native})
        share = statistics.median(1 - step["native"] / step["step"] for step in steps)
        result: dict[str, Any] = {
            "schema": 1,
            "kind": "decode-overhead",
            "machine": describe().to_json(),
            "model": self.model.name,
            "threads": self.threads,
            "context": self.context,
            "steps": self.steps,
            "step_seconds": statistics.median(step["step"] for step in steps),
            "native_seconds": statistics.median(step["native"] for step in steps),
            "outside_share": share,
            "limit": LIMIT,
        }
        print(json.dumps({k: v for k, v in result.items() if k != "machine"}))
        write_json(self.output, result)


if __name__ == "__main__":
    tyro.cli(DecodeOverhead).run()
