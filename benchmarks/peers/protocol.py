"""What every program is asked to do, and how it answers. Runs in each program's own environment: standard library only.

Batch 1: the prefill of 512 random tokens, and the decode of 64 random tokens, one by one, after 8. Each three times,
after one that is not counted; the median. A program answers with one line, `RESULT {"prefill": tokens/s, "decode":
tokens/s, "versions": {…}, "settings": {…}}`.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

PREFILL, BEFORE, DECODE, REPEATS = 512, 8, 64, 3
WHAT = (
    f"prefill of {PREFILL} random tokens; decode of {DECODE} after {BEFORE}; batch 1; medians of {REPEATS}; tokens/s; "
    "each program in a process of its own"
)


def arguments() -> argparse.Namespace:
    """model: a file or folder. threads. format: bf16, int8 or int4, where the model's files do not say it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", default="bf16")
    return parser.parse_args()


def tokens(count: int, vocabulary: int) -> list[int]:
    """Random ones, without the first few, which are special in many vocabularies."""
    return [random.randrange(3, vocabulary - 1) for _ in range(count)]


def measure_steps(reset: Callable[[], None], feed: Callable[[list[int]], None], *, vocabulary: int) -> dict[str, float]:
    """A program that is fed tokens: reset() forgets the sequence, feed(tokens) appends to it and waits."""
    found = []
    for _ in range(REPEATS + 1):
        reset()
        prompt = tokens(PREFILL, vocabulary)
        start = time.perf_counter()
        feed(prompt)
        prefill = PREFILL / (time.perf_counter() - start)
        reset()
        feed(tokens(BEFORE, vocabulary))
        answer = tokens(DECODE, vocabulary)
        start = time.perf_counter()
        for token in answer:
            feed([token])
        found.append((prefill, DECODE / (time.perf_counter() - start)))
    return _medians(found)


def measure_generate(generate: Callable[[list[int], int], None], *, vocabulary: int) -> dict[str, float]:
    """A program that is given a prompt and a number of tokens to answer: decode is the difference of two answers."""

    def seconds(prompt: int, answer: int) -> float:
        ids = tokens(prompt, vocabulary)
        start = time.perf_counter()
        generate(ids, answer)
        return time.perf_counter() - start

    found = []
    for _ in range(REPEATS + 1):
        prefill = PREFILL / seconds(PREFILL, 1)
        short = seconds(BEFORE, 1)
        found.append((prefill, DECODE / (seconds(BEFORE, DECODE + 1) - short)))
    return _medians(found)


def _medians(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    warm = found[1:]
    return {"prefill": median(pair[0] for pair in warm), "decode": median(pair[1] for pair in warm)}


def answer(found: dict[str, float], *, packages: Sequence[str], **settings: Any) -> None:
    """Print the RESULT line."""
    versions = {name: version(name) for name in packages}
    print("RESULT " + json.dumps({**found, "versions": versions, "settings": settings}), flush=True)
