"""What int8 and int4 cost two published models on a chapter of a book, beside llama.cpp's formats at equal bits.

    python benchmarks/real_precision.py --output benchmarks/results/real-precision.json

The models are SmolLM2-135M-Instruct and Gemma 3 270M (`hasten.checkpoints.published`), their files dequantized by
transformers as the originals. Only the layers of the blocks are quantized, in all formats alike: the matrix that is
embedding and lm_head stays as it is, and bits are counted without it. Ours are made by `hasten.quantize`; llama.cpp's
by the functions of its quantizer in the `xllamacpp` wheel, with the types that its rules for Q4_0 and Q4_K_M give each
layer. hasten scores them all with 16-bit activations, so that only the weights differ. GPTQ is calibrated on what the
model itself writes (`hasten.own_text`), not on the text that is scored. "int8 v and down": these two layers of each
block are in int8, the others in int4, which takes the bits of Q4_K_M.

The published weights lie on the grids of the formats they were published in (Q4_1; Q4_K, Q5_0, Q6_K and Q8_0), which
formats with these grids find again: Q4_K_M takes Gemma's file back almost without loss. So every row is measured a
second time on the same function written in other weights ("off the grid"): norms, values and the rows of `up` are
multiplied by random factors from 0.8 to 1.25, and the columns behind them are divided by the same.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import tyro
from real_files import WHEELS
from torch import Tensor, nn

import hasten
from hasten.checkpoints.published import PUBLISHED
from hasten.data.book import book
from hasten.evaluation.perplexity import scoring_context
from hasten.machine import cache_folder, describe
from hasten.machine.files import write_json
from hasten.model.fused import fuse_where_it_fits
from hasten.quantization import GPTQ, Int4, Int8, Mixed, quantize
from hasten.quantization.schemes import layers_to_quantize

LLAMA_CPP = WHEELS["llama.cpp"][0]
ROWS = 64  # whose logits are in memory
PLAIN = {"lm_head": "none", "activations": "float"}


@dataclass(frozen=True, kw_only=True)
class RealPrecision:
    """Quantize both models in every way and measure how far each is from its original in float32."""

    models: tuple[str, ...] = tuple(PUBLISHED)
    """Short names; `make test-real` leaves the folders in the cache."""
    tokens: int = 512
    """Of the chapter."""
    samples: int = 32
    """Calibration samples, which the model writes."""
    length: int = 256
    """Tokens of a sample."""
    only: tuple[str, ...] = ()
    """Rows to measure; all by default."""
    output: Path | None = None
    """Where to write the JSON, after each row: rows that it holds are replaced. A table is printed in any case."""

    def run(self) -> None:
        settings = {"tokens": self.tokens, "llama_cpp": LLAMA_CPP}
        before = self.output is not None and self.output.exists() and json.loads(self.output.read_text())
        rows = {key(row): row for row in (before["rows"] if before else [])}
        with tempfile.TemporaryDirectory(prefix="hasten-llama-cpp-") as folder:
            theirs = llama_cpp(Path(folder))
            for name in self.models:
                for off_grid in (False, True):
                    for row in self._measure(name, off_grid, theirs):
                        row = {"model": name, "off_grid": off_grid} | row
                        rows[key(row)] = row
                        shown = f"{name:<13} {'off grid' if off_grid else 'published':<10}{row['name']:<28}"
                        print(
                            f"{shown}{row['bits']:>6.2f} {row['kl']:>9.5f} {row['perplexity_change']:>+8.2%}",
                            flush=True,
                        )
                        if self.output is not None:
                            result = (
                                {"schema": 1, "machine": describe().to_json()}
                                | settings
                                | {"rows": list(rows.values())}
                            )
                            write_json(self.output, result)

    def _measure(self, name: str, off_grid: bool, theirs: ctypes.CDLL) -> Iterator[dict[str, Any]]:
        folder = cache_folder("real-models") / name
        if not folder.exists():
            raise SystemExit(f"{folder} is not there: `make test-real` makes it")
        exact = load(folder, torch.float32, off_grid)
        document = exact.tokenizer.encode(book())[: self.tokens]
        before = log_probabilities(exact, document)
        del exact
        samples = partial(calibration, folder, self.samples, self.length)
        for title, make in contestants(theirs, samples):
            if self.only and title not in self.only:
                continue
            model = load(folder, torch.bfloat16, off_grid)
            bits = make(model)
            kl, change = compare(before, log_probabilities(fuse_where_it_fits(model), document), document)
            looked_at = {"samples": self.samples, "length": self.length} if "gptq" in title else {}
            yield {"name": title, "bits": bits, "kl": kl, "perplexity_change": change} | looked_at


def key(row: dict[str, Any]) -> tuple[str, bool, str]:
    """What is measured in a row."""
    return row["model"], row["off_grid"], row["name"]


@cache
def calibration(folder: Path, samples: int, length: int) -> Tensor:
    """What the published model writes, for both of its forms."""
    return hasten.own_text(hasten.load(folder), samples=samples, length=length)


def load(folder: Path, dtype: torch.dtype, off_grid: bool) -> Any:
    """The model; off_grid: with other weights of the same function. Both dtypes are of the same float32 weights."""
    model = hasten.load(folder, dtype="float32")
    if off_grid:
        rescale(model)
    if dtype == torch.float32:
        return model
    narrow = hasten.load(folder, dtype="bfloat16")
    with torch.no_grad():
        for own, wide in zip(narrow.parameters(), model.parameters(), strict=True):
            own.copy_(wide)
    return narrow


@torch.no_grad()
def rescale(model: Any) -> None:
    """Multiply norms, values and `up` by random factors, and divide the columns behind them by these."""
    generator = torch.Generator().manual_seed(0)

    def factors(size: int) -> Tensor:
        return 2 ** (torch.rand(size, generator=generator) - 0.5).mul(2 * np.log2(1.25))

    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        for norm, layers in (
            (block.attention_norm, (attention.q, attention.k, attention.v)),
            (block.mlp_norm, (mlp.gate, mlp.up)),
        ):
            scale = factors(len(norm.weight))
            norm.weight.copy_((norm.weight + norm.offset) * scale - norm.offset)
            for layer in layers:
                layer.weight /= scale
        scale, spec = factors(len(attention.v.weight)), attention.spec
        attention.v.weight *= scale[:, None]
        attention.output.weight /= scale.view(-1, 1, spec.head_dim).expand(-1, spec.groups, -1).flatten()
        scale = factors(len(mlp.up.weight))
        mlp.up.weight *= scale[:, None]
        mlp.down.weight /= scale


def contestants(theirs: ctypes.CDLL, samples: Callable[[], Tensor]) -> Iterator[tuple[str, Callable[[Any], float]]]:
    """(title, what quantizes a model in place and returns its bits per weight)."""

    def ours(scheme: Any) -> Callable[[Any], float]:
        return lambda model: stored_bits(quantize(model, scheme))

    def solved(scheme: Callable[[Any], Any]) -> Callable[[Any], float]:
        return lambda model: stored_bits(quantize(model, scheme(model), method=GPTQ(), calibration=samples()))

    g32 = Int4(group_size=32, **PLAIN)
    yield "bfloat16", lambda model: 16.0
    yield "int8", ours(Int8(**PLAIN))
    yield "llama.cpp Q8_0", lambda model: by_llama_cpp(model, theirs, "Q8_0")
    yield "int4 g128", ours(Int4(group_size=128, **PLAIN))
    yield "int4 g32", ours(g32)
    yield "int4 g32 with zero points", ours(Int4(group_size=32, symmetric=False, **PLAIN))
    yield "int4 g32 by gptq", solved(lambda model: g32)
    yield "int4 g32 by gptq, int8 v and down", solved(mixed)
    yield "llama.cpp Q4_0", lambda model: by_llama_cpp(model, theirs, "Q4_0")
    yield "llama.cpp Q4_K_M", lambda model: by_llama_cpp(model, theirs, "Q4_K_M")


def mixed(model: Any) -> Mixed:
    """int8 for the two layers of each block that llama.cpp's Q4_K_M gives more bits in half of the blocks."""
    names = [name for name in layers_to_quantize(model) if name.startswith("blocks.")]
    table = {name: "int8" if name.endswith(("attention.v", "mlp.down")) else "int4-g32" for name in names}
    return Mixed(table=table, activations="float")


