"""How near products with quantized weights come to the machine's limits.

    python benchmarks/products.py linear --output benchmarks/results/linear.json
    python benchmarks/products.py formats --output benchmarks/results/weight-formats.json
    benchmarks/as_avx2.sh python benchmarks/products.py formats --output benchmarks/results/weight-formats-avx2.json
    benchmarks/as_avx2.sh python benchmarks/products.py eval --output benchmarks/results/eval-rate-avx2.json

A shared machine changes its speed within seconds, so everything takes turns in every round.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hasten.checkpoints.export import save
from hasten.checkpoints.load import load
from hasten.data import prepare, read_documents
from hasten.evaluation.perplexity import windows
from hasten.machine import matrix_rate
from hasten.measure.script import Report, Table, TimedScript, main, markdown
from hasten.measure.timing import interleaved
from hasten.measure.workers import hasten_json
from hasten.model.initialize import initialize
from hasten.ops.linear import BFLOAT16, INT8, PackedLinear, int4_format
from hasten.ops.linear.weights import FLOAT16, K_QUANTS, MXFP4, fp8_format, group_format, minimum_format
from hasten.ops.native import library
from hasten.planning.cost import forward_flops_per_token
from hasten.training import RECIPES, build


def native_isa() -> str:
    """The instruction set of the native kernels; the end of this process where there are none."""
    native = library()
    if native is None:
        raise SystemExit("there are no native kernels here")
    return native.isa


ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512, 2048)
KINDS = (("bfloat16", "float"), ("int8", "int8"), ("int8", "float"), ("int4", "int8"), ("int4", "float"))


@dataclass(frozen=True, kw_only=True)
class Linear(TimedScript):
    """The linear operator beside the machine's limits: the memory's for few rows, the matrix units' for many.

    For each number of rows, all formats are measured in turn, with a plain read of memory and PyTorch's own products of
    64 and 512 rows beside them in every round. Matrices of few rows are far larger than the last-level cache. Fractions
    are of the limit measured in the same rounds; the fastest round counts for the limits and for us alike.
    """

    result = "linear"
    rounds: int = 15
    """Interleaved rounds; the fastest time of each counts."""
    rows: tuple[int, ...] = ROWS
    """Numbers of rows of x."""
    inputs: int = 2048
    """K."""
    outputs: int = 5632
    """N of products with more than 16 rows; few rows get as many outputs as make 256 MB."""
    group_size: int = 128
    """int4: values that share a scale."""
    megabytes: int = 256
    """Size of the weight for at most 16 rows, in MB (10^6 bytes)."""

    def measure(self) -> Report:
        rows = []
        with torch.no_grad():
            for few in (True, False):
                if counts := [rows for rows in self.rows if (rows <= 16) == few]:
                    rows += product_rows(self, counts, few=few)
        return {"isa": native_isa(), "rows": rows, "int4": int4_rates(rows)}


def int4_rates(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """How int4 with int8 activations meets the int8 matrix rate from 8 rows on, and our int8 product of as many rows.

    The aim is 0.75 of the matrix rate.
    """
    rates = {(row["rows"], row["format"]): row for row in rows if row["activations"] == "int8"}
    return [
        {
            "rows": count,
            "of_matrix_rate": row["matrix_rate_fraction"],
            "of_int8_product": row["giga_operations_per_second"] / rates[count, "int8"]["giga_operations_per_second"],
        }
        for (count, format), row in rates.items()
        if format == "int4" and count >= 8
    ]


def product_rows(settings: Linear, counts: list[int], *, few: bool) -> list[dict[str, Any]]:
    """Rows of the result for the row counts; `few`: on large matrices."""
    k = settings.inputs
    bits = {"bfloat16": 16, "int8": 8, "int4": 4}
    sizes = {f: settings.megabytes * 10**6 * 8 // (bits[f] * k) // 64 * 64 if few else settings.outputs for f in bits}
    layers = {kind: uniform_layer(*kind, sizes[kind[0]], k, settings.group_size) for kind in KINDS}
    inputs = {rows: torch.randn(rows, k).bfloat16() for rows in counts}
    calls: dict[Any, Callable[[], object]] = dict(limits(k, settings.outputs))
    for rows in counts:
        for kind, layer in layers.items():
            calls[(rows, *kind)] = lambda layer=layer, x=inputs[rows]: layer(x)  # type: ignore[misc]
    best = {name: min(times) for name, times in interleaved(calls, settings.rounds).items()}
    bandwidth = READ_BYTES / best["read"]
    bf16, int8 = best["bfloat16"], best["int8"]
    rates = {"bfloat16": 2 * 512 * settings.outputs * k / bf16, "int8": 2 * 512 * settings.outputs * k / int8}
    found = []
    for rows in counts:
        for kind, layer in layers.items():
            seconds = best[(rows, *kind)]
            held = sum(buffer.nbytes for buffer in layer.buffers())
            rate = rates["bfloat16" if kind[0] == "bfloat16" else "int8"]
            operations = 2 * rows * layer.out_features * k
            found.append(
                {
                    "rows": rows,
                    "format": kind[0],
                    "activations": kind[1],
                    "seconds": seconds,
                    "weight_bytes": held,
                    "gb_per_second": held / seconds / 1e9,
                    "bandwidth_fraction": held / seconds / bandwidth if few else None,
                    "giga_operations_per_second": operations / seconds / 1e9,
                    "matrix_rate_fraction": operations / seconds / rate,
                    "read_gb_per_second": bandwidth / 1e9,
                    "matrix_giga_operations_per_second": rate / 1e9,
                }
            )
    return found


def limits(k: int, n: int) -> dict[str, Callable[[], object]]:
    """The limits, by name: a read of memory, and PyTorch's bf16 and int8 products of 512 rows."""
    buffer = torch.ones(READ_BYTES // 4)
    x, w = torch.randn(512, k).bfloat16(), torch.randn(n, k).bfloat16()
    xi, wi = (torch.randint(-127, 127, (size, k), dtype=torch.int8) for size in (512, n))
    return {"read": buffer.sum, "bfloat16": lambda: F.linear(x, w), "int8": lambda: torch._int_mm(xi, wi.t())}


def uniform_layer(format: str, activations: str, n: int, k: int, group_size: int) -> Any:
    """A native layer of random weights, made in its packed layout at once."""

    known = {"bfloat16": BFLOAT16, "int8": INT8, "int4": int4_format(group_size, scale_dtype=torch.float16)}
    layer = PackedLinear(k, n, known[format], activations=activations, kernel="native")
    if format == "bfloat16":
        layer.data.normal_()
    else:
        layer.data.random_(0, 256)
        assert layer.scales is not None
        layer.scales.uniform_(0.01, 0.02)
    return layer


READ_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class WeightFormats(TimedScript):
    """Each format of a weight: decoding (1 row) as a share of the read bandwidth, a prompt (512 rows) as a rate.

    Layers of 5632 × 2048 as of the 1.1 B Llama shape. Each format has as many copies as make `--megabytes`, far more
    than the last-level cache; they are visited after each other for 1 row. All formats take turns, with a plain read of
    memory in every round; of the bandwidth the median of each round's share is reported.
    """

    result = "weight-formats"
    rounds: int = 15
    """Interleaved rounds after one that warms up."""
    megabytes: int = 120
    """Size of all copies of a format's weight, in MB (10^6 bytes)."""

    def measure(self) -> Report:
        isa = native_isa()
        with torch.no_grad():
            return {"isa": isa, "settings": self.settings() | {"size": [5632, 2048]}, "rows": format_rows(self)}


def weight_formats() -> dict[str, Any]:
    """By the name of the row: the format."""

    def groups(element: str, size: int, *, symmetric: bool = True) -> Any:
        return group_format(element, size, symmetric=symmetric, scale_dtype=torch.float16)

    return {
        "bf16": BFLOAT16,
        "f16": FLOAT16,
        "int8 row": INT8,
        "int8 g32": groups("int8", 32),
        "int8 g128": groups("int8", 128),
        "int8 g128 zeros": groups("int8", 128, symmetric=False),
        "fp8 row": fp8_format(),
        "fp8 g128": fp8_format(128),
        "int4 g32": groups("int4", 32),
        "int4 g32 zeros": groups("int4", 32, symmetric=False),
        "int4 g128": groups("int4", 128),
        "int4 g128 zeros": groups("int4", 128, symmetric=False),
        "Q4_1": minimum_format("int4"),
        "Q5_0": groups("int5", 32),
        "Q5_1": minimum_format("int5"),
        "IQ4_NL": groups("iq4", 32),
        "MXFP4": MXFP4,
        **{one.name: one for one in K_QUANTS},
    }


def random_layer(format: Any, activations: str) -> Any:
    """A native layer of random bytes, whose sums are numbers, whatever their size.

    fp8 has a normal distribution that uses its range as weights do, and MXFP4 scales from 2^-9 to 1: Intel's processors
    take long over subnormal numbers.
    """
    layer = PackedLinear(2048, 5632, format, activations=activations, kernel="native")
    for name, buffer in layer.named_buffers():
        if buffer.dtype in (torch.float16, torch.float32, torch.bfloat16):
            buffer.uniform_(0.01, 0.02)
        elif buffer.dtype == torch.float8_e4m3fn:
            buffer.copy_((torch.randn(buffer.shape) * 110).clamp(-448, 448))
        elif name == "scales" and format == MXFP4:
            buffer.random_(118, 128)
        else:
            buffer.view(torch.uint8).random_(0, 16 if name == "zeros" else 256)
    return layer


def format_rows(settings: WeightFormats) -> list[dict[str, Any]]:
    """A row for each format, and for int8 activations where it has them."""
    kinds = [
        (name, format, activations)
        for name, format in weight_formats().items()
        for activations in (("float",) if "float" in format.element else ("int8", "float"))
    ]
    x, prompt = torch.randn(1, 2048).bfloat16(), torch.randn(512, 2048).bfloat16()
    buffer = torch.ones(READ_BYTES // 4)
    calls: dict[Any, Callable[[], object]] = {"read": buffer.sum}
    held: dict[Any, int] = {}
    copies: dict[Any, int] = {}
    for name, format, activations in kinds:
        first = random_layer(format, activations)
        size = sum(part.nbytes for part in first.buffers())
        layers = [first, *(random_layer(format, activations) for _ in range(settings.megabytes * 10**6 // size))]
        held[name, activations], copies[name, activations] = size, len(layers)
        calls["one", name, activations] = lambda layers=layers: [layer(x) for layer in layers]  # type: ignore[misc]
        calls["many", name, activations] = lambda layer=first: layer(prompt)  # type: ignore[misc]
    times = interleaved(calls, settings.rounds)
    found = []
    reads = [READ_BYTES / seconds for seconds in times["read"]]
    plain = [seconds / copies["bf16", "float"] for seconds in times["one", "bf16", "float"]]
    for name, _, activations in kinds:
        kind = name, activations
        one = [seconds / copies[kind] for seconds in times["one", *kind]]
        many = median(times["many", *kind])
        found.append(
            {
                "format": name,
                "activations": activations,
                "bits_per_weight": held[kind] * 8 / (5632 * 2048),
                "decode_seconds": median(one),
                "gb_per_second": held[kind] / median(one) / 1e9,
                "bandwidth_share": median(
                    held[kind] / seconds / read for seconds, read in zip(one, reads, strict=True)
                ),
                "against_bf16": median(a / b for a, b in zip(plain, one, strict=True)),
                "prefill_seconds": many,
                "prefill_giga_operations_per_second": 2 * 512 * 5632 * 2048 / many / 1e9,
                "read_gb_per_second": median(reads) / 1e9,
            }
        )
    return found


@dataclass(frozen=True, kw_only=True)
class EvalRate(TimedScript):
    """`hasten eval` as a share of the rate of float32 products, in rounds: the rate, the evaluation, the rate.

    The model has the shape that a recipe trains and random float32 weights; the text is Python's own library. Counted
    are the products and the attention of every token of a window, and the head of those that are scored.
    """

    result = "eval-rate"
    recipe: Literal["demo", "llama-120m"] = "demo"
    """Whose model."""
    bytes: int = 200_000
    """Size of the text."""
    rounds: int = 7

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-eval-") as folder:
            rounds = [self.round(Path(folder), number) for number in range(-1, self.rounds)][1:]
        what = f"hasten eval of {self.bytes:,} bytes, the shape of {self.recipe}, random float32 weights"
        return {
            "what": what,
            "median": {name: median(one[name] for one in rounds) for name in rounds[0]},
            "rounds": rounds,
        }

    def round(self, folder: Path, number: int) -> dict[str, Any]:
        """Round -1 makes the model and is not counted: it compiles."""
        if number < 0:
            untrained_model(self.recipe, folder / "model")
        work = flops_of(folder / "model", self.bytes)
        rates = [matrix_rate(torch.float32)]
        options = ["--text", "stdlib", "--limit-bytes", str(self.bytes), "--threads", str(self.threads)]
        found = hasten_json(["eval", str(folder / "model"), *options])
        rates.append(matrix_rate(torch.float32))
        speed, rate = work / found["seconds"], sum(rates) / 2
        share = speed / rate
        return {
            "tokens_per_second": found["tokens"] / found["seconds"],
            "rate": rate,
            "flops_per_second": speed,
            "share_of_rate": share,
        }


def flops_of(model_folder: Path, size: int) -> float:
    """FLOPs of evaluating `size` bytes with the default context and stride, window by window."""
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


def untrained_model(recipe: str, folder: Path) -> None:
    """A folder with the recipe's model, untrained, and its tokenizer."""
    chosen = RECIPES[recipe]
    data = prepare("stdlib", vocab_size=chosen.data.vocab_size, limit_bytes=2_000_000, progress=False)
    vocab = data.tokenizer.vocab_size
    config = build.shape_config(chosen.model, vocab_size=vocab, positions=chosen.data.context)
    model = initialize(config, seed=0)
    model.tokenizer = data.tokenizer
    save(model, folder)


def eval_table(report: Report) -> str:
    """`start.py eval`."""
    found, shares = report["median"], " ".join(f"{one['share_of_rate']:.0%}" for one in report["rounds"])
    speeds = f"{found['tokens_per_second']:,.0f} scored tokens/s, {found['flops_per_second'] / 1e9:.0f} GFLOP/s"
    return f"{speeds}; of the rate of float32 products {found['share_of_rate']:.0%}, in each round {shares}."


def linear_products(report: Report) -> str:
    """`products.py linear`: few rows as a share of the bandwidth, many as a share of PyTorch's rate."""
    found = {(one["format"], one["activations"], one["rows"]): one for one in report["rows"]}
    few, many = [1, 4, 8], [64, 512]
    body = []
    for name, activations in (("bfloat16", "float"), ("int8", "int8"), ("int4", "int8")):
        shares = [found[name, activations, rows]["bandwidth_fraction"] for rows in few]
        shares += [found[name, activations, rows]["matrix_rate_fraction"] for rows in many]
        body.append([name, *(f"{share:.0%}" for share in shares)])
    head = ["weights", *(f"{rows} row{'s' * (rows > 1)}: of the bandwidth" for rows in few)]
    return markdown([*head, *(f"{rows} rows: of the rate" for rows in many)], body)


def int4_products(report: Report) -> str:
    """`products.py linear`: int4 with many rows beside the rate of PyTorch's int8 product."""
    head = ["rows", *(f"{one['rows']:,}" for one in report["int4"])]
    return markdown(head, [["of the int8 rate", *(f"{one['of_matrix_rate']:.0%}" for one in report["int4"])]])


def formats_table(report: Report) -> str:
    """`products.py formats`: decoding by bytes, prompts by arithmetic, each beside bf16."""
    plain = next(one for one in report["rows"] if one["format"] == "bf16")["prefill_seconds"]
    rows = []
    for one in report["rows"]:
        share, speed = f"{one['bandwidth_share']:.0%}", f"{one['against_bf16']:.2f}×"
        name = f"{one['format']}, {one['activations']}"
        prompt = f"{plain / one['prefill_seconds']:.2f}×"
        rows.append([name, f"{one['bits_per_weight']:.2f}", share, speed, prompt])
    head = ["weights, activations", "bits a weight", "1 row: of the bandwidth", "1 row: beside bf16"]
    return markdown([*head, "512 rows: beside bf16"], rows)


TABLES: dict[str, Table] = {
    "eval-rate-avx2": eval_table,
    **dict.fromkeys(("linear", "linear-amx"), linear_products),
    **dict.fromkeys(("linear int4", "linear-amx int4"), int4_products),
    **dict.fromkeys(("weight-formats", "weight-formats-avx2", "weight-formats-amx"), formats_table),
}


if __name__ == "__main__":
    main({"linear": Linear, "formats": WeightFormats, "eval": EvalRate}, TABLES)
