"""What the engine counts from its start on, and its state as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hasten.serving.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class Counts:
    """What an engine counted since it was made.

    requests, finished, aborted, failed: requests by how they ended. busy_seconds: time in steps; model_seconds: of
    it, in the model and the draw.
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

    def stats(self, scheduler: Scheduler, *, cache_bytes: int) -> Stats:
        """The engine at this moment."""
        blocks = scheduler.blocks
        books = blocks.stats
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=blocks.blocks,
            free_blocks=blocks.free,
            cache_usage=1 - blocks.free / blocks.blocks,
            cache_bytes=cache_bytes,
            prefix_queries=books.queries,
            prefix_hits=books.hits,
            preemptions=scheduler.preemptions,
            copied_blocks=books.copies,
            shared_blocks=books.shared,
            blocks_saved=books.saved,
            **dataclasses.asdict(self),
        )


@dataclass(slots=True, kw_only=True)
class Stats(Counts):
    """The counts, and the engine at this moment.

    running, waiting: sequences (samples, beams) and requests. cache_usage: share of blocks in use, 0 to 1.
    prefix_queries, prefix_hits: prompt tokens looked up and found. blocks_saved: blocks that sharing saves just now.
    """

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
