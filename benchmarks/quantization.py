"""What each way of quantizing keeps of a model.

    python benchmarks/quantization.py quality --model runs/code-25m/model --kilobytes 100 --samples 64 \\
        --llama-python PYTHON_WITH_LLAMA_CPP --output benchmarks/results/quantize-quality.json \\
        --picture benchmarks/results/quantize-quality.png
    python benchmarks/quantization.py pair --model runs/code-25m/model --gptq FOLDER --output FILE

How fast each format is: speeds.py. What the schemes cost published models: precision.py.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import partial
from math import prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from precision import held_out

import hasten
from hasten.checkpoints.gguf.header import read_gguf
from hasten.data import read_documents
from hasten.engine.given_texts import GivenTexts
from hasten.machine import configure
from hasten.measure.draw import LINES, curve_axes
from hasten.measure.options import check_least
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import hasten_json
from hasten.model.fused import fuse
from hasten.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]

RESULTS = ROOT / "benchmarks" / "results"
LLAMA_CPP_QUANTIZE = ROOT / "benchmarks" / "peers" / "llama_cpp_quantize.py"


def export_gguf(model: Path, file: Path) -> Path:
    """The model as a GGUF file in BF16, which llama.cpp quantizes."""
    command = [sys.executable, "-m", "hasten", "export", str(model), str(file), "--gguf", "BF16"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return file


@dataclass(frozen=True, kw_only=True)
class Pair(Script):
    """The folders by GPTQ and by rounding to nearest decode by turns in one process, a few tokens each.

    A second copy of the latter shows the noise.
    """

    model: Path
    """The model's folder, in plain weights."""
    gptq: Path
    """The same in int4 g32 by GPTQ."""
    rounds: int = 600
    """Turns."""

    def measure(self) -> Report:
        configure(threads="auto", seed=None)
        with tempfile.TemporaryDirectory(prefix="hasten-pair-") as place:
            nearest = Path(place) / "int4-g32"
            quantized_bits(self.model, nearest, SCHEMES["int4 g32"])
            settings = {"model": self.model.parent.name, "weights_sha256": digest(self.model)}
            return {"settings": settings, "paired": in_turns(nearest, self.gptq, self.rounds)}


PAIR_PROMPT = 256  # tokens


