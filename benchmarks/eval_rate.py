"""`hasten eval` as a share of the rate of float32 products, in rounds: the rate, the evaluation, the rate.

    benchmarks/as_avx2.sh .venv/bin/python benchmarks/eval_rate.py --output benchmarks/results/eval-rate-avx2.json

The model has the shape that a recipe trains and random float32 weights; the text is Python's own library. Counted are
the products and the attention of every token of a window, and the head of those that are scored.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import tyro


@dataclass(frozen=True, kw_only=True)
class EvalRate:
    """Measure it."""

    recipe: Literal["demo", "llama-120m"] = "demo"
    """Whose model."""
    bytes: int = 200_000
    """Of the text."""
    rounds: int = 7
    threads: int = 2
    output: Path | None = None
    """Write the JSON here."""

    def run(self) -> None:
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        configure(threads=self.threads)
        with tempfile.TemporaryDirectory(prefix="hasten-eval-") as folder:
            measured = [self.round(Path(folder), number) for number in range(-1, self.rounds)][1:]
        report = {
            "schema": 1,
            "machine": describe().to_json(),
            "what": f"hasten eval of {self.bytes:,} bytes, the shape of {self.recipe}, random float32 weights",
            "threads": self.threads,
            "median": {name: median(one[name] for one in measured) for name in measured[0]},
            "rounds": measured,
        }
        write_json("-", report)
        write_json(self.output, report)

    def round(self, folder: Path, number: int) -> dict[str, Any]:
        """Round -1 makes the model and is not counted: it compiles."""
        from hasten.machine import matrix_rate

        if number < 0:
            make_model(self.recipe, folder / "model")
        work = flops_of(folder / "model", self.bytes)
        rates = [matrix_rate(torch.float32)]
        options = ["--text", "stdlib", "--limit-bytes", str(self.bytes), "--threads", str(self.threads), "--json"]
        command = [sys.executable, "-m", "hasten", "eval", str(folder / "model"), *options, str(folder / "found.json")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = json.loads((folder / "found.json").read_text())
        rates.append(matrix_rate(torch.float32))
        speed, rate = work / found["seconds"], sum(rates) / 2
        share = speed / rate
        print(f"round {number + 1}: {rate / 1e9:.0f} GFLOP/s, share {share:.0%}", file=sys.stderr, flush=True)
        return {
            "tokens_per_second": found["tokens"] / found["seconds"],
            "rate": rate,
            "flops_per_second": speed,
            "share_of_rate": share,
        }


def flops_of(model_folder: Path, size: int) -> float:
    """FLOPs of evaluating so many bytes with the default context and stride, window by window."""
    from hasten.checkpoints.load import load
    from hasten.data import read_documents
    from hasten.evaluation.perplexity import windows
    from hasten.planning.cost import forward_flops_per_token

    model, flops = load(model_folder), 0.0
    assert model.tokenizer is not None
    context = model.config.max_positions
    for document in read_documents("stdlib", limit_bytes=size):
        assert isinstance(document, str)
        tokens = torch.tensor(model.tokenizer.encode(document))
        for window in windows(tokens, context=context, stride=context // 2):
            count = len(window.tokens) - 1
            scored = len(window.tokens) - window.first
            flops += count * forward_flops_per_token(model.config, count, scored=scored)
    return flops


def make_model(recipe: str, folder: Path) -> None:
    """A folder with the recipe's model, untrained, and its tokenizer."""
    from hasten.checkpoints.export import save
    from hasten.data import prepare
    from hasten.model.initialize import initialize
    from hasten.training import RECIPES, build

    chosen = RECIPES[recipe]
    data = prepare("stdlib", vocab_size=chosen.data.vocab_size, limit_bytes=2_000_000, progress=False)
    vocab = data.tokenizer.vocab_size
    config = build.shape_config(chosen.model, vocab_size=vocab, positions=chosen.data.context)
    model = initialize(config, seed=0)
    model.tokenizer = data.tokenizer
    save(model, folder)


if __name__ == "__main__":
    tyro.cli(EvalRate).run()
