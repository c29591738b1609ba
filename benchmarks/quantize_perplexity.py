"""What quantizing costs in perplexity: one model in bf16, int8 and int4, on held-out files of the demo's corpus.

    python benchmarks/quantize_perplexity.py --output benchmarks/results/quantize-perplexity.json

"float" is the weight-only product (activations keep 16 bits), "int8" rounds the activations too. The files are those
that the demo recipe keeps for validation, so the model must be the demo's (`hasten demo`).
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePerplexity:
    """Measure the perplexity of a model in each precision."""

    model: Path = Path("runs/demo/model")
    """The demo's model."""

    kilobytes: int = 150
    """Of held-out text."""

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case."""

    def run(self) -> None:
        import hasten
        from hasten.machine import describe
        from hasten.machine.files import write_json
        from hasten.quantization import quantize

        documents = held_out(self.kilobytes * 1000)
        rows: list[dict[str, Any]] = []
        for name, scheme in schemes().items():
            model = hasten.load(self.model, dtype="bfloat16")
            if scheme is not None:
                quantize(model, scheme())
            start = time.perf_counter()
            found = hasten.perplexity(model, documents)
            base = rows[0]["perplexity"] if rows else found.perplexity
            change = found.perplexity / base - 1
            rows.append({"name": name, "perplexity": found.perplexity, "change": change, "tokens": found.tokens})
            print(f"{name:<24} {found.perplexity:>10.4f} {change:>+9.4%}  {time.perf_counter() - start:.0f} s")
            sys.stdout.flush()
        if self.output is not None:
            result = {"schema": 1, "machine": describe().to_json(), "documents": len(documents), "rows": rows}
            write_json(self.output, result)


def schemes() -> dict[str, Callable[[], Any] | None]:
    """name -> the scheme, made when torch is there; None: bf16 as it is."""
    from hasten.quantization import Int4, Int8

    found: dict[str, Callable[[], Any] | None] = {"bf16": None}
    for activations in ("float", "int8"):
        found[f"int8 {activations}"] = lambda a=activations: Int8(activations=a)
        for group in (128, 32):
            found[f"int4 g{group} {activations}"] = lambda a=activations, g=group: Int4(group_size=g, activations=a)
    found["int4 g128 minmax float"] = lambda: Int4(group_size=128, search="minmax", activations="float")
    found["int4 g128 asym float"] = lambda: Int4(group_size=128, symmetric=False, activations="float")
    return found


def held_out(limit_bytes: int, recipe: str = "demo") -> list[str]:
    """Documents that a recipe does not train on, about so many bytes of them."""
    from hasten.training.recipes import RECIPES
    from hasten.training.setup import prepare_data

    documents: list[str] = []
    size = 0
    for _, text in prepare_data(RECIPES[recipe], init=None, progress=False).validation_documents():
        documents.append(text)
        size += len(text.encode())
        if size > limit_bytes:
            break
    return documents


if __name__ == "__main__":
    import tyro

    tyro.cli(QuantizePerplexity).run()
