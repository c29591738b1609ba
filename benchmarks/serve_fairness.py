"""How long running texts pause while a long prompt is read: the longest time between two tokens of any of them.

    python benchmarks/serve_fairness.py --output benchmarks/results/serve-fairness.json

`streams` texts are written; after some steps a prompt of `prompt` tokens arrives. A pause is the time between two
tokens of one text, so the time of a step: every step gives every text a token, which is asserted. Budgets are measured
in turn, `rounds` times, and the median counts; the last budget reads the whole prompt in one step, which is what an
engine without chunks does.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Measure, print, and write."""

    shape: str = "llama-120m"

    prompt: int = 1536
    """Tokens of the prompt that arrives."""

    streams: int = 4
    """Texts that are written meanwhile."""

    budgets: tuple[int, ...] = (64, 256, 512, 2048)
    """Tokens of a step."""

    before: int = 20
    """Steps before the prompt arrives, for comparison."""

    rounds: int = 5

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        import torch

        import hasten
        from hasten.machine import describe
        from hasten.machine.files import write_json
        from hasten.model.families import read_config
        from hasten.model.initialize import initialize
        from hasten.planning.shapes import SHAPES

        torch.set_num_threads(self.threads)
        model = hasten.fuse(initialize(read_config(SHAPES[self.shape]), seed=0, dtype=torch.bfloat16).eval())
        self.measure(model, self.budgets[-1], seed=0)  # what is slow the first time
        found: dict[int, list[dict[str, float]]] = {budget: [] for budget in self.budgets}
        for number in range(self.rounds):
            for budget in self.budgets:
                found[budget].append(self.measure(model, budget, seed=number + 1))
        rows: list[dict[str, Any]] = [
            {"budget": budget, **{name: median(one[name] for one in runs) for name in runs[0]}, "rounds": runs}
            for budget, runs in found.items()
        ]
        print(f"| tokens a step | a token before | longest pause while {self.prompt} tokens are read | read after |")
        print("|---|---|---|---|")
        for row in rows:
            times = " | ".join(f"{row[name] * 1e3:.0f} ms" for name in ("token", "pause", "first_token"))
            print(f"| {row['budget']} | {times} |")
        if self.output:
            names = ("shape", "prompt", "streams", "budgets", "before", "rounds", "threads")
            workload = {name: getattr(self, name) for name in names} | {"dtype": "bfloat16"}
            machine = describe().to_json()
            write_json(
                self.output,
                {"schema": 1, "kind": "serve-fairness", "machine": machine, "workload": workload, "rows": rows},
            )

    def measure(self, model: Any, budget: int, *, seed: int) -> dict[str, float]:
        """Seconds: token (the median step before), pause (the longest one meanwhile), first_token (of the prompt)."""
        import random

        from hasten.engine.engine import Engine
        from hasten.engine.params import SamplingParams
        from hasten.engine.request import Request
        from hasten.engine.settings import EngineSettings

        draw = random.Random(seed)
        engine = Engine(
            model, None, EngineSettings(max_sequences=self.streams + 1, token_budget=budget, prefix_cache=False)
        )

        def ask(name: str, count: int, answer: int) -> None:
            prompt = tuple(draw.randrange(model.config.vocab_size) for _ in range(count))
            params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=answer)
            engine.add(Request(id=name, prompt=prompt, params=params))

        names = {f"text-{i}" for i in range(self.streams)}
        for name in sorted(names):
            ask(name, 8, model.config.max_positions - 16)

        def step() -> tuple[float, set[str]]:
            start = time.perf_counter()
            pieces = engine.step()
            return time.perf_counter() - start, {piece.request_id for piece in pieces if piece.tokens}

        while step()[1] != names:
            pass
        before = [step()[0] for _ in range(self.before)]
        ask("prompt", self.prompt, 1)
        pauses: list[float] = []
        told: set[str] = set()
        while "prompt" not in told:
            seconds, told = step()
            assert names <= told, "a text got no token in a step"
            pauses.append(seconds)
        engine.close()
        return {"token": median(before), "pause": max(pauses), "first_token": sum(pauses)}


if __name__ == "__main__":
    tyro.cli(Fairness).run()
