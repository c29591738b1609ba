"""What compiling gives a CPU: a token's time outside of all kernels, eager, compiled and native; and compiled prompts.

    python benchmarks/token_overhead.py --output benchmarks/results/token-overhead.json

`tokens`: a decode step under torch's profiler, in which the kernels are PyTorch's operators, the loops that Inductor
made and our native calls; what lies between them is Python. The profiler makes a step longer, so the share is of the
traced step, and beside it stands a step that nobody watched. `prompts`: the same prompt with eager blocks, with blocks
compiled for its length, and with blocks compiled for any length (dynamic shapes), in interleaved rounds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from timing import interleaved

KERNELS = ("aten::", "hasten", "mkl", "cpp_", "graph_")  # beginnings of the names of what computes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOverhead:
    """Measure, print, and write."""

    shapes: tuple[str, ...] = ("llama-120m", "llama-1.1b")
    """Whose tokens are measured; prompts are of the first."""

    context: int = 64
    """Tokens before the measured one."""

    prompt_tokens: int = 512

    steps: int = 30
    """Decode steps that are measured, and as many that are traced."""

    rounds: int = 9
    """Of the prompts."""

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        configure(threads=self.threads)
        tokens = [self.token(shape, way) for shape in self.shapes for way in ("eager", "compiled", "native")]
        prompts = self.prompts()
        for row in (*tokens, *prompts):
            print(*(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in row.items()))
        names = ("context", "prompt_tokens", "steps", "rounds", "threads")
        settings = {name: getattr(self, name) for name in names}
        report = {"schema": 1, "machine": describe().to_json(), "settings": settings}
        write_json(self.output, report | {"tokens": tokens, "prompts": prompts})

    def model(self, shape: str) -> Any:
        import torch

        from hasten.model.families import read_config
        from hasten.model.initialize import initialize
        from hasten.planning.shapes import SHAPES

        return initialize(read_config(SHAPES[shape]), seed=0, dtype=torch.bfloat16).eval()

    def token(self, shape: str, way: str) -> dict[str, Any]:
        """Seconds of a decode step, and the share of a traced one that lies outside of all kernels."""
        import torch
        from torch._inductor import config as inductor
        from torch.profiler import ProfilerActivity, profile, record_function

        import hasten
        from hasten.engine.compiled import compile_blocks
        from hasten.engine.given_texts import GivenTexts
        from hasten.profiling.trace import covered

        inductor.cpp.enable_kernel_profile = True  # its loops are named in a trace
        model = self.model(shape)
        if way == "native":
            hasten.fuse(model)
        if way == "compiled":
            compile_blocks(model)
        decoder = GivenTexts(model, batch=1, capacity=self.context + 64, compiled=way == "compiled")
        decoder.prefill([[token % model.config.vocab_size for token in range(3, 3 + self.context)]])

        def step() -> None:
            decoder.truncate(self.context)
            decoder.decode(torch.tensor([7])).argmax(-1).tolist()

        for _ in range(5):
            step()
        seconds = interleaved({"": step}, self.steps)[""]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(self.steps):
                with record_function("a step"):
                    step()
        events = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events())
        kernels = [(start, end) for start, end, name in events if name.startswith(KERNELS)]
        traced = [(start, end) for start, end, name in events if name == "a step"]
        outside = [1 - covered(kernels, *span) / (span[1] - span[0]) for span in traced]
        share = median(outside)
        return {
            "shape": shape,
            "way": way,
            "seconds": median(seconds),
            "traced_seconds": median(end - start for start, end in traced) / 1e6,
            "outside_share": share,
            "outside_seconds": median(part * (end - start) for part, (start, end) in zip(outside, traced, strict=True))
            / 1e6,
        }

    def prompts(self) -> list[dict[str, Any]]:
        """Prompts by blocks that are eager, compiled for one length, and for any."""
        import torch

        from hasten.engine.given_texts import GivenTexts

        lengths = (self.prompt_tokens, self.prompt_tokens - 37)
        calls: dict[Any, Callable[[], object]] = {}
        first: dict[Any, float] = {}
        for way, dynamic in (("eager", None), ("compiled", False), ("compiled for any length", True)):
            model = self.model(self.shapes[0])
            if way != "eager":
                for block in model.blocks:
                    block.compile(dynamic=dynamic)
            decoder = GivenTexts(model, batch=1, capacity=self.prompt_tokens)

            def call(length: int, decoder: Any = decoder) -> None:
                decoder.truncate(0)
                decoder.prefill([[token % 1000 for token in range(3, 3 + length)]]).argmax(-1).tolist()

            torch._dynamo.reset()
            for length in lengths:
                started = time.perf_counter()
                call(length)
                first[way, length] = time.perf_counter() - started
                calls[way, length] = lambda call=call, length=length: call(length)  # type: ignore[misc]
        times = interleaved(calls, self.rounds)
        found = []
        for (way, length), own in times.items():
            ratios = [a / b for a, b in zip(times["eager", length], own, strict=True)]
            row = {"way": way, "tokens": length, "first_seconds": first[way, length], "seconds": median(own)}
            found.append(row | {"ratio": median(ratios)})
        return found


if __name__ == "__main__":
    tyro.cli(TokenOverhead).run()
