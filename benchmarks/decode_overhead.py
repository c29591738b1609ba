"""What passes outside the native kernels in a decode step, and what a token costs by each way that leads to one.

    python benchmarks/decode_overhead.py FOLDER --output benchmarks/results/decode-overhead.json
    python benchmarks/decode_overhead.py                                   # a model of 1.4 M parameters, random weights

A decode step of a fused model is two native calls (all blocks; last norm and head) and what is around them: the
embedding, the rotary angles, the cache's bookkeeping, the choice of the next token. `hasten.profiling.meter` times the
calls from Python, so that handing them their arguments counts as theirs only from the operator's handle on; the rest of
the step is the overhead. Medians over the steps.

`faces`: seconds of a token in `hasten.generate`, in the steps of an `Engine` with one sequence and with 16, and in
`hasten.LLM`, whole texts in interleaved rounds; medians. With a small model most of it is Python.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from hasten.measure.timing import interleaved

LIMIT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOverhead:
    """Measure the share of a decode step that is not spent in native kernels."""

    model: Annotated[Path | None, tyro.conf.Positional] = None
    """A folder of a model that fuses (bfloat16, or quantized; dense); by default one of 1.4 M parameters is made."""

    steps: int = 200
    """Decode steps that are measured."""

    context: int = 16
    """Tokens in the cache before the first step."""

    tokens: int = 256
    """Tokens of each text whose way is timed."""

    rounds: int = 9
    """Rounds of these texts."""

    threads: int = 2
    """Threads of torch."""

    output: Path | None = None
    """Where to write the JSON; printed in any case."""

    def run(self) -> None:
        import torch

        import hasten
        from hasten.engine.given_texts import GivenTexts
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json
        from hasten.profiling.meter import Meter

        configure(threads=self.threads)
        model = hasten.fuse(small_model() if self.model is None else hasten.load(self.model, dtype="bfloat16"))
        texts = GivenTexts(model, batch=1, capacity=self.context + 20 + self.steps)
        texts.prefill([list(range(3, 3 + self.context))])
        token = torch.tensor([7])
        steps: list[dict[str, float]] = []
        with Meter(model) as meter:
            for number in range(-20, self.steps):  # those below zero warm up
                meter.restart()
                token = texts.decode(token).argmax(-1)
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
            "model": "1.4 M" if self.model is None else self.model.name,
            "threads": self.threads,
            "context": self.context,
            "steps": self.steps,
            "step_seconds": statistics.median(step["step"] for step in steps),
            "native_seconds": statistics.median(step["native"] for step in steps),
            "outside_share": share,
            "limit": LIMIT,
            "faces": self.faces(model),
        }
        print(json.dumps({k: v for k, v in result.items() if k != "machine"}))
        write_json(self.output, result)

    def faces(self, model: Any) -> dict[str, float]:
        """Seconds of a token by each way to the engine and to `generate`."""
        import hasten
        from hasten.engine.engine import Engine
        from hasten.engine.request import Request
        from hasten.engine.settings import EngineSettings

        settings = EngineSettings(max_sequences=16, max_length=self.context + self.tokens, prefix_cache=False)
        params = hasten.SamplingParams(temperature=0, max_new_tokens=self.tokens, ignore_eos=True)
        prompt = tuple(range(3, 3 + self.context))
        engine, llm = Engine(model, None, settings), hasten.LLM(model, settings)

        def steps(sequences: int) -> None:
            for number in range(sequences):
                engine.add(Request(id=f"{number}", prompt=prompt, params=params))
            while not engine.idle:
                engine.step()

        times = interleaved(
            {
                "generate": lambda: hasten.generate(model, list(prompt), params),
                "Engine.step": lambda: steps(1),
                "Engine.step, 16 sequences": lambda: steps(16),
                "LLM": lambda: llm.generate(list(prompt), params),
            },
            self.rounds,
        )
        llm.close()
        engine.close()
        return {face: statistics.median(own) / self.tokens for face, own in times.items()}


def small_model() -> Any:
    """The demo's smallest shape with random weights, in bfloat16."""
    import torch

    from hasten.model.families import read_config
    from hasten.model.initialize import initialize

    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    return initialize(read_config(config), seed=0, dtype=torch.bfloat16).eval()


if __name__ == "__main__":
    tyro.cli(DecodeOverhead).run()
