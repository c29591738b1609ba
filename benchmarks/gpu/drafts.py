"""Drafts for one stream: `hasten.generate` and the engine with and without them, greedy, on a prompt that repeats.

With random weights how many tokens are accepted says nothing of real texts: what repeats is the greedy text itself. The
same texts come out with and without drafts, and what a step with drafts costs is that of any model of this shape.
"""

import time
from typing import Any

import torch

from gpu.models import fastest, random_model
from gpu.worker import DEVICE, TINY, memory, serve, sync

KINDS = ("none", "suffix", "self:1")
WARM_UP = 3
REPEATED, TIMES, NEW = (64, 8, 192) if not TINY else (8, 4, 12)


def compare(shape: str, format: str = "bfloat16", group: int = 0) -> None:
    from hasten.engine.generate import Timing, generate
    from hasten.engine.llm import LLM
    from hasten.engine.params import SamplingParams

    model = fastest(random_model(shape, format=format, group=group))
    part = torch.randint(5, model.config.vocab_size, (REPEATED,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt, params = part * TIMES, SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    room: dict[str, Any] = {"max_sequences": 4, "max_length": len(prompt) + NEW + 16, "prefix_cache": False}
    # One engine after the other would each plan for all the memory that is free.
    engines = {kind: LLM(model, draft=kind, cache_bytes=256 << 20, **room) for kind in KINDS}
    texts: dict[str, list[int]] = {}

    def by_generate(kind: str) -> float:
        timing = Timing()
        (output,) = generate(model, [prompt], params, compiled=DEVICE != "cpu", timing=timing, draft=kind)
        texts[f"generate {kind}"] = output.tokens
        return timing.decode_tokens_per_second

    def by_engine(kind: str) -> dict[str, float]:
        before = engines[kind].stats()
        sync()
        begin = time.perf_counter()
        (answer,) = engines[kind].generate([prompt], params)
        seconds = time.perf_counter() - begin
        after = engines[kind].stats()
        texts[f"engine {kind}"] = answer.tokens
        found = {"whole_tokens_per_s": NEW / seconds, "tokens_a_step": NEW / max(1, after.steps - before.steps)}
        drafted = after.draft_tokens - before.draft_tokens
        found["accepted"] = (after.accepted_tokens - before.accepted_tokens) / drafted if drafted else 0.0
        return found | {"capture_s": after.capture_seconds - before.capture_seconds}

    for _ in range(WARM_UP):  # a step's shape is captured when it has come again and again
        for kind in KINDS:
            by_generate(kind)
            by_engine(kind)

    def measure() -> dict[str, Any]:
        """Three times each in turns, all of them kept."""
        found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        for _ in range(3):
            for kind in KINDS:
                found[kind].append({"generate_tokens_per_s": by_generate(kind)} | by_engine(kind))
        alike = {name: shared(tokens, texts[f"{name.split()[0]} none"]) for name, tokens in texts.items()}
        return {"kinds": found, "same_tokens": alike, **memory()}

    serve({"measure": measure})


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are the same: steps of other widths round otherwise in 16 bits."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
