"""What every program is asked to do, and how it answers. Runs in each program's own environment: standard library only.

A turn, batch 1: the prefill of 512 random tokens, and the decode of 64 random tokens, one by one, after 8; `--short`,
for slow machines: 128, and 24 after 8. A program takes one turn that is not counted, prints a line
`{"versions": {…}, "settings": {…}}`, and then takes a turn for each line of its standard input, until that ends, and
answers with a line `{"prefill": tokens/s, "decode": tokens/s}`.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any


@dataclass(frozen=True)
class Work:
    """How many tokens are taken in, how many are decoded after how many, and in how many turns of a process."""

    prefill: int = 512
    decode: int = 64
    before: int = 8
    turns: int = 3

    def __str__(self) -> str:
        return (
            f"prefill of {self.prefill} random tokens; decode of {self.decode} after {self.before}; batch 1; tokens/s; "
            f"both programs of a pair live through a round and take {self.turns} turns each, stopped between them"
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


Turn = Callable[[], tuple[float, float]]  # the speeds of prefill and decode, tokens/s


def steps(work: Work, reset: Callable[[], None], feed: Callable[[list[int]], None], *, vocabulary: int) -> Turn:
    """A program that is fed tokens: reset() forgets the sequence, feed(tokens) appends to it and waits."""

    def turn() -> tuple[float, float]:
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
        return prefill, work.decode / (time.perf_counter() - start)

    return turn


def answers(work: Work, generate: Callable[[list[int], int], None], *, vocabulary: int) -> Turn:
    """A program that is given a prompt and a number of tokens to answer: decode is the difference of two answers."""

    def seconds(prompt: int, answer: int) -> float:
        ids = tokens(prompt, vocabulary)
        start = time.perf_counter()
        generate(ids, answer)
        return time.perf_counter() - start

    def turn() -> tuple[float, float]:
        prefill = work.prefill / seconds(work.prefill, 1)
        first = seconds(work.before, 1)
        return prefill, work.decode / (seconds(work.before, work.decode + 1) - first)

    return turn


def take_turns(turn: Turn, *, packages: Sequence[str], **settings: Any) -> None:
    """Take a first turn, say what runs, and take a turn for each line of the standard input."""
    turn()
    _say({"versions": {name: version(name) for name in packages}, "settings": settings})
    for _ in sys.stdin:
        prefill, decode = turn()
        _say({"prefill": prefill, "decode": decode})


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)
