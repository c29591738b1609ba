"""What each way of quantizing keeps of a model: bits per weight, KL divergence and perplexity on held-out files.

    python benchmarks/quantize_quality.py --model runs/code-25m/model --kilobytes 100 --samples 64 \\
        --llama-python PYTHON_WITH_LLAMA_CPP --output benchmarks/results/quantize-quality.json \\
        --picture benchmarks/results/quantize-quality.png

Every row is `hasten quantize` and then `hasten eval --against MODEL`, each in a process of its own. The held-out files
are those that the recipe keeps for validation; calibration text is drawn from the others. With --llama-python (a Python
that has llama-cpp-python) the model is exported to GGUF and quantized by llama.cpp too, alone and with an importance
matrix from the same calibration text; those files are scored by hasten, so that only the weights differ.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from quantize_perplexity import held_out

CALIBRATION_BYTES = 4_000_000
METHODS = {
    "rtn": ["--method", "rtn"],
    "gptq": ["--method", "gptq"],
    "gptaq": ["--method", "gptq", "--gptaq"],
}
SCHEMES = {
    "int8": ["--scheme", "int8"],
    "int4 g128": ["--scheme", "int4", "--group-size", "128"],
    "int4 g64": ["--scheme", "int4", "--group-size", "64"],
    "int4 g32": ["--scheme", "int4", "--group-size", "32"],
    "int3 g128": ["--scheme", "int3", "--group-size", "128"],
    "int3 g32": ["--scheme", "int3", "--group-size", "32"],
}
PUBLISHED = ("Q8_0", "Q4_0", "Q4_K_M", "Q3_K_M")


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

    llama_python: Path | None = None
    """A Python that has llama-cpp-python."""

    activations: str = "float"
    """Of the products: float shows what the weights lost, int8 what is served by default."""

    device: str = "cpu"
    """Where rows are quantized and scored; only on a CPU through our packed kernels."""

    jobs: int = 1
    """Rows at a time: for a machine with a core for each. Their seconds are then those of rows beside each other."""

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case. Rows that it has already are not measured again."""

    picture: Path | None = None
    """Where to draw KL divergence by bits per weight."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        if self.jobs < 1:
            raise SystemExit(f"--jobs must be at least 1; found {self.jobs}")
        names = ("recipe", "kilobytes", "samples", "length", "activations", "device", "jobs")
        settings = {name: getattr(self, name) for name in names} | {"weights_sha256": digest(self.model)}
        rows: list[dict[str, Any]] = []
        if self.output is not None and self.output.exists():
            before = json.loads(self.output.read_text())
            defaults = {field.name: field.default for field in fields(self)}
            if any(before.get(name, defaults.get(name)) != value for name, value in settings.items()):
                raise SystemExit(f"{self.output} has rows of other settings or weights: move it away, or give the same")
            rows = before["rows"]
        done = [row["name"] for row in rows]
        with (
            tempfile.TemporaryDirectory(prefix="hasten-quantize-quality-") as name,
            ThreadPoolExecutor(self.jobs) as pool,
        ):
            place = Path(name)
            held = write_texts(place / "held-out.jsonl", held_out(self.kilobytes * 1000, self.recipe))
            known = write_texts(place / "calibration.jsonl", seen(CALIBRATION_BYTES, self.recipe))
            contestants = list(self.contestants(place, known))
            order = [row["name"] for row in rows] + [name for name, _ in contestants]
            left = [pool.submit(self.measured, *one, held) for one in contestants if one[0] not in done]
            for future in as_completed(left):
                if future.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                row = future.result()
                rows.append(row)
                rows.sort(key=lambda one: order.index(one["name"]))
                print(
                    f"{row['name']:<20} {row['bits_per_weight']:>6.2f} bits KL {row['kl_mean']:.5f} 99% "
                    f"{row['kl_99']:.4f}  top-1 {row['top1']:.2%}  perplexity {row['perplexity']:.4f} "
                    f"({row['against_perplexity']:.4f})",
                    flush=True,
                )
                if self.output is not None:  # after each: a later one may stop
                    write_json(self.output, {"schema": 1, "machine": describe().to_json(), **settings, "rows": rows})
        if self.picture is not None:
            draw(rows, self.model.parent.name, self.picture)

    def measured(self, name: str, make: Callable[[], tuple[Path, dict[str, Any]]], held: Path) -> dict[str, Any]:
        """A row."""
        file, made = make()
        texts = ["--against", str(self.model), "--text", str(held), "--device", self.device]
        found = command(["eval", str(file), *texts])
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        return {"name": name} | made | {key: found[key] for key in found if key not in ("model", "against", "seconds")}

    def contestants(self, place: Path, known: Path) -> Iterator[tuple[str, Callable[[], tuple[Path, dict[str, Any]]]]]:
        """(name, what makes it: the folder or file, and what is known of it)."""
        calibration = ["--calibration", str(known), "--samples", str(self.samples), "--length", str(self.length)]
        if self.llama_python is not None:
            plain, importance = place / "model.gguf", place / "importance.npz"
            command(["export", str(self.model), str(plain), "--gguf", "BF16"], parse=False)
            save_importance(self.model, known, importance, self.samples, self.length)
            for kind in PUBLISHED:
                for name, matrix in ((kind, []), (f"{kind} imatrix", [importance])):
                    if not (matrix and kind == "Q8_0"):  # which takes no notice of one
                        out = place / f"{name}.gguf"
                        yield f"llama.cpp {name}", partial(self.published, plain, out, kind, matrix)
        for scheme in self.schemes:
            for method in self.methods if scheme != "int8" else ("rtn",):
                options = [*SCHEMES[scheme], *METHODS[method], *(calibration if method != "rtn" else [])]
                yield f"{scheme} {method}", partial(self.quantized, place / f"{scheme} {method}", options)

    def quantized(self, out: Path, options: list[str]) -> tuple[Path, dict[str, Any]]:
        """A folder by `hasten quantize`."""
        where = ["--lm-head", "int8"]  # also where it is tied to the embedding
        where += ["--activations", self.activations, "--device", self.device, "--output", str(out)]
        made = command(["quantize", str(self.model), *options, *where])
        kept = ("bits_per_weight", "bytes", "bytes_before", "seconds", "peak_memory_bytes", "predicted_memory_bytes")
        shown = [one for one in options if not one.startswith("/")]
        return out, {"options": shown} | {key: made[key] for key in kept if key in made}

    def published(self, plain: Path, out: Path, kind: str, matrix: list[Path]) -> tuple[Path, dict[str, Any]]:
        """A file by llama.cpp's quantizer."""
        script = Path(__file__).with_name("llama_cpp_quantize.py")
        subprocess.run([self.llama_python, script, plain, out, kind, *matrix], check=True)  # type: ignore[list-item]
        size, count = stored(out)
        return out, {"bits_per_weight": 8 * size / count, "bytes": size}


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of formats and methods that hasten or llama.cpp makes. The files have rows of some that it made once."""
    own = {f"{scheme} {method}" for scheme in SCHEMES for method in METHODS}
    return [row for row in rows if row["name"] in own or row["name"].startswith("llama.cpp")]


def digest(folder: Path) -> str:
    """Of the folder's weights: two trainings of one recipe are different models."""
    sums = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            sums.update(hashlib.file_digest(stream, "sha256").digest())
    return sums.hexdigest()