def committed(name: str) -> list[dict[str, Any]]:
    """The rows of another result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


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


@dataclass(frozen=True, kw_only=True)
class QuantizeQuality(Script):
    """Bits per weight, KL divergence and perplexity on held-out files, for each format and method.

    Every row is `hasten quantize` and then `hasten eval --against MODEL`, each in a process of its own. The held-out
    files are those that the recipe keeps for validation; calibration text is drawn from the others. With --llama-python
    (a Python that has llama-cpp-python) the model is exported to GGUF and quantized by llama.cpp too, alone and with an
    importance matrix from the same calibration text; those files are scored by hasten, so that only the weights differ.
    Rows that the output has already are not measured again.
    """

    result = "quantize-quality"
    model: Path
    """The model's folder."""
    recipe: str = "code-25m"
    """The recipe it was trained with: it says which files are held out."""
    kilobytes: int = 300
    """Size of the held-out text."""
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
    """Activations of the products: float shows what the weights lost, int8 what is served by default."""
    device: str = "cpu"
    """Where rows are quantized and scored; only on a CPU through our packed kernels."""
    jobs: int = 1
    """Rows at a time: for a machine with a core for each. Their seconds are then those of rows beside each other."""
    picture: Path | None = None
    """Where to draw KL divergence by bits per weight."""

    def measure(self) -> Report:
        check_least("--jobs", self.jobs)
        names = ("recipe", "kilobytes", "samples", "length", "activations", "device", "jobs")
        settings = {name: getattr(self, name) for name in names} | {"weights_sha256": digest(self.model)}
        before = self.before()
        defaults = {field.name: field.default for field in fields(self)}
        if before and any(before.get(name, defaults.get(name)) != value for name, value in settings.items()):
            raise SystemExit(f"{self.output} has rows of other settings or weights: move it away, or give the same")
        rows: list[dict[str, Any]] = before.get("rows", [])
        done = [row["name"] for row in rows]
        with (
            tempfile.TemporaryDirectory(prefix="hasten-quantize-quality-") as name,
            ThreadPoolExecutor(self.jobs) as pool,
        ):
            place = Path(name)
            held = write_texts(place / "held-out.jsonl", held_out(self.kilobytes * 1000, self.recipe))
            known = write_texts(place / "calibration.jsonl", seen(CALIBRATION_BYTES, self.recipe))
            contestants = list(self.contestants(place, known))
            order = [*done, *(name for name, _ in contestants)]
            left = [pool.submit(self.measured, *one, held) for one in contestants if one[0] not in done]
            for future in as_completed(left):
                if future.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                rows.append(future.result())
                print(rows[-1], flush=True)
                rows.sort(key=lambda one: order.index(one["name"]))
                self.write(settings | {"rows": rows})  # after each: a later one may stop
        if self.picture is not None:
            draw_quality(rows, self.model.parent.name, self.picture)
        return settings | {"rows": rows}

    def measured(self, name: str, make: Callable[[], tuple[Path, dict[str, Any]]], held: Path) -> dict[str, Any]:
        """A row."""
        file, made = make()
        texts = ["--against", str(self.model), "--text", str(held), "--device", self.device]
        found = hasten_json(["eval", str(file), *texts])
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        return {"name": name} | made | {key: found[key] for key in found if key not in ("model", "against", "seconds")}

    def contestants(self, place: Path, known: Path) -> Iterator[tuple[str, Callable[[], tuple[Path, dict[str, Any]]]]]:
        """(name, what makes it: the folder or file, and what is known of it)."""
        calibration = ["--calibration", str(known), "--samples", str(self.samples), "--length", str(self.length)]
        if self.llama_python is not None:
            plain, importance = place / "model.gguf", place / "importance.npz"
            export_gguf(self.model, plain)
            from peers.llama_cpp_quantizer import save_importance

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
        made = hasten_json(["quantize", str(self.model), *options, *where])
        kept = ("bits_per_weight", "bytes", "bytes_before", "seconds", "peak_memory_bytes", "predicted_memory_bytes")
        shown = [one for one in options if not one.startswith("/")]
        return out, {"options": shown} | {key: made[key] for key in kept if key in made}

    def published(self, plain: Path, out: Path, kind: str, matrix: list[Path]) -> tuple[Path, dict[str, Any]]:
        """A file by llama.cpp's quantizer."""
        script = LLAMA_CPP_QUANTIZE
        subprocess.run([self.llama_python, script, plain, out, kind, *matrix], check=True)  # type: ignore[list-item]
        size, count = stored(out)
        return out, {"bits_per_weight": 8 * size / count, "bytes": size}


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of formats and methods that hasten or llama.cpp makes. The files have rows of some that it made once."""
    own = {f"{scheme} {method}" for scheme in SCHEMES for method in METHODS}
    return [row for row in rows if row["name"] in own or row["name"].startswith("llama.cpp")]


def digest(folder: Path) -> str:
    """The digest of the folder's weights: two trainings of one recipe are different models."""
    sums = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            sums.update(hashlib.file_digest(stream, "sha256").digest())
    return sums.hexdigest()


def draw_quality(rows: list[dict[str, Any]], model: str, path: Path) -> None:
    """KL divergence by bits per weight: one line a method, through its formats."""
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
    tensors = read_gguf(file).tensors.values()
    return sum(tensor.bytes for tensor in tensors), sum(prod(tensor.shape) for tensor in tensors)


