"""What each way of quantizing keeps of a model: bits per weight, KL divergence and perplexity on held-out files.

    python benchmarks/quantize_quality.py --model runs/code-25m/model --recipe code-25m \\
        --output benchmarks/results/quantize-quality.json

Every row is `hasten quantize` and then `hasten eval --against MODEL`, each in a process of its own. The held-out files
are those that the recipe keeps for validation; calibration text is drawn from the others.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize_perplexity import held_out

CALIBRATION_BYTES = 4_000_000
METHODS = {
    "rtn": ["--method", "rtn"],
    "awq": ["--method", "awq"],
    "gptq": ["--method", "gptq"],
    "gptaq": ["--method", "gptq", "--gptaq"],
    "sign": ["--method", "sign"],
}
SCHEMES = {
    "int4 g128": ["--scheme", "int4", "--group-size", "128"],
    "int4 g32": ["--scheme", "int4", "--group-size", "32"],
    "int3 g128": ["--scheme", "int3", "--group-size", "128"],
    "int3 g32": ["--scheme", "int3", "--group-size", "32"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeQuality:
    """Quantize a model in every way and measure how far each is from it."""

    model: Path
    """The model's folder."""

    recipe: str = "code-25m"
    """The recipe it was trained with: it says which files are held out."""

    kilobytes: int = 300
    """Of held-out text."""

    samples: int = 128
    """Calibration samples."""

    length: int = 512
    """Tokens of a sample; at most the model's positions."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods."""

    schemes: tuple[str, ...] = tuple(SCHEMES)
    """Which schemes."""

    activations: str = "float"
    """Of the products: float shows what the weights lost, int8 what is served by default."""

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        rows: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="hasten-quantize-quality-") as name:
            place = Path(name)
            held = write_texts(place / "held-out.jsonl", held_out(self.kilobytes * 1000, self.recipe))
            known = write_texts(place / "calibration.jsonl", seen(CALIBRATION_BYTES, self.recipe))
            settings = ["--activations", self.activations]
            calibration = ["--calibration", str(known), "--samples", str(self.samples), "--length", str(self.length)]
            wanted = [("int8 rtn", ["--scheme", "int8"])] + [
                (f"{scheme} {method}", [*SCHEMES[scheme], *METHODS[method], *(calibration if method != "rtn" else [])])
                for scheme in self.schemes
                for method in self.methods
            ]
            for row, options in wanted:
                out = place / "out"
                start = time.perf_counter()
                made = command(["quantize", str(self.model), *options, *settings, "--output", str(out)])
                found = command(["eval", str(out), "--against", str(self.model), "--text", str(held)])
                kept = ("bits_per_weight", "bytes", "bytes_before", "seconds", "peak_memory_bytes", "predicted_seconds")
                rows.append(
                    {"name": row, "options": [one for one in options if one != str(known)]}
                    | {key: made[key] for key in kept if key in made}
                    | {key: value for key, value in found.items() if key not in ("model", "against", "seconds")}
                )
                print(
                    f"{row:<18} {made['bits_per_weight']:>6.2f} bits KL {found['kl_mean']:.5f} 99% {found['kl_99']:.4f}"
                    f"  top-1 {found['top1']:.2%}  perplexity {found['perplexity']:.4f} "
                    f"({found['against_perplexity']:.4f})  {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
                shutil.rmtree(out)
        if self.output is not None:
            settings_used = {
                "recipe": self.recipe,
                "samples": self.samples,
                "length": self.length,
                "activations": self.activations,
            }
            write_json(self.output, {"schema": 1, "machine": describe().to_json(), **settings_used, "rows": rows})


def command(arguments: list[str]) -> dict[str, Any]:
    """What `hasten` prints with --json."""
    done = subprocess.run(
        [sys.executable, "-m", "hasten", *arguments, "--json", "-"], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def seen(limit_bytes: int, recipe: str) -> list[str]:
    """Documents of the recipe's text that are not held out, spread over it; about so many bytes of them."""
    from hasten.data import read_documents
    from hasten.training.recipes import RECIPES

    out = set(held_out(1 << 60, recipe))
    documents = [text for text in read_documents(RECIPES[recipe].data.source) if text not in out]
    total = sum(len(text) for text in documents)
    step = max(1, total // limit_bytes)
    return documents[::step]


def write_texts(path: Path, documents: list[str]) -> Path:
    """A .jsonl file of texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


if __name__ == "__main__":
    import tyro

    tyro.cli(QuantizeQuality).run()