def stored_bits(model: Any) -> float:
    """Bits per weight of the quantized layers, scales and zeros included."""
    formats = {name: layer.weight for name, layer in model.quantization.items()}
    sizes = {name: (m := model.get_submodule(name)).in_features * m.out_features for name in formats}
    bits = 0.0
    for name, format in formats.items():
        width = model.get_submodule(name).in_features
        points = format.bits / format.group_size if format.zero == "point" else 0.0
        bits += (format.bits_of(width) + points) * sizes[name]
    return bits / sum(sizes.values())


def llama_cpp(folder: Path) -> ctypes.CDLL:
    """The library inside the wheel, which exports the functions of llama.cpp's quantizer."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*install, "--target", str(folder), LLAMA_CPP], check=True)
    library = ctypes.CDLL(str(next(folder.glob("xllamacpp/*.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointers, numbers = [ctypes.c_void_p] * 2, [ctypes.c_int64] * 3
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, *pointers, *numbers, ctypes.c_void_p]
    return library


def llama_cpp_type(kind: str, name: str, index: int, blocks: int, width: int) -> gguf.GGMLQuantizationType:
    """The type that llama.cpp's quantizer gives a layer of a block in a file of this kind (`llama_tensor_get_type`)."""
    types = gguf.GGMLQuantizationType
    if kind != "Q4_K_M":
        return types[kind]
    eighth = blocks // 8
    more = index < eighth or index >= 7 * blocks // 8 or (index - eighth) % 3 == 2
    chosen = types.Q6_K if more and name.endswith(("attention.v", "mlp.down")) else types.Q4_K
    if width % 256 == 0:
        return chosen
    return types.Q8_0 if chosen == types.Q6_K else types.Q5_0  # of rows that are no whole blocks of 256