def draw(rows: list[dict[str, Any]], model: str, path: Path) -> None:
    """KL divergence by bits per weight: one line a method, through its formats."""
    from hasten.measure.draw import LINES, curve_axes

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in shown(rows):
        name, point = row["name"], (row["bits_per_weight"], row["kl_mean"])
        method = name.split()[-1]
        if name.startswith("llama.cpp"):
            method = "llama.cpp, importance matrix" if method == "imatrix" else "llama.cpp"
        lines.setdefault(method, []).append(point)
    with curve_axes(
        path,
        title="What is kept: KL divergence by bits per weight",
        subtitle=f"{model}, held-out files; embeddings, scales and norms counted",
        x_label="bits per weight in all",
        y_label="KL divergence (nats per token)",
    ) as axes:
        for number, (method, points) in enumerate(lines.items()):
            style = "s" if method.startswith("llama.cpp") else "o"
            color = LINES[number % len(LINES)]
            axes.plot(*zip(*sorted(points), strict=True), f"{style}-", color=color, linewidth=0.8, label=method)
        axes.set_yscale("log")


def stored(file: Path) -> tuple[int, int]:
    """Bytes of all tensors of a GGUF file, which is without its tokenizer, and their weights."""
    from hasten.checkpoints.gguf.header import read_gguf

    tensors = read_gguf(file).tensors.values()
    return sum(tensor.bytes for tensor in tensors), sum(prod(tensor.shape) for tensor in tensors)


def save_importance(folder: Path, text: Path, file: Path, samples: int, length: int) -> None:
    """llama.cpp's importance matrix: of each linear layer, the mean square of every input feature."""
    import numpy as np
    import torch

    import hasten
    from hasten.checkpoints.gguf.names import place_of
    from hasten.data import read_documents
    from hasten.model.context import TrainingContext

    model = hasten.unfuse(hasten.load(folder, dtype="float32"))
    sums: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            place = place_of(f"{name}.weight", model.config).name
            module.register_forward_pre_hook(
                lambda _, given, place=place: sums.update(
                    {place: sums.get(place, 0) + given[0].double().pow(2).flatten(0, -2).mean(0)}
                )
            )
        elif name == "norm":  # its output is what the head is given
            head = place_of("embedding.weight" if model.tied else "head.weight", model.config).name
            module.register_forward_hook(
                lambda _, given, out, place=head: sums.update(
                    {place: sums.get(place, 0) + out.double().pow(2).flatten(0, -2).mean(0)}
                )
            )
    documents = list(read_documents(str(text)))
    tokens = hasten.calibration_tokens(model.tokenizer, documents, samples=samples, length=length)
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        for sample in tokens:
            model(sample[None], torch.arange(length)[None], context)
    np.savez(file, **{name: (total / len(tokens)).float().numpy() for name, total in sums.items()})


def command(arguments: list[str], *, parse: bool = True) -> dict[str, Any]:
    """What `hasten` prints with --json."""
    output = ["--json", "-"] if parse else []
    done = subprocess.run([sys.executable, "-m", "hasten", *arguments, *output], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout) if parse else {}


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
