"""What number formats cost: perplexity and divergence of quantized models, and bytes of trained ones.

    python benchmarks/precision.py published --output benchmarks/results/real-precision.json
    python benchmarks/precision.py schemes --output benchmarks/results/quantize-perplexity.json
    python benchmarks/precision.py bytes --output benchmarks/results/precision-bytes.json

Only the layers of the blocks are quantized, in all formats alike, in the published models.
"""

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from compare import WHEELS
from torch import Tensor

import hasten
from hasten.data import Batch
from hasten.data.book import book
from hasten.evaluation.perplexity import scoring_context
from hasten.machine import cache_folder
from hasten.measure.counted import Alive
from hasten.measure.script import Report, Script, Table, columns, main, markdown
from hasten.model.fused import fuse_where_it_fits
from hasten.model.initialize import initialize
from hasten.planning.cost import parameters
from hasten.quantization import GPTQ, Int4, Int8, Mixed, quantize
from hasten.quantization.schemes import layers_to_quantize
from hasten.training import build
from hasten.training.recipe import Data, Parallel, Recipe, Shape, Techniques
from hasten.training.recipes import RECIPES
from hasten.training.setup import prepare_data


@dataclass(frozen=True, kw_only=True)
class PolicyBytes(Script):
    """Bytes a parameter that training holds under each precision policy, counted tensor by tensor.

    Weights, gradients and the optimizer's tensors are counted at the end of a backward pass. "Alive at the peak" is
    every tensor that exists at the worst moment of a step: the 16-bit copies that autocast makes of weights are in it,
    and the activations of one row of 8 tokens. Bytes are counted, so nothing depends on how fast or busy a machine is.
    """

    result = "precision-bytes"

    def measure(self) -> Report:
        return {"kind": "precision-bytes", "shape": SMALL, "rows": [policy_bytes(name) for name in POLICIES]}


def bytes_table(report: Report) -> str:
    """Bytes a parameter, by policy."""
    kinds = {"weights": "weights", "gradients": "gradients", "optimizer (with masters)": "optimizer"}
    kinds |= {"after a backward pass": "sum", "alive at the peak": "peak"}
    return columns(report["rows"], {"policy": "{policy}"} | {head: f"{{{kind}:.1f}}" for head, kind in kinds.items()})


ROWS = 64  # whose logits are in memory
PLAIN = {"lm_head": "none", "activations": "float"}


