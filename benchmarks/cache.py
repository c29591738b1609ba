"""What the cache's blocks and formats cost, and what they save.

    python benchmarks/cache.py paged-decode --output benchmarks/results/paged-decode.json
    python benchmarks/cache.py sparse-decode --output benchmarks/results/sparse-decode.json
    python benchmarks/cache.py formats --output benchmarks/results/cache-formats.json

Everything takes turns in every round; ratios are formed within a round, and medians are over the rounds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from precision import held_out

import hasten
from hasten.engine.block_table import Rows
from hasten.engine.cache import ROW_FORMATS, KVCache, row_format
from hasten.engine.given_texts import GivenTexts
from hasten.evaluation.divergence import divergence
from hasten.measure.script import Report, Table, TimedScript, main, markdown
from hasten.measure.timing import interleaved, timed
from hasten.model.families import read_config
from hasten.model.fused import fuse_where_it_fits, is_fused
from hasten.model.initialize import initialize
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.ops.native import library
from hasten.planning.shapes import SHAPES, llama

KINDS = ("contiguous", "blocks", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class PagedDecode(TimedScript):
    """Decoding over blocks beside a contiguous cache, in bf16, int8 and int4: the attention, and a fused step.

    All caches hold the same keys and values of sequences of `tokens` tokens; the blocks lie in a random order. They are
    measured in turn, the first changing from round to round. The attention goes through the caches of all layers, as a
    decode step does, so that none is found in the processor's caches because of the round before.
    """

    result = "paged-decode"
    shape: str = "llama-1.1b"
    layers: int = 8
    """Layers of the shape; fewer than it has, so that weights and caches fit a small machine."""
    tokens: int = 2048
    batches: tuple[int, ...] = (1, 8)
    block_size: int = 16
    rounds: int = 41

    def measure(self) -> Report:
        model = self.model()
        with torch.inference_mode():
            return {"rows": [row for batch in self.batches for row in self.compared(model, batch)]}

    def model(self) -> Any:
        config = read_config(SHAPES[self.shape] | {"num_hidden_layers": self.layers})
        return hasten.fuse(initialize(config, seed=0, dtype=torch.bfloat16).eval())

    def compared(self, model: Any, batch: int) -> list[dict[str, Any]]:
        native = library()
        assert native is not None
        size, room = self.block_size, -(-self.tokens // self.block_size)
        config = model.config
        decoder = GivenTexts(model, batch=batch, capacity=room * size, compiled=True)  # a block a text
        make: dict[str, Any] = {"blocks": batch * room, "block_size": size, "dtype": model.dtype, "device": "cpu"}
        formats = {"blocks": row_format("auto"), "int8": row_format("int8"), "int4": row_format("int4")}
        paged = {kind: KVCache(config, **make, row_format=rows) for kind, rows in formats.items()}
        order = torch.randperm(batch * room, generator=torch.Generator().manual_seed(0))
        for i, whole in enumerate((*decoder.cache.k, *decoder.cache.v)):
            whole.normal_()
            for kind, cache in paged.items():
                blocks = (*cache.k, *cache.v)[i][:-1].unflatten(0, (-1, size))
                blocks[order] = formats[kind].write(whole[:-1]).unflatten(0, (-1, size))
        rows = [Rows(table, self.tokens - 1, 1) for table in order.view(batch, room).tolist()]
        tokens = torch.arange(batch) + 5
        q = torch.randn(batch, config.heads, config.head_dim)
        places = torch.full((batch, 1), self.tokens - 1)
        views = {"contiguous": decoder.cache.step_of_texts(places, masks=False).layers}
        views |= {kind: cache.step(rows).layers for kind, cache in paged.items()}

        def attention(kind: str) -> list[Any]:
            found = []
            for layer in views[kind]:
                held = layer.held
                found.append(
                    native.ops.attention(q, held.k, held.v, *held.metadata.to_read, config.head_dim**-0.5, 0, 0.0)
                )
            return found

        def step(kind: str) -> Any:
            if kind == "contiguous":
                decoder.suppose(self.tokens - 1)
                return decoder.decode(tokens)
            context = paged[kind].step(rows)
            return model(tokens[None], context.positions, context)[0]

        found = []
        for what, run in (("attention", attention), ("step", step)):
            first, second = run("contiguous"), run("blocks")
            run("int8"), run("int4")
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "the caches are not the same"
            times = [timed_kinds(run, odd=i % 2 == 1) for i in range(self.rounds)]
            kinds = {kind: median(t[kind] for t in times) for kind in views}
            ratio = median(t["blocks"] / t["contiguous"] for t in times)
            ratios = {f"{kind}_ratio": median(t[kind] / t["blocks"] for t in times) for kind in ("int8", "int4")}
            found.append({"what": what, "batch": batch, **kinds, "ratio": ratio, **ratios})
        return found


def timed_kinds(run: Callable[[str], Any], *, odd: bool) -> dict[str, float]:
    """Seconds of each kind, one after the other."""
    found = {}
    for kind in reversed(KINDS) if odd else KINDS:
        start = time.perf_counter()
        run(kind)
        found[kind] = time.perf_counter() - start
    return found


DECODED = {
    "dense": None,
    "Local, radius 1": "local:block=64,radius=1",
    "Atrous, every 4th block of 64": "atrous:block=64,stride=4",
    "Atrous, every 4th position": "atrous:block=1,stride=4",
    "Atrous, every 16th position": "atrous:block=1,stride=16",
}
SHORT = 64


@dataclass(frozen=True, kw_only=True)
class SparseDecode(TimedScript):
    """A token with a sparse pattern after a long text, beside dense attention.

    The fused steps of one model shape whose attention is large; a step after 64 tokens gives its time without
    attention. Every pattern takes turns in every round.
    """

    result = "sparse-decode"
    tokens: int = 8192
    """That the cache holds."""
    layers: int = 8
    hidden_size: int = 512
    heads: int = 8
    rounds: int = 40

    def measure(self) -> Report:
        calls = {}
        for name, text in DECODED.items():
            decoder = self.decoder(text)
            calls |= {(name, at): partial(token_after, decoder, at) for at in (SHORT, self.tokens)}
        with torch.inference_mode():
            times = interleaved(calls, self.rounds)

        def attention(name: str) -> float:
            return median(a - b for a, b in zip(times[name, self.tokens], times[name, SHORT], strict=True))

        rows = []
        for name in DECODED:
            row = {"name": name, "step_seconds": median(times[name, self.tokens]), "attention_seconds": attention(name)}
            rows.append(row | {"of_dense": attention(name) / attention("dense")})
        return {"settings": self.settings() | {"dtype": "bfloat16"}, "rows": rows}

    def decoder(self, pattern: str | None) -> Any:
        """A decoder of a model with the pattern."""
        sizes = (self.hidden_size, 3 * self.hidden_size, self.layers, self.heads, self.heads)
        values: dict[str, Any] = llama(*sizes, max_position_embeddings=self.tokens + 64) | {"vocab_size": 1024}
        if pattern is not None:
            values["hasten"] = {"attention_pattern": pattern_values(parse_pattern(pattern))}
        model = fuse_where_it_fits(initialize(read_config(values), seed=0, dtype=torch.bfloat16).eval())
        if not is_fused(model):
            raise SystemExit("these are times of fused steps, which this machine has none of")
        return GivenTexts(model, batch=1, capacity=self.tokens + 64)


def token_after(decoder: Any, at: int) -> None:
    """Decode a token after `at` others."""
    decoder.suppose(at)
    decoder.decode(torch.tensor([1]))


SHAPES_COUNTED = ("llama-1.1b", "llama-7b")


@dataclass(frozen=True, kw_only=True)
class CacheFormats(TimedScript):
    """What a cache in int8 or int4, rotated or not, loses, costs and saves.

    Perplexity and KL divergence of a trained model from itself with the cache in the model's dtype, on text that it was
    not trained on: everything goes through the cache. The float32 model shows what bfloat16 itself loses. Then the same
    model with outliers, which large models have and a small one has not: two channels of each head's keys, turned
    together by the rotary positions, are `outliers` times as large and those of the queries as much smaller, so that it
    computes the same scores.

    Speed: one layer's attention in a decode step, and the whole step, of a shape with random weights over a contiguous
    cache that holds the same keys and values in each format, in turn. The tokens in the same memory are counted, for
    the shape and for heads of 128.
    """

    result = "cache-formats"
    model: Path = Path("runs/demo/model")
    """A trained model, bfloat16."""
    recipe: str = "demo"
    """That it was trained by: its held-out files are read."""
    kilobytes: int = 60
    """Size of the held-out text."""
    outliers: float = 16.0
    shape: str = "llama-1.1b"
    layers: int = 8
    """Layers of the shape; fewer than it has, so that weights and caches fit a small machine."""
    tokens: tuple[int, ...] = (2048, 4096)
    batches: tuple[int, ...] = (1, 8)
    rounds: int = 31
    decode_threads: int = 2
    """One, where others use the machine: nobody waits for a thread that has to."""

    def measure(self) -> Report:
        quality = self.quality(held_out(self.kilobytes * 1000, self.recipe))
        torch.set_num_threads(self.decode_threads)
        return {"quality": quality, "speed": self.speed(), "tokens_per_gib": tokens_that_fit()}

    def quality(self, texts: list[str]) -> list[dict[str, Any]]:
        """Quality of the model in float32, and over a cache of each format."""
        base = hasten.fuse(hasten.load(self.model, dtype="bfloat16"))
        models = {
            "float32": hasten.load(self.model, dtype="float32"),
            "bfloat16": base,
            "bfloat16, outliers": hasten.fuse(with_outliers(hasten.load(self.model, dtype="bfloat16"), self.outliers)),
        }
        rows = []
        for name, model in models.items():
            for cache in ("auto",) if name == "float32" else ROW_FORMATS:
                found = divergence(model, base, texts, kv_cache_dtype=cache)
                row = {"model": name, "kv_cache_dtype": cache, "perplexity": found.perplexity}
                row |= {"kl_mean": found.kl_mean, "kl_99": found.kl_99, "top1": found.top1, "tokens": found.tokens}
                print(row, flush=True)
                rows.append(row)
        return rows

    def speed(self) -> list[dict[str, Any]]:
        """Milliseconds of one layer's attention, and of a decode step, by number of tokens and sequences."""
        config = read_config(SHAPES[self.shape] | {"num_hidden_layers": self.layers, "max_position_embeddings": 8192})
        model, native = hasten.fuse(initialize(config, seed=0, dtype=torch.bfloat16).eval()), library()
        assert native is not None
        rows = []
        for length in self.tokens:
            for batch in self.batches:
                make = {"batch": batch, "capacity": length, "compiled": True}  # a block a text
                decoders = {name: GivenTexts(model, **make, kv_cache_dtype=name) for name in ROW_FORMATS}
                fill(list(decoders.values()))
                q = torch.randn(batch, config.heads, config.head_dim)
                next_tokens, places = torch.arange(batch) + 5, torch.full((batch, 1), length - 1)

                def attention(decoder: GivenTexts, q: torch.Tensor = q, places: torch.Tensor = places) -> float:
                    """The median of the layers, one after the other: none is found in the processor's caches."""
                    views = [layer.held for layer in decoder.cache.step_of_texts(places, masks=False).layers]
                    scores = (config.head_dim**-0.5, 0, 0.0)
                    run = native.ops.attention
                    return median(timed(lambda v=v: run(q, v.k, v.v, *v.metadata.to_read, *scores)) for v in views)

                def step(decoder: GivenTexts, tokens: torch.Tensor = next_tokens, at: int = length - 1) -> float:
                    decoder.suppose(at)
                    return timed(lambda: decoder.decode(tokens))

                for what, run in (("attention", attention), ("step", step)):
                    times = []
                    for number in range(self.rounds + 1):
                        order = sorted(decoders, reverse=number % 2 == 1)
                        times.append({name: run(decoders[name]) for name in order})
                    del times[0]  # cold
                    for name in ROW_FORMATS:
                        row = {"what": what, "tokens": length, "batch": batch, "kv_cache_dtype": name}
                        row["milliseconds"] = 1e3 * median(own[name] for own in times)
                        rows.append(row | {"ratio": median(own[name] / own["auto"] for own in times)})
        return rows


