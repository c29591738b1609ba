"""The ladder of attention heads: one shape with all, some and one key/value head, at a context where the cache counts.

Rungs; their names never change:
- heads-mha: as many key/value heads as query heads (multi-head attention, arXiv 1706.03762).
- heads-gqa: groups of query heads share one (grouped-query, arXiv 2305.13245).
- heads-mqa: one for all (multi-query, arXiv 1911.02150).

Each is a model of its own: with fewer key/value heads the k and v projections are smaller as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hasten.bench.generate import DecodeMode, GenerateLadder, measure
from hasten.bench.models import choose_rungs
from hasten.errors import ConfigError

NAMES = {"heads-mha": "multi-head", "heads-gqa": "grouped-query", "heads-mqa": "multi-query"}


@dataclass(frozen=True, kw_only=True)
class HeadsLadder(GenerateLadder):
    """Attention heads: one shape with all, grouped and one key/value head; bytes of cache per token, and speed."""

    title: ClassVar[str] = "Attention heads"
    prompt_tokens: int = 2048
    """The context after which every rung decodes."""
    eager: bool = False
    """Do not compile."""

    def run(self) -> dict[str, Any]:
        """Measure and return the report. Raises ConfigError or ResourceError before anything is allocated."""
        if self.model is not None:
            raise ConfigError("the heads ladder builds the same model three times with other heads: use --shape")
        config = self.source.config()
        counts = dict(zip(NAMES, (config.heads, grouped(config.heads, config.kv_heads), 1), strict=True))
        names, how = choose_rungs(NAMES, self.rungs), "eager" if self.eager else "torch.compile"
        rungs = {
            name: DecodeMode(
                techniques=(how, "static cache", f"{NAMES[name]}: {heads} key/value head{'s' * (heads > 1)}"),
                compiled=not self.eager,
                kv_heads=heads,
            )
            for name, heads in counts.items()
            if name in names
        }
        return measure(self, rungs)


def grouped(heads: int, kv_heads: int) -> int:
    """Key/value heads of the grouped rung: the shape's own where it groups, else a fourth, third or half of all."""
    if 1 < kv_heads < heads:
        return kv_heads
    for share in (4, 3, 2):
        if heads % share == 0 and heads > share:
            return heads // share
    raise ConfigError(f"{heads} query heads cannot be grouped: their number has no useful divisor")
