"""Two replicas of one thread beside one engine of two threads, on the same two cores, in turns.

    python benchmarks/replica_throughput.py        # -> benchmarks/results/replica-throughput.json

Needs `hasten[ray]`. Both servers are up all the time; one at a time is asked. Requests are sent at once, with random
prompts that share nothing; answers are streamed, or whole. Output tokens/s, the median and the best of the rounds (what
else runs here slows threads that wait for each other more than processes that do not). The processor time of all
processes of a server stands beside it: what a replica's way through Ray costs is taken from the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from serving_process import serving

from hasten.machine import describe
from hasten.machine.files import save_json

RESULT = Path(__file__).parent / "results" / "replica-throughput.json"
SIDES = {
    "one engine of two threads": ("--threads", "2"),
    "two replicas of one thread": ("--replicas", "2", "--threads", "1"),
}


def make_model(shape: str, folder: str) -> None:
    """A random model of the shape in bfloat16, with a byte tokenizer that nobody asks."""
    import torch

    import hasten
    from hasten.model.families import read_config
    from hasten.model.initialize import initialize
    from hasten.planning.shapes import SHAPES

    hasten.save(initialize(read_config(SHAPES[shape]), seed=0, dtype=torch.bfloat16).eval(), folder)


async def load(url: str, given: argparse.Namespace, *, stream: bool, seed: int) -> float:
    """Seconds until all requests are answered."""
    draw = random.Random(seed)
    model = Path(given.folder).name

    async def one(client: httpx.AsyncClient) -> None:
        prompt = [draw.randrange(1, 30_000) for _ in range(given.prompt_tokens)]
        body = {"model": model, "prompt": prompt, "max_tokens": given.new_tokens, "temperature": 0, "ignore_eos": True}
        if not stream:
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == given.new_tokens, answer.text
            return
        more = {"stream": True, "stream_options": {"include_usage": True}}
        usage: Any = None
        async with client.stream("POST", "/v1/completions", json=body | more) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:])["usage"] or usage
        assert usage["completion_tokens"] == given.new_tokens, usage

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(given.requests)))
        return time.perf_counter() - began


def processor_time(port: int) -> float:
    """Of the process that listens there, and all that it has started."""
    owner = next(
        c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port and c.pid
    )
    total = 0.0
    for process in (psutil.Process(owner), *psutil.Process(owner).children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for docs/replicas.md."""
    head = ["output tokens/s, median (best round)", "whole answers", "streamed", "idle, share of a core"]
    rows = []
    for side in SIDES:
        own = [one for one in report["rows"] if one["side"] == side]
        rates = [
            f"{one['tokens_per_second']:.0f} ({one['best_tokens_per_second']:.0f})"
            for kind in (False, True)
            for one in own
            if one["stream"] == kind
        ]
        rows.append([side, *rates, f"{report['idle'][side]:.1%}"])
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-120m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        given.folder = f"{temporary}/model"
        make_model(given.shape, given.folder)
        # No drafts: random models answer in loops, which drafts foresee.
        urls = {
            side: stack.enter_context(serving(given.folder, "--draft", "none", *how)) for side, how in SIDES.items()
        }
        ports = {side: int(url.rsplit(":", 1)[1]) for side, url in urls.items()}
        before = {side: processor_time(port) for side, port in ports.items()}
        time.sleep(5.0)
        idle = {side: (processor_time(port) - before[side]) / 5.0 for side, port in ports.items()}
        found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for number in range(given.rounds + 1):
            for stream in (False, True):
                for side, url in urls.items():
                    used = processor_time(ports[side])
                    seconds = asyncio.run(load(url, given, stream=stream, seed=number))
                    used = processor_time(ports[side]) - used
                    if number:  # the first warms up
                        found.setdefault((side, stream), []).append((seconds, used))
                    print(
                        f"{side}, {'streamed' if stream else 'whole'}: {seconds:.2f} s, {used:.2f} s of processors",
                        flush=True,
                    )
    tokens = given.requests * given.new_tokens
    rows = [
        {
            "side": side,
            "stream": stream,
            "tokens_per_second": tokens / statistics.median(seconds for seconds, _ in runs),
            "best_tokens_per_second": tokens / min(seconds for seconds, _ in runs),
            "tokens_per_processor_second": tokens / statistics.median(used for _, used in runs),
            "seconds": [seconds for seconds, _ in runs],
            "processor_seconds": [used for _, used in runs],
        }
        for (side, stream), runs in found.items()
    ]
    names = ("shape", "requests", "prompt_tokens", "new_tokens", "rounds")
    report = {"schema": 1, "kind": "replica-throughput", "machine": describe().to_json()}
    report |= {"workload": {name: getattr(given, name) for name in names}, "idle": idle, "rows": rows}
    head, lines = table(report)
    print("\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *lines]))
    save_json(given.json, report, indent=1)


if __name__ == "__main__":
    main()