def with_outliers(model: Any, by: float) -> Any:
    """Channels 3 and 3 + D/2 of all keys `by` times as large, those of the queries as much smaller; a power of two."""
    size = model.config.head_dim
    with torch.no_grad():
        for block in model.blocks:
            for layer, factor in ((block.attention.k, by), (block.attention.q, 1 / by)):
                layer.weight.unflatten(0, (-1, size))[:, 3 :: size // 2][:, :2] *= factor
    return model


def fill(decoders: list[Any]) -> None:
    """The same random keys and values in all caches."""
    first, *others = (decoder.cache for decoder in decoders)
    for i, whole in enumerate((*first.k, *first.v)):
        whole.normal_(generator=torch.Generator().manual_seed(i))
        for cache in others:
            [*cache.k, *cache.v][i].copy_(cache.row_format.write(whole))


def tokens_that_fit() -> dict[str, dict[str, float]]:
    """Tokens in one GiB of cache, by shape (Hugging Face's names of sizes) and format."""
    found: dict[str, dict[str, float]] = {}
    for shape in SHAPES_COUNTED:
        config, size = read_config(SHAPES[shape]), 16
        found[shape] = {
            name: 2**30 // KVCache.bytes_per_block(config, block_size=size, dtype=torch.bfloat16, row_format=rows)
            for name, rows in ROW_FORMATS.items()
        }
        found[shape] = {name: blocks * size for name, blocks in found[shape].items()}
    return found


def formats_table(report: Report) -> str:
    """`cache.py formats`."""
    found = {(row["model"], row["kv_cache_dtype"]): row for row in report["quality"]}
    longest = max(report["settings"]["tokens"])
    of_longest = [row for row in report["speed"] if row["tokens"] == longest]
    times = {(row["what"], row["batch"], row["kv_cache_dtype"]): row["milliseconds"] for row in of_longest}
    fit, batches = report["tokens_per_gib"]["llama-7b"], report["settings"]["batches"]
    rows = []
    for cache in fit:
        own = [found[model, cache] for model in ("bfloat16", "bfloat16, outliers")]
        quality = [text for row in own for text in (f"{row['perplexity']:.2f}", f"{row['kl_mean']:.6f}")]
        speed = [f"{times[what, batch, cache]:.2f} ms" for batch in batches for what in ("attention", "step")]
        rows.append(["bfloat16" if cache == "auto" else cache, *quality, *speed, f"{fit[cache]:,}"])
    of_model = ["perplexity", "KL divergence, mean", "perplexity with outliers", "KL divergence"]
    parts = ("attention", "step")
    sequences = [f"{what}, {batch} sequence{'s' * (batch > 1)}" for batch in batches for what in parts]
    return markdown(["cache", *of_model, *sequences, "tokens a GiB"], rows)


def paged_table(report: Report) -> str:
    """`cache.py paged-decode`."""
    rows = []
    for one in report["rows"]:
        contiguous, blocks, *small = (f"{one[kind] * 1e3:.2f} ms" for kind in ("contiguous", "blocks", "int8", "int4"))
        ratios = [f"{one[f'{kind}_ratio']:.3f}" for kind in ("int8", "int4")]
        beside = [cell for pair in zip(small, ratios, strict=True) for cell in pair]
        rows.append([one["what"], str(one["batch"]), contiguous, blocks, f"{one['ratio']:.3f}", *beside])
    head = ["", "sequences", "contiguous", "blocks", "blocks / contiguous"]
    return markdown([*head, "int8 blocks", "to bf16's", "int4 blocks", "to bf16's"], rows)


def sparse_table(report: Report) -> str:
    """`cache.py sparse-decode`."""
    rows = [
        [
            one["name"],
            f"{1e3 * one['step_seconds']:.2f}",
            f"{1e3 * one['attention_seconds']:.2f}",
            f"{one['of_dense']:.2f}",
        ]
        for one in report["rows"]
    ]
    return markdown(["pattern", "ms a token", "more than after 64 tokens, ms", "of dense"], rows)


TABLES: dict[str, Table] = {
    "paged-decode": paged_table,
    "sparse-decode": sparse_table,
    "cache-formats": formats_table,
}


if __name__ == "__main__":
    main({"paged-decode": PagedDecode, "sparse-decode": SparseDecode, "formats": CacheFormats}, TABLES)
