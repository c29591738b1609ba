"""What a cache in int8 or int4, rotated or not, loses, costs and saves.

    python benchmarks/cache_formats.py --output benchmarks/results/cache-formats.json

Perplexity and Kullback-Leibler divergence of a trained model from itself with the cache in the model's dtype, on text
that it was not trained on, as `hasten eval --against` tells them: everything goes through the cache. The float32 model
beside them says what bfloat16 itself loses. Then the same model with outliers, which large models have and a small one
has not: two channels of each head's keys, turned together by the rotary positions, are `outliers` times as large and
those of the queries as much smaller, so that it computes the same scores.

Speed: one layer's attention in a decode step, and the whole step, of a shape with random weights over a contiguous
cache that holds the same keys and values in each format. The formats are measured in turn, ratios are formed within a
round, and the median counts. The tokens in the same memory are counted, for the shape and for heads of 128.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from quantize_perplexity import held_out
from timing import timed

SHAPES_COUNTED = ("llama-1.1b", "llama-7b")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormats:
    """Measure, print, and write."""

    model: Path = Path("runs/demo/model")
    """A trained model, bfloat16."""

    recipe: str = "demo"
    """That it was trained by: its held-out files are read."""

    kilobytes: int = 60
    """Of held-out text."""

    outliers: float = 16.0

    shape: str = "llama-1.1b"

    layers: int = 8
    """Of the shape; fewer than it has, so that weights and caches fit a small machine."""

    tokens: tuple[int, ...] = (2048, 4096)

    batches: tuple[int, ...] = (1, 8)

    rounds: int = 31

    threads: int = 2

    decode_threads: int = 2
    """One, where others use the machine: nobody waits for a thread that has to."""

    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(self.threads)
        settings = {name: getattr(self, name) for name in self.__slots__ if name not in ("model", "output")}
        result: dict[str, Any] = {"schema": 1, "machine": describe().to_json(), "settings": settings}
        result["quality"] = self.quality(held_out(self.kilobytes * 1000, self.recipe))
        torch.set_num_threads(self.decode_threads)
        result["speed"] = self.speed()
        result["tokens_per_gib"] = tokens_that_fit()
        for row in (*result["speed"], *result["tokens_per_gib"].items()):
            print(row)
        if self.output:
            write_json(self.output, result)

    def quality(self, texts: list[str]) -> list[dict[str, Any]]:
        """Of the model in float32, and over a cache of each format."""
        import hasten
        from hasten.engine.cache import ROW_FORMATS
        from hasten.evaluation.divergence import divergence

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
        import torch

        import hasten
        from hasten.engine.cache import ROW_FORMATS
        from hasten.engine.given_texts import GivenTexts
        from hasten.model.families import read_config
        from hasten.model.initialize import initialize
        from hasten.ops.native import library
        from hasten.planning.shapes import SHAPES

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
    import torch

    size = model.config.head_dim
    with torch.no_grad():
        for block in model.blocks:
            for layer, factor in ((block.attention.k, by), (block.attention.q, 1 / by)):
                layer.weight.unflatten(0, (-1, size))[:, 3 :: size // 2][:, :2] *= factor
    return model


def fill(decoders: list[Any]) -> None:
    """The same random keys and values in all caches."""
    import torch

    first, *others = (decoder.cache for decoder in decoders)
    for i, whole in enumerate((*first.k, *first.v)):
        whole.normal_(generator=torch.Generator().manual_seed(i))
        for cache in others:
            [*cache.k, *cache.v][i].copy_(cache.row_format.write(whole))


def tokens_that_fit() -> dict[str, dict[str, float]]:
    """Tokens in one GiB of cache, by shape (Hugging Face's names of sizes) and format."""
    import torch

    from hasten.engine.cache import ROW_FORMATS, KVCache
    from hasten.model.families import read_config
    from hasten.planning.shapes import SHAPES

    found: dict[str, dict[str, float]] = {}
    for shape in SHAPES_COUNTED:
        config, size = read_config(SHAPES[shape]), 16
        found[shape] = {
            name: 2**30 // KVCache.bytes_per_block(config, block_size=size, dtype=torch.bfloat16, row_format=rows)
            for name, rows in ROW_FORMATS.items()
        }
        found[shape] = {name: blocks * size for name, blocks in found[shape].items()}
    return found


if __name__ == "__main__":
    tyro.cli(CacheFormats).run()
