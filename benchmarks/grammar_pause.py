"""How long another client's stream pauses while JSON schemas that cannot be followed are asked for.

    python benchmarks/grammar_pause.py MODEL --json FILE

It starts `hasten serve`, reads one stream, and meanwhile sends schemas: patterns that explode at once, and behind other
fields, and objects of very many optional fields. Reported are the longest and the median time between two events of the
stream, in seconds, and the statuses of the others, which have to be 400.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any

import httpx
from serving_process import serving

from hasten.machine import describe
from hasten.machine.files import write_json

BOMB = {"type": "string", "pattern": "^((a{100}){100}){100}$"}
LATE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["x"]},
        "text": {"type": "string", "minLength": 30, "maxLength": 400},
        "name": BOMB,
    },
    "required": ["kind", "text", "name"],
    "additionalProperties": False,
}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 0),
    "one exploding pattern": (BOMB, 1),
    "twelve": (BOMB, 12),
    "one behind other fields": (LATE, 1),
    "twelve behind other fields": (LATE, 12),
    "four objects of 2,000 optional fields": (MANY, 4),
}


async def stream(client: httpx.AsyncClient, name: str) -> list[float]:
    """Seconds between the events of a stream."""
    body = {"model": name, "prompt": "bb", "max_tokens": 900, "ignore_eos": True, "stream": True}
    times = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data"):
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


async def ask(client: httpx.AsyncClient, name: str, schema: dict[str, Any], title: str) -> int:
    """The status of a request with a schema that was not seen before."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"title": title}}}
    body = {"model": name, "prompt": "a", "max_tokens": 600, "response_format": form}
    await asyncio.sleep(0.15)
    return (await client.post("/v1/completions", json=body)).status_code


async def measure(url: str) -> list[dict[str, Any]]:
    rows = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        await stream(client, name)
        for case, (schema, count) in CASES.items():
            others = [ask(client, name, schema, f"{case} {i}") for i in range(count)]
            gaps, statuses = await asyncio.gather(stream(client, name), asyncio.gather(*others))
            rows.append({"case": case, "longest": max(gaps), "median": statistics.median(gaps), "statuses": statuses})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", help="write the report to this file")
    options = parser.parse_args()
    with serving(options.model) as url:
        rows = asyncio.run(measure(url))
    if options.json:
        report = {"schema": 1, "kind": "grammar-pause", "machine": describe().to_json(), "seconds": rows}
        write_json(options.json, report)


if __name__ == "__main__":
    main()
