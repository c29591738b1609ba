"""What sharing does for throughput: samples and beams of one request beside as many requests of their own.

    python benchmarks/sharing_speed.py --output benchmarks/results/sharing-speed.json
    python benchmarks/sharing_speed.py --llama-python PYTHON …    # llama.cpp's parallel sampling beside it

The real engine over a cache of fixed size, a queue that is never empty until the end, random weights. For n samples of
each prompt, tokens of answers a second of four ways, in turns:

- samples: one request, n samples; they share the prompt's blocks, and copy on write what they change.
- cached: n requests of the same prompt, the prefix cache on.
- alone: the same without a prefix cache.
- beams: one request, n beams.
- beams by requests: every token of every beam a request of its own over the prefix cache, which gives the likeliest
  tokens to choose from: how beam search is made where an engine knows nothing of it.

llama.cpp (`peers/parallel_llama_cpp.py`): n sequences of one prompt, whose cells they share, and n prompts of their
own; as many prompts at a time as the same cache holds.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro

PEER = Path(__file__).parent / "peers" / "parallel_llama_cpp.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSpeed:
    """Measure, print and write."""

    shape: str = "llama-120m"
    """A named shape."""

    samples: tuple[int, ...] = (2, 4, 6)
    """Of each prompt."""

    prompts: int = 4
    """That wait at the beginning."""

    prompt_tokens: int = 161
    """Of each: ShareGPT's mean, as in the paper."""

    new_tokens: int = 96
    """Of each sample."""

    beam_tokens: int = 24
    """Of each beam: a request for each token of each takes its time."""

    slots: int = 2560
    """Tokens that the cache holds."""

    rounds: int = 3
    """Every way once in each, after one with two samples that warms up."""

    threads: int = 2

    llama_python: Path | None = None
    """A Python that has llama-cpp-python."""

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.bench.predict import random_model
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json
        from hasten.planning.shapes import shape_config

        configure(threads=self.threads, seed=0)
        config = shape_config(self.shape)
        engines = Engines(random_model(config, "bfloat16"), self)
        ways: dict[str, Callable[[int], dict[str, float]]] = {
            "samples": engines.samples,
            "cached": engines.requests,
            "alone": engines.alone,
            "beams": engines.beams,
            "beams by requests": engines.beams_by_requests,
        }
        with tempfile.TemporaryDirectory() as folder:
            if self.llama_python is not None:
                file = self.gguf(config, Path(folder))
                ways |= {f"llama.cpp, {kind}": self.peer(file, kind) for kind in ("shared", "alone")}
            for way in ways.values():
                way(2)
            rows = []
            for n in self.samples:
                found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
                for _ in range(self.rounds):
                    for name, way in ways.items():
                        found[name].append(way(n))
                row = {name: {key: median(one[key] for one in each) for key in each[0]} for name, each in found.items()}
                speeds = {name: [one["tokens_per_second"] for one in each] for name, each in found.items()}
                pairs = (("samples", "cached"), ("samples", "alone"), ("beams", "beams by requests"))
                if self.llama_python is not None:
                    pairs += (("llama.cpp, shared", "llama.cpp, alone"), ("samples", "llama.cpp, shared"))
                ratios = {
                    f"{a} / {b}": median(x / y for x, y in zip(speeds[a], speeds[b], strict=True)) for a, b in pairs
                }
                rows.append({"samples": n, "ways": row, "ratios": ratios, "rounds": speeds})
                print(n, json.dumps(ratios), flush=True)
        settings = {name: value for name, value in asdict(self).items() if not isinstance(value, Path | None)}
        write_json(self.output, {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": rows})

    def gguf(self, config: Any, folder: Path) -> Path:
        """Random weights of the shape as llama.cpp reads them."""
        from hasten.checkpoints.gguf.write import write_gguf
        from hasten.model.initialize import initialize

        write_gguf(initialize(config, seed=0, dtype=torch.bfloat16), folder / "model.gguf", "BF16")
        return folder / "model.gguf"

    def peer(self, file: Path, kind: str) -> Callable[[int], dict[str, float]]:
        """llama.cpp in a process of its own for each measurement."""

        def measure(n: int) -> dict[str, float]:
            sizes = [n, self.prompts, self.prompt_tokens, self.new_tokens, self.slots, self.threads]
            done = subprocess.run(
                [str(self.llama_python), str(PEER), str(file), kind, *map(str, sizes)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            return dict(json.loads(done.stdout.splitlines()[-1]))

        return measure


class Engines:
    """The ways, over a cache of the same size."""

    def __init__(self, model: Any, options: SharingSpeed) -> None:
        self.model, self.options = model, options
        generator = torch.Generator().manual_seed(0)
        shape = (options.prompts, options.prompt_tokens)
        self.prompts = torch.randint(3, model.config.vocab_size, shape, generator=generator).tolist()

    def engine(self, *, prefix_cache: bool = True) -> Any:
        from hasten.engine.cache import row_format
        from hasten.engine.engine import Engine
        from hasten.engine.settings import EngineSettings
        from hasten.planning.cost import kv_bytes_per_token

        config = self.model.config
        row = row_format("auto").bytes(config.head_dim, torch.bfloat16)
        size = int(self.options.slots * kv_bytes_per_token(config, row / config.head_dim))
        most = self.options.prompt_tokens + max(self.options.new_tokens, self.options.beam_tokens)
        return Engine(self.model, None, EngineSettings(cache_bytes=size, max_length=most, prefix_cache=prefix_cache))

    def samples(self, n: int) -> dict[str, float]:
        return self.drained(self.engine(), [self.request(i, n=n) for i in range(self.options.prompts)])

    def requests(self, n: int, *, prefix_cache: bool = True) -> dict[str, float]:
        made = [self.request(i, copy) for i in range(self.options.prompts) for copy in range(n)]
        return self.drained(self.engine(prefix_cache=prefix_cache), made)

    def alone(self, n: int) -> dict[str, float]:
        return self.requests(n, prefix_cache=False)

    def beams(self, n: int) -> dict[str, float]:
        made = [self.request(i, beam_width=n, n=n) for i in range(self.options.prompts)]
        return self.drained(self.engine(), made)

    def request(self, prompt: int, copy: int = 0, **options: int) -> Any:
        from hasten.engine.params import SamplingParams
        from hasten.engine.request import Request

        beams = "beam_width" in options
        params = SamplingParams(
            temperature=0.0 if beams else 0.8,
            seed=None if beams else 100 * prompt + copy,
            max_new_tokens=self.options.beam_tokens if beams else self.options.new_tokens,
            ignore_eos=True,
        )
        return Request(id=f"{prompt}-{copy}", prompt=tuple(self.prompts[prompt]), params=params, **options)

    def drained(self, engine: Any, requests: list[Any]) -> dict[str, float]:
        """All of them answered."""
        for request in requests:
            engine.add(request)
        start, most, running = time.perf_counter(), 0, 0
        while not engine.idle:
            engine.step()
            stats = engine.stats()
            most, running = max(most, stats.used_blocks), max(running, stats.running)
        return self.counted(engine, time.perf_counter() - start, most, running)

    def counted(self, engine: Any, seconds: float, most: int, running: int) -> dict[str, float]:
        stats = engine.stats()
        engine.close()
        return {
            "tokens_per_second": stats.generated_tokens / seconds,
            "computed_tokens": stats.computed_tokens,
            "most_blocks": most,
            "most_sequences": running,
            "preemptions": stats.preemptions,
        }

    def beams_by_requests(self, n: int) -> dict[str, float]:
        """Beam search by its caller: a request for the next token of each beam, the likeliest of all go on."""
        from hasten.engine.params import SamplingParams
        from hasten.engine.request import Request

        engine, params = self.engine(), SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        beams = {i: [(0.0, tuple(prompt))] for i, prompt in enumerate(self.prompts)}
        start, most, running = time.perf_counter(), 0, 0
        for _ in range(self.options.beam_tokens):
            asked = {f"{i}-{b}": (i, beam) for i, own in beams.items() for b, beam in enumerate(own)}
            for name, (_, (_, text)) in asked.items():
                engine.add(Request(id=name, prompt=text, params=params, logprobs=n))
            found: dict[int, list[tuple[float, tuple[int, ...]]]] = {i: [] for i in beams}
            while not engine.idle:
                for output in engine.step():
                    i, (score, text) = asked[output.request_id]
                    for token in output.logprobs or ():
                        found[i] += [(score + one.logprob, (*text, one.token)) for one in token.top]
                stats = engine.stats()
                most, running = max(most, stats.used_blocks), max(running, stats.running)
            beams = {i: sorted(own, reverse=True)[:n] for i, own in found.items()}
        counted = self.counted(engine, seconds := time.perf_counter() - start, most, running)
        # The first step has one beam of each prompt; all that is told is the tokens of the beams.
        return counted | {"tokens_per_second": self.options.prompts * n * self.options.beam_tokens / seconds}


if __name__ == "__main__":
    tyro.cli(SharingSpeed).run()
