"""What an engine says of itself, put together from its parts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hasten.engine.settings import ModelFacts, Stats
from hasten.engine.speculation import SpeculationStats

if TYPE_CHECKING:
    from hasten.engine.engine import Engine


def facts_of(engine: Engine) -> ModelFacts:
    """What a server says of an engine's model."""
    from hasten.planning.cost import parameters  # only here: most engines serve nobody

    model = engine.model
    return ModelFacts(
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        max_length=engine.max_length,
        vocabulary=model.config.vocab_size,
        adapters=tuple(engine.adapters.names),
        family=model.config.family,
        parameters=parameters(model.config).total,
        bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
    )


def stats_of(engine: Engine, counts: Stats) -> Stats:
    """What was counted, and the engine at this moment."""
    decoder = engine.runner.decoder if hasattr(engine, "runner") else None  # a closed engine has none
    speculation = SpeculationStats() if engine.speculator is None else engine.speculator.stats
    names = ("drafts", "draft_tokens", "accepted_tokens", "tokens_per_step", "speedup", "active")
    blocks, scheduler = engine.blocks, engine.scheduler
    return dataclasses.replace(
        counts,
        **dataclasses.asdict(blocks.stats),
        **({} if engine.disk is None else dataclasses.asdict(engine.disk.stats)),
        **{name: getattr(speculation, name) for name in names},
        accepted_by_position=tuple(speculation.accepted_by_position),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        blocks=blocks.blocks,
        free_blocks=blocks.free,
        cache_usage=1 - blocks.free / blocks.blocks,
        cache_bytes=engine.cache_bytes,
        captured_steps=0 if decoder is None else len(decoder.captures.pieces),
        capture_seconds=0.0 if decoder is None else decoder.captures.seconds,
        preemptions=scheduler.preemptions,
    )
