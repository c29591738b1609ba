"""What a cache in int8 loses and saves: perplexity, greedy tokens, and the tokens that fit into the same memory.

    python benchmarks/int8_cache.py --output benchmarks/results/int8-cache.json

Perplexity through the engine (the log-probabilities of prompts, read in chunks over the paged cache) on held-out files
of the demo's corpus, with the weights in bf16 and the cache in bf16 and in int8; and in float32 with a float32 cache,
which says what bf16 itself loses. Greedy answers to beginnings of those files: the share that is the same as with the
cache in the model's dtype, and of their tokens up to the first difference.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from quantize_perplexity import held_out

KINDS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8-plain"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Cache:
    """Measure, print, and write."""

    model: Path = Path("runs/demo/model")
    """The demo's model (`hasten demo`), whose held-out files are read."""

    kilobytes: int = 60
    """Of held-out text."""

    answers: int = 32

    answer_tokens: int = 64

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(self.threads)
        texts = held_out(self.kilobytes * 1000)
        rows: list[dict[str, Any]] = []
        print("| weights | cache | perplexity | answers as in bf16 | their tokens |\n|---|---|---|---|---|")
        found = {kind: self.measure(texts, *kind) for kind in KINDS}
        _, base = found["bfloat16", "auto"]
        for (dtype, cache), (perplexity, answers) in found.items():
            same = [common(one, other) for one, other in zip(answers, base, strict=True)]
            row = {
                "dtype": dtype,
                "kv_cache_dtype": cache,
                "perplexity": perplexity,
                "same_answers": sum(n == self.answer_tokens for n in same) / len(same),
                "same_tokens": sum(same) / (len(same) * self.answer_tokens),
            }
            rows.append(row)
            print(f"| {dtype} | {cache} | {perplexity:.4f} | {row['same_answers']:.0%} | {row['same_tokens']:.1%} |")
        sizes = tokens_that_fit()
        for shape, of in sizes.items():
            print(f"{shape}: {of['auto']:,} tokens a GiB in bf16, {of['int8']:,} in int8: {of['ratio']:.2f} times")
        if self.output:
            settings = {name: getattr(self, name) for name in ("kilobytes", "answers", "answer_tokens", "threads")}
            result = {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": rows}
            write_json(self.output, result | {"tokens_per_gib": sizes})

    def measure(self, texts: list[str], dtype: str, cache: str) -> tuple[float, list[list[int]]]:
        """The perplexity of all texts, and greedy answers to the first tokens of some."""
        import hasten

        llm = hasten.LLM(self.model, dtype=dtype, kv_cache_dtype=cache, max_sequences=16, prefix_cache=False)
        tokenizer, length = llm.model.tokenizer, llm.engine.max_length
        assert tokenizer is not None
        ids = [tokenizer.encode(text) for text in texts]
        pieces = [own[i : i + length - 1] for own in ids for i in range(0, len(own), length - 1)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        params = hasten.SamplingParams(temperature=0, max_new_tokens=1)
        told = [answer.prompt_logprobs or [] for answer in llm.generate(pieces, params, prompt_logprobs=0)]
        values = [one.logprob for row in told for one in row if one is not None]
        greedy = hasten.SamplingParams(temperature=0, max_new_tokens=self.answer_tokens, ignore_eos=True)
        starts = [piece[: length // 2] for piece in pieces if len(piece) >= length // 2][: self.answers]
        answers = [answer.tokens for answer in llm.generate(starts, greedy)]
        llm.close()
        return math.exp(-sum(values) / len(values)), answers


def common(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def tokens_that_fit() -> dict[str, dict[str, float]]:
    """Tokens in one GiB of cache, by shape (Hugging Face's names of sizes) and dtype."""
    import torch

    from hasten.generation.paged import PagedCache
    from hasten.model.families import read_config
    from hasten.ops.attention.cache_rows import PLAIN, RowFormat
    from hasten.planning.shapes import SHAPES

    found: dict[str, dict[str, float]] = {}
    for shape in ("llama-1.1b", "llama-7b"):
        config, size = read_config(SHAPES[shape]), 16
        auto, int8 = (
            2**30 // PagedCache.bytes_per_block(config, block_size=size, dtype=torch.bfloat16, row_format=rows) * size
            for rows in (PLAIN, RowFormat(8))
        )
        found[shape] = {"auto": auto, "int8": int8, "ratio": int8 / auto}
    return found


if __name__ == "__main__":
    tyro.cli(Int8Cache).run()
