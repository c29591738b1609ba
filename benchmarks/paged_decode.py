"""What decoding over blocks costs beside a contiguous cache, in bf16, int8 and int4: the attention, and a fused step.

    python benchmarks/paged_decode.py --output benchmarks/results/paged-decode.json

All caches hold the same keys and values of sequences of `tokens` tokens; the blocks lie in a random order. They are
measured in turn, the first changing from round to round, and the ratios (blocks to the contiguous cache, int8 and int4
blocks to those in bf16) are formed within a round; the median counts.
The attention goes through the caches of all layers after each other, as a decode step does, so that none is found in
the processor's caches because of the round before.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

KINDS = ("contiguous", "blocks", "int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedDecode:
    """Measure, print, and write."""

    shape: str = "llama-1.1b"

    layers: int = 8
    """Of the shape; fewer than it has, so that weights and caches fit a small machine."""

    tokens: int = 2048

    batches: tuple[int, ...] = (1, 8)

    block_size: int = 16

    rounds: int = 41

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(self.threads)
        model = self.model()
        rows = []
        with torch.inference_mode():
            for batch in self.batches:
                rows += self.measure(model, batch)
        for row in rows:
            print(row)
        if self.output:
            settings = {
                name: getattr(self, name) for name in ("shape", "layers", "tokens", "block_size", "rounds", "threads")
            }
            write_json(self.output, {"schema": 3, "machine": describe().to_json(), "settings": settings, "rows": rows})

    def model(self) -> Any:
        import torch

        import hasten
        from hasten.model.families import read_config
        from hasten.model.initialize import initialize
        from hasten.planning.shapes import SHAPES

        config = read_config(SHAPES[self.shape] | {"num_hidden_layers": self.layers})
        return hasten.fuse(initialize(config, seed=0, dtype=torch.bfloat16).eval())

    def measure(self, model: Any, batch: int) -> list[dict[str, Any]]:
        import torch

        from hasten.engine.blocks import Rows
        from hasten.engine.cache import KVCache, row_format
        from hasten.engine.given_texts import GivenTexts
        from hasten.ops.native import library

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
            times = [timed(run, odd=i % 2 == 1) for i in range(self.rounds)]
            kinds = {kind: median(t[kind] for t in times) for kind in views}
            ratio = median(t["blocks"] / t["contiguous"] for t in times)
            ratios = {f"{kind}_ratio": median(t[kind] / t["blocks"] for t in times) for kind in ("int8", "int4")}
            found.append({"what": what, "batch": batch, **kinds, "ratio": ratio, **ratios})
        return found


def timed(run: Callable[[str], Any], *, odd: bool) -> dict[str, float]:
    """Seconds of each kind, one after the other."""
    found = {}
    for kind in reversed(KINDS) if odd else KINDS:
        start = time.perf_counter()
        run(kind)
        found[kind] = time.perf_counter() - start
    return found


if __name__ == "__main__":
    tyro.cli(PagedDecode).run()
