"""What every program is asked to do, and how it answers. Runs in each program's own environment: standard library only.

Batch 1: the prefill of 512 random tokens, and the decode of 64 random tokens, one by one, after 8; `--short`, for slow
machines: 128, and 24 after 8. Each three times, after one that is not counted; the median. A program answers with one
line, `RESULT {"prefill": tokens/s, "decode": tokens/s, "versions": {…}, "settings": {…}}`.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Work:
    """How many tokens are taken in, how many are decoded after how many, and how often."""

    prefill: int = 512
    decode: int = 64
    before: int = 8
    repeats: int = 3

    def __str__(self) -> str:
        return (
            f"prefill of {self.prefill} random tokens; decode of {self.decode} after {self.before}; batch 1; tokens/s; "
            f"each program in a process of its own, its figure the median of {self.repeats} repeats"
        )


LONG, SHORT = Work(), Work(prefill=128, decode=24)


def arguments() -> argparse.Namespace:
    """model: a file or folder. threads. format: bf16, int8 or int4, where the model's files do not say it. work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--short", dest="work", action="store_const", const=SHORT, default=LONG)
    return parser.parse_args()


def tokens(count: int, vocabulary: int) -> list[int]:
    """Random ones, without the first few, which are special in many vocabularies."""
    return [random.randrange(3, vocabulary - 1) for _ in range(count)]


def measure_steps(
    work: Work, reset: Callable[[], None], feed: Callable[[list[int]], None], *, vocabulary: int
) -> dict[str, float]:
    """A program that is fed tokens: reset() forgets the sequence, feed(tokens) appends to it and waits."""
    found = []
    for _ in range(work.repeats + 1):
        reset()
        prompt = tokens(work.prefill, vocabulary)
        start = time.perf_counter()
        feed(prompt)
        prefill = work.prefill / (time.perf_counter() - start)
        reset()
        feed(tokens(work.before, vocabulary))
        answer = tokens(work.decode, vocabulary)
        start = time.perf_counter()
        for token in answer:
            feed([token])
        found.append((prefill, work.decode / (time.perf_counter() - start)))
    return _medians(found)


def measure_generate(work: Work, generate: Callable[[list[int], int], None], *, vocabulary: int) -> dict[str, float]:
    """A program that is given a prompt and a number of tokens to answer: decode is the difference of two answers."""

    def seconds(prompt: int, answer: int) -> float:
        ids = tokens(prompt, vocabulary)
        start = time.perf_counter()
        generate(ids, answer)
        return time.perf_counter() - start

    found = []
    for _ in range(work.repeats + 1):
        prefill = work.prefill / seconds(work.prefill, 1)
        first = seconds(work.before, 1)
        found.append((prefill, work.decode / (seconds(work.before, work.decode + 1) - first)))
    return _medians(found)


def _medians(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    warm = found[1:]
    return {"prefill": median(pair[0] for pair in warm), "decode": median(pair[1] for pair in warm)}


def answer(found: dict[str, float], *, packages: Sequence[str], **settings: Any) -> None:
    """Print the RESULT line."""
    versions = {name: version(name) for name in packages}
    print("RESULT " + json.dumps({**found, "versions": versions, "settings": settings}), flush=True)
