"""How an engine is set up, and what it counts. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Suppress

from hasten.checks import ABOVE_0, SHARE_ABOVE_0, require
from hasten.engine.block_table import BlockStats
from hasten.engine.params import KVCacheDtype
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.text.tokenizer import Tokenizer

_CPU_BUDGET = 512
_GPU_BUDGETS = (8192, 4096, 2048)
# Weights times tokens of a step on a GPU. Two operations each, at about 400 TFLOP/s: 25 ms, up to which a step is
# launched behind another one (`hasten.engine.ahead`).
_GPU_STEP = 5e12


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of the engine.

    Args:
        max_sequences: Samples and beams that run at the same time.
        token_budget: Tokens computed in one step, prompts and answers together (at least max_sequences): the larger,
            the sooner prompts are read, the longer the others wait meanwhile. 512 by default; on a GPU 8,192 (0.5 B),
            4,096 (1.1 B) or 2,048 (7 B), by the model's size.
        max_length: Tokens of prompt and answer together; the model's positions by default.
        block_size: Tokens in a block of the cache.
        cache_bytes: Memory of the cache; None takes `cache_share`, never more than max_sequences of max_length need.
        cache_share: Share of the free memory that the cache takes, never more than can be used.
        fit: The cache takes all that is free beside a step's activations, and max_length comes down to what it holds.
        kv_cache_dtype: Keys and values in the model's own dtype, or in about half (int8) or less than a third (int4) of
            bfloat16's bytes, rotated before they are rounded; -plain: not rotated.
        prefix_cache: Share the blocks of prompts that begin alike: in memory, not at all (False), or also in a folder
            with this path, where they survive a restart.
        prefix_cache_bytes: Most bytes of the prefix cache's folder; blocks used longest ago are removed first.
        capture: On a GPU, capture decode steps as CUDA graphs when they have come twice; --no-capture launches each
            operation from Python, far slower, for finding errors.
        capture_sizes: Numbers of sequences whose decode steps are captured before they come, while the engine is idle;
            `hasten serve` takes all up to max_sequences by default.
        queue_limit: Requests that may wait; further ones are refused, with a time to try again.
        reader_limit: Unread outputs per prompt before the request is aborted.
    """

    max_sequences: Annotated[int, ABOVE_0] = 256
    token_budget: Annotated[int | None, ABOVE_0] = None
    max_length: Annotated[int | None, ABOVE_0] = None
    block_size: Annotated[int, ABOVE_0] = 16
    cache_bytes: Annotated[Suppress[int | None], ABOVE_0] = None  # --cache-gib on the command line
    cache_share: Annotated[float, SHARE_ABOVE_0] = 0.5
    fit: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"
    prefix_cache: Suppress[bool | str | Path] = True  # --prefix-cache DIR and --no-prefix-cache on the command line
    prefix_cache_bytes: Annotated[int, ABOVE_0] = 20 << 30
    capture: bool = True
    capture_sizes: tuple[Annotated[int, ABOVE_0], ...] | None = None
    queue_limit: Annotated[int, ABOVE_0] = 1024
    reader_limit: Annotated[int, ABOVE_0] = 1024

    def __post_init__(self) -> None:
        require(self)
        if self.token_budget is not None and self.token_budget < self.max_sequences:
            raise ConfigError(
                f"token_budget is {self.token_budget}, below max_sequences, which is {self.max_sequences}: a step must "
                "have room for one token of every sequence"
            )

    @property
    def budget(self) -> int:
        """The tokens of a step: `token_budget`, or its default on a CPU."""
        return max(_CPU_BUDGET, self.max_sequences) if self.token_budget is None else self.token_budget

    def on(self, device: str, *, weights: int) -> EngineSettings:
        """The same with the defaults of a type of device. weights: those that a token is multiplied by."""
        if self.token_budget is not None or device == "cpu":
            return self
        budget = next((tokens for tokens in _GPU_BUDGETS if tokens * weights <= _GPU_STEP), _GPU_BUDGETS[-1])
        return replace(self, token_budget=max(budget, self.max_sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The served model. max_length: tokens of prompt and answer together; vocabulary: the number of logits.

    family, parameters: the architecture and its number of weights. bytes: what the weights take in memory.
    """

    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_length: int
    vocabulary: int
    adapters: tuple[str, ...] = ()
    family: str = ""
    parameters: int = 0
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Stats(BlockStats):
    """The engine at a moment.

    Counted since it was made: steps, tokens, preemptions, copied_blocks; requests, and of them finished, aborted and
    failed by how they ended; prefix_queries, prefix_hits: prompt tokens looked up and found; disk_hits: tokens whose
    blocks were read from the disk, which took disk_seconds; disk_written_blocks, disk_dropped_blocks: written there,
    and not, because the queue or the disk was full; busy_seconds: time in steps, and model_seconds of it in the model.
    Just now: running, waiting: sequences (samples, beams) and requests;
    cache_usage: share of blocks in use, 0 to 1; blocks_saved: blocks that sharing saves; captured_steps: CUDA graphs of
    pieces of decode steps, which took capture_seconds.
    drafts, draft_tokens, accepted_tokens: of speculation, the accepted ones also by their place in the draft;
    tokens_per_step (of the model), speedup and active as in `SpeculationStats`.
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
    disk_hits: int = 0
    disk_seconds: float = 0.0
    disk_written_blocks: int = 0
    disk_dropped_blocks: int = 0
    captured_steps: int = 0
    capture_seconds: float = 0.0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    tokens_per_step: float = 0.0
    speedup: float = 1.0
    active: float = 0.0


# As Prometheus metrics, behind the prefix `hasten:`: name -> (field of Stats, what it is)
GAUGES = {
    "num_requests_running": ("running", "Sequences that run in the engine."),
    "num_requests_waiting": ("waiting", "Requests that wait for room."),
    "kv_cache_usage_perc": ("cache_usage", "Share of the cache's blocks in use, 1 for all."),
    "kv_cache_blocks": ("blocks", "Blocks of the cache."),
    "kv_cache_bytes": ("cache_bytes", "Bytes of the cache, of all its blocks."),
    "kv_cache_blocks_saved": ("blocks_saved", "Blocks that sharing saves at this moment."),
    "kv_cache_blocks_shared": ("shared_blocks", "Blocks that more than one sequence refers to."),
    "captured_steps": ("captured_steps", "CUDA graphs of pieces of decode steps."),
    "capture_seconds": ("capture_seconds", "Seconds that capturing decode steps took."),
    "spec_decode_active": ("active", "Share of the latest steps that had drafts; near 0 where drafts do not pay."),
    "spec_decode_tokens_per_step": ("tokens_per_step", "Tokens of a pass of the model, all sequences together."),
    "spec_decode_speedup": ("speedup", "Speed over that without drafts, by what steps cost here."),
}
COUNTERS = {  # their names end in _total
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "prefix_cache_disk_hits": ("disk_hits", "Tokens whose blocks were read from the prefix cache on disk."),
    "prefix_cache_disk_seconds": ("disk_seconds", "Seconds that reading blocks from the disk took."),
    "prefix_cache_disk_written_blocks": ("disk_written_blocks", "Blocks written to the prefix cache on disk."),
    "prefix_cache_disk_dropped_blocks": (
        "disk_dropped_blocks",
        "Blocks not written there: the queue or disk was full.",
    ),
    "num_preemptions": ("preemptions", "Sequences that were put back to wait because the cache was full."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens taken in."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "spec_decode_num_drafts": ("drafts", "Drafts that were checked."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Proposed tokens that were checked."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Proposed tokens that were taken."),
    "kv_cache_block_copies": ("copied_blocks", "Blocks copied because a sequence wrote to a shared one."),
}