@dataclass(frozen=True, kw_only=True)
class PublishedPrecision(Script):
    """What int8 and int4 cost two published models on a chapter of a book, beside llama.cpp's formats at equal bits.

    SmolLM2-135M-Instruct and Gemma 3 270M (`hasten.checkpoints.published`), their files dequantized by transformers as
    the originals. The matrix that is embedding and lm_head stays as it is, and bits are counted without it. Ours are
    made by `hasten.quantize`; llama.cpp's by the functions of its quantizer in the `xllamacpp` wheel, with the types
    that its rules for Q4_0 and Q4_K_M give each layer. hasten scores them all with 16-bit activations, so that only the
    weights differ. GPTQ is calibrated on what the model itself writes (`hasten.own_text`), not on the text that is
    scored. "int8 v and down": these two layers of each block are in int8, the others in int4, which takes the bits of
    Q4_K_M.

    The published weights lie on the grids of the formats they were published in, which formats with these grids find
    again: Q4_K_M takes Gemma's file back almost without loss. So every row is measured a second time on the same
    function written in other weights ("off the grid"): norms, values and the rows of `up` are multiplied by random
    factors from 0.8 to 1.25, and the columns behind them are divided by the same.
    """

    result = "real-precision"
    models: tuple[str, ...] = ("smollm2-135m", "gemma3-270m")
    """Short names; `make test-real` leaves the folders in the cache."""
    tokens: int = 512
    """Length of the chapter."""
    samples: int = 32
    """Calibration samples, which the model writes."""
    length: int = 256
    """Tokens of a sample."""
    only: tuple[str, ...] = ()
    """Rows to measure; all by default."""
    grids: tuple[Literal["published", "off"], ...] = ("published", "off")
    """The weights as they were published, the same function off their grid, or both."""

    def measure(self) -> Report:
        from peers.llama_cpp_quantizer import llama_cpp

        found = self.before()
        rows = {row_key(row): row for row in found.get("rows", [])}
        with tempfile.TemporaryDirectory(prefix="hasten-llama-cpp-") as folder:
            theirs = llama_cpp(Path(folder), WHEELS["llama.cpp"][0])
            for name, grid in product(self.models, self.grids):
                off_grid = grid == "off"
                for row in self._measure(name, off_grid, theirs):
                    row = {"model": name, "off_grid": off_grid} | row
                    print(row, flush=True)
                    rows[row_key(row)] = row
                    found = {"tokens": self.tokens, "llama_cpp": WHEELS["llama.cpp"][0], "rows": list(rows.values())}
                    self.write(found)
        return found

    def _measure(self, name: str, off_grid: bool, theirs: ctypes.CDLL) -> Iterator[dict[str, Any]]:
        folder = cache_folder("real-models") / name
        if not folder.exists():
            raise SystemExit(f"{folder} is not there: `make test-real` makes it")
        exact = published_model(folder, torch.float32, off_grid)
        document = exact.tokenizer.encode(book())[: self.tokens]
        before = log_probabilities(exact, document)
        del exact
        samples = partial(own_samples, folder, self.samples, self.length)
        for title, make in contestants(theirs, samples):
            if self.only and title not in self.only:
                continue
            model = published_model(folder, torch.bfloat16, off_grid)
            bits = make(model)
            kl, change = compared(before, log_probabilities(fuse_where_it_fits(model), document), document)
            looked_at = {"samples": self.samples, "length": self.length} if "gptq" in title else {}
            yield {"name": title, "bits": bits, "kl": kl, "perplexity_change": change} | looked_at


def row_key(row: dict[str, Any]) -> tuple[str, bool, str]:
    """What is measured in a row."""
    return row["model"], row["off_grid"], row["name"]


@cache
def own_samples(folder: Path, samples: int, length: int) -> Tensor:
    """What the published model writes, for both of its forms. Kept in the cache: writing takes minutes."""
    kept = cache_folder("own-text") / f"{folder.name}-{samples}x{length}.pt"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(hasten.own_text(hasten.load(folder), samples=samples, length=length), kept)
    return torch.load(kept, weights_only=True)


def published_model(folder: Path, dtype: torch.dtype, off_grid: bool) -> Any:
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

    from peers.llama_cpp_quantizer import by_llama_cpp

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
    yield "int4 g32 by gptq, int8 v and down", solved(int8_values_and_down)
    yield "int4 g32 by gptq, int8 k, v and most of down", solved(int8_keys_values_and_most_down)
    yield "llama.cpp Q4_0", lambda model: by_llama_cpp(model, theirs, "Q4_0")
    yield "llama.cpp Q4_K_M", lambda model: by_llama_cpp(model, theirs, "Q4_K_M")


def int8_values_and_down(model: Any) -> Mixed:
    """int8 for the two layers of each block that llama.cpp's Q4_K_M gives more bits in half of the blocks."""
    names = [name for name in layers_to_quantize(model) if name.startswith("blocks.")]
    table = {name: "int8" if name.endswith(("attention.v", "mlp.down")) else "int4-g32" for name in names}
    return Mixed(table=table, activations="float")


