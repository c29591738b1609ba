"""The rate of the cache's attention reading a prompt, beside the machine's matrix rate and PyTorch's flash attention.

    python benchmarks/prefill_attention.py --output benchmarks/results/prefill-attention.json

On a processor with AMX, without it (the matrix rate too): HASTEN_ISA=avx512_vnni ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16.

Causal attention of a whole prompt over a contiguous bf16 cache, in interleaved rounds; FLOPs are those of the scores
that are seen (4·H·D for each), and the matrix rate is measured in every round. A call is repeated for 50 ms. Medians
over the rounds, shares formed within a round.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from timing import timed_warm


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttention:
    """Measure, print, and write."""

    tokens: tuple[int, ...] = (512, 2048, 8192)

    heads: tuple[tuple[int, int, int], ...] = ((32, 4, 64), (32, 8, 128))
    """Query heads, key/value heads, head size."""

    rounds: int = 7

    threads: int = 2

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json
        from hasten.ops.native import choose_isa

        configure(threads=self.threads)
        rows = [self.measure(shape, tokens) for shape in self.heads for tokens in self.tokens]
        print("| heads, key/value heads, size | tokens | GFLOP/s | of the matrix rate | PyTorch's flash |")
        print("|---|---|---|---|---|")
        for row in rows:
            shape = ", ".join(str(row[name]) for name in ("heads", "kv_heads", "head_dim"))
            print(
                f"| {shape} | {row['tokens']:,} | {row['flops_per_second'] / 1e9:.0f} | {row['share']:.2f} "
                f"| {row['flash_share']:.2f} |"
            )
        if self.output:
            settings = {"rounds": self.rounds, "threads": self.threads, "dtype": "bfloat16", "isa": choose_isa()}
            write_json(self.output, {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": rows})

    def measure(self, shape: tuple[int, int, int], tokens: int) -> dict[str, Any]:
        import torch
        import torch.nn.functional as F

        from hasten.machine import matrix_rate
        from hasten.ops.native import library

        native = library()
        assert native is not None
        heads, kv_heads, size = shape
        q = torch.randn(tokens, heads, size).bfloat16()
        k, v = torch.randn(2, kv_heads, tokens + 1, size).bfloat16().transpose(1, 2)  # as the cache has them
        starts, lengths, first = torch.tensor([0, tokens]), torch.tensor([tokens]), torch.tensor([0])
        whole = [t.transpose(0, 1)[None].contiguous() for t in (q, k[:tokens], v[:tokens])]

        def ours() -> torch.Tensor:
            return native.ops.attention(q, k, v, starts, lengths, first, None, 0, size**-0.5, 0, 0.0)

        def flash() -> torch.Tensor:
            return F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)

        torch.testing.assert_close(ours(), flash()[0].transpose(0, 1), rtol=0.05, atol=0.02)
        flops = 4 * heads * size * tokens * (tokens + 1) / 2
        found = []
        for _ in range(self.rounds):
            rate, own, theirs = matrix_rate("bfloat16", seconds=0.2), timed_warm(ours), timed_warm(flash)
            found.append((flops / own, flops / own / rate, flops / theirs / rate))
        speed, share, flash_share = (median(column) for column in zip(*found, strict=True))
        what = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "tokens": tokens}
        return what | {"flops_per_second": speed, "share": share, "flash_share": flash_share}


if __name__ == "__main__":
    tyro.cli(PrefillAttention).run()
