"""How serving.py talks with a program: a line with a number of requests, prompt, answer, samples; JSON back."""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def serve(generate: Callable[[list[list[int]], int, int], int], *, vocabulary: int, packages: list[str]) -> None:
    """Answer orders until the input ends. generate(prompts, answer tokens, samples) -> output tokens."""

    def timed(count: int, prompt: int, answer: int, samples: int, repeated: int) -> dict[str, float]:
        source = random.Random(count)
        prompts = [[source.randrange(3, vocabulary) for _ in range(prompt)] for _ in range(count)]
        prompts = [ids for ids in prompts for _ in range(repeated)]
        start = time.perf_counter()
        tokens = generate(prompts, answer, samples)
        return {"seconds": time.perf_counter() - start, "output_tokens": tokens}

    timed(2, 16, 4, 1, 1)
    print(json.dumps({name: version(name) for name in packages}), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(*map(int, line.split()))), flush=True)
