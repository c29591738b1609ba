"""What the engine counts from its start on, and its state as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hasten.serving.scheduler import Scheduler
from hasten.serving.settings import Stats


@dataclass(slots=True)
class Counts:
    """Fields as in `Stats`."""

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