def int8_keys_values_and_most_down(model: Any) -> Mixed:
    """int8 for k and v, and for down in the first five of six blocks: where int4 costs most for its bits."""
    names = [name for name in layers_to_quantize(model) if name.startswith("blocks.")]
    wide = {f"blocks.{i}.mlp.down" for i in range(len(model.blocks) * 5 // 6)}
    wide |= {name for name in names if name.endswith(("attention.k", "attention.v"))}
    return Mixed(table={name: "int8" if name in wide else "int4-g32" for name in names}, activations="float")


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


@torch.inference_mode()
def log_probabilities(model: Any, document: list[int]) -> Tensor:
    """Log-probabilities of every next token, (T - 1, V) in float32."""
    tokens = torch.tensor([document[:-1]])
    positions = torch.arange(tokens.shape[1])[None]
    states = model.states(tokens, positions, scoring_context(model, positions, "auto")).flatten(0, -2)
    return torch.cat([model.scores(part).float().log_softmax(dim=-1) for part in states.split(ROWS)])


def compared(exact: Tensor, found: Tensor, document: list[int]) -> tuple[float, float]:
    """Mean KL divergence from the exact model, and the change of perplexity, as a share."""
    targets = torch.tensor(document[1:])[:, None]
    parts = [(p.exp() * (p - q)).sum(dim=-1) for p, q in zip(exact.split(ROWS), found.split(ROWS), strict=True)]
    loss = [-float(each.gather(1, targets).double().mean()) for each in (exact, found)]
    return float(torch.cat(parts).double().mean()), float(np.expm1(loss[1] - loss[0]))


@dataclass(frozen=True, kw_only=True)
class SchemePerplexity(Script):
    """What quantizing costs in perplexity: one model in bf16, int8 and int4, on held-out files of the demo's corpus.

    "float" is the weight-only product (activations keep 16 bits), "int8" rounds the activations too. The files are
    those that the demo recipe keeps for validation, so the model must be the demo's (`hasten demo`).
    """

    result = "quantize-perplexity"
    model: Path = Path("runs/demo/model")
    """The demo's model."""
    kilobytes: int = 150
    """Size of the held-out text."""

    def measure(self) -> Report:
        documents, rows = held_out(self.kilobytes * 1000), list[dict[str, Any]]()
        for name, scheme in schemes().items():
            model = hasten.load(self.model, dtype="bfloat16")
            if scheme is not None:
                quantize(model, scheme())
            found = hasten.perplexity(model, documents)
            change = found.perplexity / (rows[0]["perplexity"] if rows else found.perplexity) - 1
            rows.append({"name": name, "perplexity": found.perplexity, "change": change, "tokens": found.tokens})
            print(rows[-1], flush=True)
        return {"documents": len(documents), "rows": rows}


def schemes() -> dict[str, Callable[[], Any] | None]:
    """name -> the scheme, made when torch is there; None: bf16 as it is."""
    found: dict[str, Callable[[], Any] | None] = {"bf16": None}
    for activations in ("float", "int8"):
        found[f"int8 {activations}"] = lambda a=activations: Int8(activations=a)
        for group in (128, 32):
            found[f"int4 g{group} {activations}"] = lambda a=activations, g=group: Int4(group_size=g, activations=a)
    found["int4 g128 minmax float"] = lambda: Int4(group_size=128, search="minmax", activations="float")
    found["int4 g128 asym float"] = lambda: Int4(group_size=128, symmetric=False, activations="float")
    return found


def held_out(limit_bytes: int, recipe: str = "demo") -> list[str]:
    """Documents that a recipe does not train on, about `limit_bytes` bytes."""
    documents: list[str] = []
    size = 0
    for _, text in prepare_data(RECIPES[recipe], init=None, progress=False).validation_documents():
        documents.append(text)
        size += len(text.encode())
        if size > limit_bytes:
            break
    return documents


SMALL = {"layers": 4, "hidden_size": 256, "heads": 4, "feed_forward": 704}
VOCABULARY, ROW_TOKENS = 512, 8
POLICIES: dict[str, tuple[str, str]] = {  # precision and parallel.policy of a recipe
    "float32": ("float32", "float32-weights"),
    "bfloat16 autocast": ("bfloat16", "float32-weights"),
    "float16 autocast, scaled loss": ("float16", "float32-weights"),
    "bfloat16 weights, float32 masters": ("bfloat16", "float32-masters"),
    "float16 weights, float32 masters": ("float16", "float32-masters"),
}


def policy_bytes(name: str) -> dict[str, Any]:
    """One policy: bytes of each kind after a backward pass, and of everything at the peak of a step."""
    precision, policy = POLICIES[name]
    recipe = Recipe(
        name="bytes",
        model=Shape(**SMALL),
        data=Data(batch_size=1, context=ROW_TOKENS),
        techniques=Techniques(precision=precision, compile=False, keep_memory=False),  # type: ignore[arg-type]
        parallel=Parallel(policy=policy),  # type: ignore[arg-type]
    )
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=ROW_TOKENS)
    step = build.training_step(initialize(config, seed=0), recipe)
    tokens = torch.randint(VOCABULARY, (1, ROW_TOKENS + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)]
    step.run(batches)
    held: dict[str, int] = {}
    collect = step.where.collect

    def counted() -> None:
        weights = list(step.model.parameters())
        held["weights"] = _held(weights)
        held["gradients"] = _held([weight.grad for weight in weights if weight.grad is not None])
        held["optimizer"] = _held(_of_optimizer(step)) - _held(_shared(weights, _of_optimizer(step)))
        collect()

    step.where.collect = counted  # type: ignore[method-assign]
    with Alive([*step.model.parameters(), *_of_optimizer(step)]) as alive:
        result = step.run(batches)
    assert result is not None
    count = parameters(config).total
    return {
        "policy": name,
        "parameters": count,
        "loss": float(result.loss),
        **{kind: size / count for kind, size in held.items()},
        "sum": sum(held.values()) / count,
        "peak": alive.peak / count,
    }


def _of_optimizer(step: Any) -> list[Tensor]:
    """Its weights (masters, where they are not the model's) and states."""
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    weights = [weight for group in step.optimizer.param_groups for weight in group["params"]]
    return [one for one in (*weights, *states) if isinstance(one, Tensor) and one.dim()]


def _shared(weights: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    own = {one.data_ptr() for one in weights}
    return [one for one in others if one.data_ptr() in own]


def _held(tensors: list[Tensor]) -> int:
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def scheme_table(report: Report) -> str:
    """`precision.py schemes`."""
    rows = []
    for one in report["rows"]:
        change = f"{one['change']:+.3%}" if one["change"] else ""
        rows.append([one["name"], f"{one['perplexity']:.3f}", change])
    return markdown(["weights, activations", "perplexity", "against bf16"], rows)


def published_table(report: Report) -> str:
    """`precision.py published`: each model as published, and off the grid of its file."""
    found = {(one["model"], one["off_grid"], one["name"]): one for one in report["rows"]}
    models = dict.fromkeys(one["model"] for one in report["rows"])
    rows = []
    for name in dict.fromkeys(one["name"] for one in report["rows"]):
        row = [name]
        for model in models:
            plain, other = (found.get((model, off_grid, name)) for off_grid in (False, True))
            either = plain or other
            row += [f"{either['bits']:.2f}" if either else "", f"{plain['kl']:.4f}" if plain else ""]
            row.append(f"{plain['perplexity_change']:+.1%}" if plain else "")
            row.append(f"{other['kl']:.4f}" if other else "")
        rows.append(row)
    head = [f"{model}: {title}" for model in models for title in ("bits", "KL", "perplexity", "KL off the grid")]
    return markdown(["weights", *head], rows)


TABLES: dict[str, Table] = {
    "real-precision": published_table,
    "quantize-perplexity": scheme_table,
    "precision-bytes": bytes_table,
}


if __name__ == "__main__":
    main({"published": PublishedPrecision, "schemes": SchemePerplexity, "bytes": PolicyBytes}, TABLES)
