"""How an engine is set up, and what it counts. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of the engine.

    max_sequences: samples and beams that run at the same time. token_budget: tokens computed in one step, prompts
    and answers together (at least max_sequences): the larger, the sooner prompts are read, the longer the others
    wait meanwhile. max_length: tokens of prompt and answer together; None: the model's positions. block_size:
    tokens a block of the cache. cache_bytes: memory of the cache; None takes `cache_share` of the memory that is
    free, never more than max_sequences of max_length need. kv_cache_dtype: "auto" keeps keys and values in the
    model's dtype, "int8" in int8 with a scale for every token and head, about half the bytes of bfloat16.
    prefix_cache: share the blocks of equal beginnings. queue_limit: requests that may wait. reader_limit: pieces
    that may lie unread.
    """

    max_sequences: int = 256
    token_budget: int = 512
    max_length: int | None = None
    block_size: int = 16
    cache_bytes: int | None = None
    cache_share: float = 0.5
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    prefix_cache: bool = True
    queue_limit: int = 1024
    reader_limit: int = 1024

    @property
    def int8_cache(self) -> bool:
        return self.kv_cache_dtype == "int8"

    def __post_init__(self) -> None:
        for name in ("max_sequences", "token_budget", "block_size", "queue_limit", "reader_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number above 0, found {value!r:.40}")
        for name in ("max_length", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number above 0, or None; found {value!r:.40}")
        if not 0 < self.cache_share <= 1:
            raise ConfigError(f"cache_share is {self.cache_share}; it is a share of the free memory, above 0, up to 1")
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise ConfigError(
                f"kv_cache_dtype must be 'auto' (the model's dtype) or 'int8', found {self.kv_cache_dtype!r:.40}"
            )
        if self.token_budget < self.max_sequences:
            raise ConfigError(
                f"token_budget is {self.token_budget}, below max_sequences, which is {self.max_sequences}: a step must "
                "have room for one token of every sequence"
            )


@dataclass(slots=True, kw_only=True)
class Stats:
    """The engine at a moment.

    Counted since it was made: steps, tokens, preemptions, copied_blocks; requests, and of them finished, aborted and
    failed by how they ended; prefix_queries, prefix_hits: prompt tokens looked up and found; busy_seconds: time in
    steps, and model_seconds of it in the model. Just now: running, waiting: sequences (samples, beams) and requests;
    cache_usage: share of blocks in use, 0 to 1; blocks_saved: blocks that sharing saves.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    busy_seconds: float = 0.0
    model_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    free_blocks: int = 0
    cache_usage: float = 0.0
    cache_bytes: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    copied_blocks: int = 0
    shared_blocks: int = 0
    blocks_saved: int = 0