@torch.no_grad()
def by_llama_cpp(model: Any, library: ctypes.CDLL, kind: str) -> float:
    """Replace the weights of the blocks by what llama.cpp makes of them; returns the bits of one."""
    size = count = 0
    for index, block in enumerate(model.blocks):
        for name, layer in block.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            rows, width = layer.weight.shape
            type = llama_cpp_type(kind, name, index, len(model.blocks), width)
            elements, stored = gguf.GGML_QUANT_SIZES[type]
            weight = np.ascontiguousarray(layer.weight.float().numpy())
            packed = np.empty((rows, width // elements * stored), dtype=np.uint8)
            library.ggml_quantize_chunk(type.value, weight.ctypes.data, packed.ctypes.data, 0, rows, width, None)
            layer.weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, type)))
            size, count = size + packed.nbytes, count + weight.size
    return 8 * size / count


@torch.inference_mode()
def log_probabilities(model: Any, document: list[int]) -> Tensor:
    """Of every next token, (T - 1, V) in float32."""
    tokens = torch.tensor([document[:-1]])
    positions = torch.arange(tokens.shape[1])[None]
    states = model.states(tokens, positions, scoring_context(model, positions, "auto")).flatten(0, -2)
    return torch.cat([model.scores(part).float().log_softmax(dim=-1) for part in states.split(ROWS)])


def compare(exact: Tensor, found: Tensor, document: list[int]) -> tuple[float, float]:
    """Mean KL divergence from the exact model, and the change of perplexity, as a share."""
    targets = torch.tensor(document[1:])[:, None]
    parts = [(p.exp() * (p - q)).sum(dim=-1) for p, q in zip(exact.split(ROWS), found.split(ROWS), strict=True)]
    loss = [-float(each.gather(1, targets).double().mean()) for each in (exact, found)]
    return float(torch.cat(parts).double().mean()), float(np.expm1(loss[1] - loss[0]))


if __name__ == "__main__":
    tyro.cli(RealPrecision).run()
