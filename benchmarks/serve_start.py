"""How long `hasten serve` takes from the command to the first answer, in processes of its own.

    python benchmarks/serve_start.py --json FILE demo=FOLDER llama-1.1b-int8=FOLDER llama-1.1b=FOLDER,--quantize,int8

Each argument is NAME=MODEL[,OPTION…]. Measured are the seconds until the server says where it listens, until /ready
answers, and until the first token of a first request has come; medians over the rounds, the kernels built beforehand.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx

from hasten.machine import describe
from hasten.machine.files import write_json


def start_once(model: str, options: list[str]) -> dict[str, float]:
    """Seconds from the command to each mark."""
    command = [sys.executable, "-m", "hasten", "serve", model, "--port", "0", "--log", "error", *options]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = {"listening": time.perf_counter() - started}
        url = next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
        assert httpx.get(f"{url}/ready").status_code == 200
        found["ready"] = time.perf_counter() - started
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": list(range(300, 316)), "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found["first_token"] = time.perf_counter() - started
        return found
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL[,OPTION…]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the report to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for given in options.models:
        name, _, rest = given.partition("=")
        model, *extra = rest.split(",")
        start_once(model, extra)  # builds kernels and fills the page cache
        rounds = [start_once(model, extra) for _ in range(options.rounds)]
        medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
        rows.append({"name": name, "options": extra, **medians, "rounds": rounds})
        print(json.dumps(rows[-1]))
    if options.json:
        report = {"schema": 1, "kind": "serve-start", "machine": describe().to_json(), "seconds": rows}
        write_json(options.json, report)


if __name__ == "__main__":
    main()
