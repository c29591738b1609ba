"""What the engine counts from its start on, and its state as numbers."""

from dataclasses import dataclass


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