def seen(limit_bytes: int, recipe: str) -> list[str]:
    """Documents of the recipe's text that are not held out, spread over it; about `limit_bytes` bytes."""
    out = set(held_out(1 << 60, recipe))
    documents = [text for text in read_documents(RECIPES[recipe].data.source) if text not in out]
    total = sum(len(text) for text in documents)
    step = max(1, total // limit_bytes)
    return documents[::step]


def write_texts(path: Path, documents: list[str]) -> Path:
    """A .jsonl file of texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


TURN = 32  # tokens in a row of one of two that are paired
LOADS = 6


def quantized_bits(model: Path, folder: Path, options: list[str]) -> float:
    """A folder by `hasten quantize`; its bits per weight in all."""
    head = ["--lm-head", "int8"]  # also a tied one
    bits: float = hasten_json(["quantize", str(model), *options, *head, "--output", str(folder)])["bits_per_weight"]
    return bits


def in_turns(nearest: Path, gptq: Path, rounds: int) -> dict[str, Any]:
    """Two folders by turns in one process, and a second copy of the first: tokens/s, and the median of the ratios with
    the interval that holds it with 95% (of order statistics, whatever the distribution).

    They are loaded again `LOADS` times in changing order: where weights lie in memory is worth a percent or two.
    """
    prompt = torch.randint(3, 256, (1, PAIR_PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    folders = {"rtn": nearest, "gptq": gptq, "rtn again": nearest}
    speeds: dict[str, list[float]] = {name: [] for name in folders}
    orders, names = random.Random(0), list(folders)
    each = rounds // LOADS
    rounds = each * LOADS
    for number in range(LOADS * (each + 5)):
        if (number := number % (each + 5)) == 0:
            orders.shuffle(names)
            decoders, first = {}, {}
            for name in names:
                model = hasten.load(folders[name], dtype="bfloat16")
                decoders[name] = GivenTexts(fuse(model), batch=1, capacity=PAIR_PROMPT + TURN)
                first[name] = decoders[name].prefill(prompt).argmax(-1)
        orders.shuffle(names)
        for name in names:
            decoders[name].truncate(PAIR_PROMPT)
            tokens, start = first[name], time.perf_counter()
            for _ in range(TURN):
                tokens = decoders[name].decode(tokens).argmax(-1)
            if number >= 5:
                speeds[name].append(TURN / (time.perf_counter() - start))
    found: dict[str, Any] = {
        "rounds": rounds,
        "loads": LOADS,
        "tokens": TURN,
        "speeds": {n: median(s) for n, s in speeds.items()},
    }
    for name in ("gptq", "rtn again"):
        ratios = sorted(one / other for one, other in zip(speeds[name], speeds["rtn"], strict=True))
        off = int(0.98 * sqrt(rounds)) + 1  # 1.96 standard deviations of a rank
        low, high = ratios[max(0, rounds // 2 - off)], ratios[min(rounds - 1, rounds // 2 + off)]
        found[f"{name} / rtn"] = {"median": median(ratios), "low": low, "high": high}
    return found


def quality_table(report: Report) -> str:
    """`quantization.py quality`: how far each is from the model, and what rounding to nearest of the same format is."""
    nearest = {
        one["name"].removesuffix(" rtn"): one["kl_mean"] for one in report["rows"] if one["name"].endswith(" rtn")
    }
    rows = []
    for one in sorted(shown(report["rows"]), key=lambda one: (-one["bits_per_weight"], one["kl_mean"])):
        scheme, _, method = one["name"].rpartition(" ")
        share = f"{one['kl_mean'] / nearest[scheme]:.2f}" if scheme in nearest and method != "rtn" else ""
        change = f"{one['perplexity'] / one['against_perplexity'] - 1:+.3%}"
        size = [f"{one['bits_per_weight']:.2f}", f"{one['bytes'] / 1e6:.1f}" if "bytes" in one else ""]
        rows.append([one["name"], *size, f"{one['kl_mean']:.5f}", share, f"{one['top1']:.1%}", change])
    head = ["weights, method", "bits in all", "MB", "KL divergence", "of rtn's", "same top token", "perplexity"]
    return markdown(head, rows)


def method_table(report: Report) -> str:
    """`quantization.py quality`: the KL divergence alone, a column for each method."""
    schemes: dict[str, dict[str, str]] = {}
    for one in report["rows"]:
        scheme, _, method = one["name"].rpartition(" ")
        schemes.setdefault(scheme, {})[method] = f"{one['kl_mean']:.4f}"
    methods = ("rtn", "gptq", "gptaq")
    rows = [[scheme, *(schemes[scheme][method] for method in methods)] for scheme in sorted(schemes)]
    return markdown(["weights", *methods], rows)


CHOICES = (  # what a user wants, the options for it, the row that shows what it keeps, and that of its speed
    ("the same model, half the memory", "`--scheme int8`", "int8 rtn", "int8"),
    ("a third of the memory, at once", "`--scheme int4`", "int4 g32 rtn", "int4 g32"),
    ("a third of the memory, little loss", "`--scheme int4 --method gptq`", "int4 g32 gptq", "int4 g32"),
    ("the smallest file", "`--scheme int3 --group-size 128 --method gptq --gptaq`", "int3 g128 gptaq", "int3 g128"),
)


def choice_table(report: Report) -> str:
    """Which scheme and method to take. gptaq takes gptq's time as often as for the small model."""
    known = {one["name"]: one for one in report["rows"]}
    speeds = {one["name"]: one["speedup"] for one in committed("format-speeds")}
    large = {one["method"]: one for one in committed("quantize-time")}
    minutes = large["gptq"]["seconds"] / 60
    more = known["int4 g64 gptaq"]["seconds"] / known["int4 g64 gptq"]["seconds"]
    times = {"rtn": "seconds", "gptq": f"{minutes:.0f} minutes", "gptaq": f"{minutes * more:.0f} minutes (reckoned)"}
    rows = []
    for want, options, name, speed in CHOICES:
        one, method = known[name], name.rpartition(" ")[2]
        kept = [f"{one['bits_per_weight']:.1f}", f"{one['kl_mean']:.4f}", f"{speeds[speed]:.1f}×"]
        rows.append([want, options, *kept, times[method]])
    head = ["you want", "take", "bits in all", "KL divergence", "decode speed", "1.1 B on two cores"]
    return markdown(head, rows, left=2)


TABLES: dict[str, Table] = {
    "quantize-quality choice": choice_table,
    "quantize-quality": quality_table,
    "quantize-quality-h100": method_table,
}


if __name__ == "__main__":
    main({"quality": QuantizeQuality, "pair": Pair}, TABLES)
