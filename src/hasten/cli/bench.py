"""`hasten bench generate|train|heads|attention|serve`: the ladders, measured, as a table, JSON and a picture."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

from hasten.cli.bench_attention import BenchAttention
from hasten.cli.bench_serve import BenchServe
from hasten.cli.bench_train import BenchBatch, BenchRace
from hasten.cli.options import Threads, thread_count
from hasten.errors import ConfigError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """What all ladders share."""

    rungs: str = ""
    """Only these rungs, separated by commas; all by default."""
    rounds: int = 5
    """Every rung is measured once in each round; medians are taken over the rounds."""
    json: str | None = None
    """Write the report as JSON to this file; "-": to standard output, and nothing else there."""
    picture: str | None = None
    """Draw the ladder into this PNG."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    seed: int = 0
    """Decides the random weights and tokens."""

    def common(self) -> dict[str, Any]:
        """The options that every ladder takes under the same name."""
        from hasten.bench.report import require_writable

        require_writable(self.json)
        require_writable(self.picture)
        names = tuple(name.strip() for name in self.rungs.split(",") if name.strip())
        return {
            "rungs": names,
            "rounds": self.rounds,
            "device": self.device,
            "threads": thread_count(self.threads),
            "seed": self.seed,
        }

    def show(self, report: dict[str, Any], title: str) -> None:
        """Write what was asked for, and print the table to standard error."""
        from hasten.bench.report import write_json
        from hasten.bench.table import print_ladder

        if self.json is not None:
            write_json(self.json, report)
        if self.picture is not None:
            from hasten.bench.draw import draw_ladder

            draw_ladder(report, self.picture, title=title)
        print(f"{title}: {report['settings']['model']}", file=sys.stderr)
        print_ladder(report)
        if all("error" in row for row in report["rows"]):
            raise SystemExit(1)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(LadderOptions):
    """What the ladders that generate share."""

    shape: str | None = None
    """A named shape with random weights: llama-120m, llama-1.1b, gpt2-124m, qwen3-0.6b, llama-7b, llama-70b, tiny."""
    dtype: DtypeName = "auto"
    """Of the weights (auto: bfloat16); products are in it too, or in float32 where the processor only emulates it."""
    new_tokens: int = 64
    """Tokens that each sequence decodes in each round (2 at most without a cache, where each costs a whole prompt)."""


@dataclass(frozen=True, kw_only=True)
class BenchGenerate(DecodeOptions):
    """Generation: no cache, static cache, static cache + torch.compile, native steps in bf16, int8, int4; greedy."""

    model: str | None = None
    """A Hugging Face folder or hub id instead of a shape."""
    prompt_tokens: int = 512
    """The context after which every rung decodes."""
    batches: str = "1"
    """Numbers of sequences decoded at once, separated by commas: 1,8 also measures 8 rows, beside one."""
    contexts: str = ""
    """Also decode after prompts of these lengths, separated by commas, each held against the first: 16,2048."""
    text: str | None = None
    """Also report each rung's perplexity on this text (a file, folder, glob or stdlib); needs --model."""

    def run(self) -> None:
        from hasten.bench.generate import GenerateLadder
        from hasten.bench.shapes import Subject

        ladder = GenerateLadder(
            **self.common(),
            subject=Subject(shape=self.shape, folder=self.model),
            dtype=self.dtype,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            batches=_numbers("--batches", self.batches),
            contexts=_numbers("--contexts", self.contexts),
            text=self.text,
        )
        self.show(ladder.run(), "Generation ladder")


@dataclass(frozen=True, kw_only=True)
class BenchHeads(DecodeOptions):
    """Attention heads: one shape with all, grouped and one key/value head; bytes of cache per token, and speed."""

    prompt_tokens: int = 2048
    """The context after which every rung decodes."""
    eager: bool = False
    """Do not compile."""

    def run(self) -> None:
        from hasten.bench.heads import HeadsLadder
        from hasten.bench.shapes import Subject

        ladder = HeadsLadder(
            **self.common(),
            subject=Subject(shape=self.shape),
            dtype=self.dtype,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            compiled=not self.eager,
        )
        self.show(ladder.run(), "Attention heads")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas, such as 1,8; found {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class BenchTrain(LadderOptions):
    """Training: from explicit attention in float32, one technique after the other; at the end what saves memory."""

    shape: str | None = None
    """A named shape: gpt2-124m, llama-120m, …; the batch is 4 x 256 unless said otherwise."""
    recipe: str | None = None
    """The model and batch of a recipe instead: demo, gpt2-124m, llama-120m, shakespeare-char."""
    batch_size: int | None = None
    """Rows in a batch (B)."""
    sequence_length: int | None = None
    """Tokens in a row (T)."""
    steps: int = 2
    """Optimizer steps measured in each round."""

    def run(self) -> None:
        from hasten.bench.train import TrainLadder

        ladder = TrainLadder(
            **self.common(),
            shape=self.shape,
            recipe=self.recipe,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            steps=self.steps,
        )
        self.show(ladder.run(), "Training ladder")


LADDERS = {
    "generate": BenchGenerate,
    "train": BenchTrain,
    "race": BenchRace,
    "batch": BenchBatch,
    "heads": BenchHeads,
    "attention": BenchAttention,
    "serve": BenchServe,
}


class Bench:
    """Dispatches to one of the ladders."""

    @staticmethod
    def main(arguments: list[str]) -> None:
        """Parse what follows `hasten bench` and run it."""
        if not arguments or arguments[0] in ("-h", "--help"):
            lines = [f"  {name:<10} {kind.__doc__}" for name, kind in LADDERS.items()]
            print("\n".join(["usage: hasten bench LADDER [options]      (LADDER --help for its options)", "", *lines]))
            return
        name = arguments[0]
        if name not in LADDERS:
            raise ConfigError(f"there is no ladder {name!r}; known: {', '.join(LADDERS)}")
        import tyro

        tyro.cli(LADDERS[name], args=arguments[1:], prog=f"hasten bench {name}").run()
