"""The heads' ladder: one shape with all, some and one key/value head, at a context where the cache counts.

- heads-mha: as many key/value heads as query heads (multi-head attention, arXiv 1706.03762).
- heads-gqa: groups of query heads share one (grouped-query, arXiv 2305.13245).
- heads-mqa: one for all (multi-query, arXiv 1911.02150).
Each is a model of its own: with fewer key/value heads the k and v projections are smaller as well.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tyro.conf import Suppress

from hasten.bench.generate import DecodeMode, GenerateLadder
from hasten.bench.models import choose_rungs
from hasten.errors import ConfigError

HEADS = {"heads-mha": "multi-head", "heads-gqa": "grouped-query", "heads-mqa": "multi-query"}


@dataclass(frozen=True, kw_only=True)
class HeadsLadder(GenerateLadder):
    """Attention heads: one shape with all, grouped and one key/value head; bytes of cache per token, and speed."""

    title: ClassVar[str] = "Attention heads"
    model: Suppress[str | None] = None  # a shape only: with other heads a checkpoint is no model
    text: Suppress[str | None] = None
    gptq: Suppress[str | None] = None
    gptq_samples: Suppress[int] = 128
    draft: Suppress[str | None] = None
    speculate: Suppress[int | None] = None
    tensor_parallel: Suppress[int] = 1
    prompt_tokens: int = 2048
    """The context after which every rung decodes."""
    eager: bool = False
    """Do not compile."""

    def settled(self) -> Self:
        """The ladder itself: there is no checkpoint on which defaults depend."""
        return replace(self, draft="none")

    def left_out(self) -> dict[str, str]:
        """None: it has no rungs for checkpoints."""
        return {}

    def modes(self) -> dict[str, DecodeMode]:
        """The rungs to run, by name. Raises ConfigError for those that cannot be."""
        if self.model is not None or self.shape is None:
            raise ConfigError("the heads ladder builds the same model three times with other heads: use --shape")
        config = self.source.config()
        counts = dict(zip(HEADS, (config.heads, grouped(config.heads, config.kv_heads), 1), strict=True))
        names, how = choose_rungs(HEADS, self.rungs), "eager" if self.eager else "torch.compile"
        return {
            name: DecodeMode(
                techniques=(how, "static cache", f"{HEADS[name]}: {heads} key/value head{'s' * (heads > 1)}"),
                compiled=not self.eager,
                kv_heads=heads,
            )
            for name, heads in counts.items()
            if name in names
        }


def grouped(heads: int, kv_heads: int) -> int:
    """Key/value heads of the grouped rung: the shape's own where it groups, else a fourth, third or half of all."""
    if 1 < kv_heads < heads:
        return kv_heads
    for share in (4, 3, 2):
        if heads % share == 0 and heads > share:
            return heads // share
    raise ConfigError(f"{heads} query heads cannot be grouped: their number has no useful divisor")
