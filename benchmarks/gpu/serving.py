"""Many sequences: the engine that serves, and the captured static step that it is measured against."""

import time
from typing import Any

import torch

from gpu.models import decoder_of, fastest, random_model
from gpu.worker import TINY, kernel_table, memory, serve, sync

PROMPT, NEW = (128, 128) if not TINY else (8, 8)
COUNTS = (1, 64, 256) if not TINY else (1, 2)


def engine(shape: str, format: str = "bfloat16", group: int = 0) -> None:
    """`hasten.LLM` with prompts of PROMPT tokens, all there from the beginning, NEW tokens each.

    A run of NEW tokens and one of a quarter of them: their difference is decode steps only.
    """
    from hasten.engine.llm import LLM
    from hasten.engine.params import SamplingParams

    model = fastest(random_model(shape, format=format, group=group))
    most = max(COUNTS)
    llm = LLM(
        model,
        max_sequences=most,
        max_length=PROMPT + NEW + 16,
        prefix_cache=False,
        cache_bytes=(12 << 30) if not TINY else (8 << 20),
    )
    ids = torch.randint(5, model.config.vocab_size, (most, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()

    def run(count: int, new: int) -> float:
        params = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
        sync()
        begin = time.perf_counter()
        answers = llm.generate(ids[:count], params)
        seconds = time.perf_counter() - begin
        assert all(len(one.tokens) == new for one in answers)
        return seconds

    captured = -1
    for _ in range(6):  # captures and compiles what these sizes need, until nothing new comes
        for count in COUNTS:
            run(count, 12 if not TINY else 2)
        captured, before = llm.stats().captured_steps, captured
        if captured == before:
            break

    def measure(text: str) -> dict[str, Any]:
        count = min(int(text), most)
        run(count, NEW // 4)  # what is still compiled or captured must not slow down the shorter of the two runs
        before = llm.stats()
        short = run(count, NEW // 4)
        middle = llm.stats()
        seconds = run(count, NEW)
        after = llm.stats()
        decoded = count * (NEW - NEW // 4)
        steps = (after.steps - middle.steps) - (middle.steps - before.steps)
        return {
            "sequences": count,
            "whole_tokens_per_s": count * NEW / seconds,
            "decode_tokens_per_s": decoded / max(seconds - short, 1e-9),
            "ms_per_decode_step": 1e3 * (seconds - short) / max(1, steps),
            "first_steps_s": short,
            **memory(),
        }

    def profile(text: str) -> dict[str, Any]:
        count = min(int(text), most)
        begin = llm.stats().steps
        run(count, 12)
        steps = llm.stats().steps - begin
        return {"steps": steps} | kernel_table(lambda: run(count, 12), max(1, steps), 12)

    serve({"measure": measure, "profile": profile})


def static(shape: str, format: str = "bfloat16", group: int = 0, counts: tuple[int, ...] = COUNTS) -> None:
    """The same decode steps by the captured static step: what the engine could reach without the host."""
    new = NEW - NEW // 4
    model = fastest(random_model(shape, format=format, group=group))
    ready = {}
    for count in counts if not TINY else COUNTS:
        decoder = decoder_of(model, batch=count, capacity=PROMPT + NEW)
        ids = torch.randint(5, model.config.vocab_size, (count, PROMPT)).tolist()
        tokens = decoder.prefill(ids).argmax(-1)
        for _ in range(NEW // 4):  # from where `engine` counts
            tokens = decoder.decode(tokens).argmax(-1)
        ready[count] = decoder, tokens.clone()
    sync()

    def measure(text: str) -> dict[str, Any]:
        count = int(text) if not TINY else COUNTS[-1]
        decoder, tokens = ready[count]
        decoder.truncate(PROMPT + NEW // 4)
        sync()
        begin = time.perf_counter()
        for _ in range(new):
            tokens = decoder.decode(tokens).argmax(-1)
        sync()
        seconds = time.perf_counter() - begin
        found = {"sequences": count, "decode_tokens_per_s": count * new / seconds}
        return found | {"ms_per_decode_step": 1e3 * seconds / new, **memory()}

    serve({"measure": measure})
