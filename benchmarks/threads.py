"""Decode with 1 and 2 threads, by what OpenMP is told in the environment, alone and beside a process that never sleeps.

    python benchmarks/threads.py --models bf16=FOLDER int4=FOLDER --output benchmarks/results/threads.json

Every model is loaded by one process for each of `SETTINGS` (libgomp reads them when torch is imported). They stay, and
measure in turn: each round decodes after a prompt of 8, batch 1, with every number of threads and in every company.
Ratios are formed within a round.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

USUAL = "as it comes"
# libgomp lets a thread that waits for the others spin some 300,000 times before it sleeps; "no spin": not at all.
SETTINGS: dict[str, dict[str, str]] = {
    USUAL: {},
    "pinned": {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"},
    "no spin": {"OMP_WAIT_POLICY": "passive"},
}
# The neighbour is a loop in another process: wherever the system puts it, or kept on the first core.
COMPANIES = ("alone", "neighbour", "neighbour on the first core")
SPEED = "decode_tokens_per_second"


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Measure decode by threads, settings and company."""

    models: tuple[str, ...] = ()
    """NAME=FOLDER, each."""
    threads: tuple[int, ...] = (1, 2)
    settings: tuple[str, ...] = tuple(SETTINGS)
    companies: tuple[str, ...] = COMPANIES
    seconds: float = 0.6
    """Of one measurement."""
    rounds: int = 6
    output: Path | None = None
    """Write the JSON here."""
    worker: Path | None = None
    """Load this folder and obey standard input (what the measured processes do)."""

    def run(self) -> None:
        if self.worker is not None:
            serve(self.worker)
            return
        from hasten.machine.files import write_json

        workers: dict[tuple[str, str], Any] = {}
        for model in self.models:
            name, _, folder = model.partition("=")
            for setting in self.settings:
                workers[name, setting] = start(folder, SETTINGS[setting])
        rounds = []
        for index in range(self.rounds):
            # Each process is the first of a round in turn: what comes first finds colder caches.
            turn = index * 3 % len(workers)
            order = [*list(workers)[turn:], *list(workers)[:turn]]
            rounds.append(self.round({key: workers[key] for key in order}))
            print(f"round {index + 1} of {self.rounds}", file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
        report = summarise(rounds, self.seconds)
        write_json("-", report)
        write_json(self.output, report)

    def round(self, workers: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
        found = []
        for company in self.companies:
            with neighbour(company):
                for threads in self.threads:
                    for (name, setting), worker in workers.items():
                        worker.stdin.write(json.dumps({"threads": threads, "seconds": self.seconds}) + "\n")
                        worker.stdin.flush()
                        answer = json.loads(worker.stdout.readline())
                        case = {"model": name, "threads": threads, "company": company, "setting": setting}
                        found.append(case | answer)
        return found


@contextmanager
def neighbour(company: str) -> Iterator[None]:
    if company == "alone":
        yield
        return
    stay = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" if "first core" in company else ""
    process = subprocess.Popen([sys.executable, "-c", f"{stay}while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def start(folder: str, environment: dict[str, str]) -> Any:
    """A process that holds the model, ready when this returns."""
    worker = subprocess.Popen(
        [sys.executable, __file__, "--worker", folder],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    if not worker.stdout.readline():
        raise SystemExit(f"{folder} could not be loaded")
    return worker


def serve(folder: Path) -> None:
    import torch

    import hasten
    from hasten.engine.given_texts import GivenTexts

    model = hasten.fuse(hasten.load(folder, dtype="bfloat16"))
    decoder = GivenTexts(model, batch=1, capacity=256)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        decoder.truncate(0)
        decoder.prefill([[5, 6, 7, 8, 9, 10, 11, 12]])
        decoder.decode(torch.tensor([3]))  # the first touch of everything
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < asked["seconds"] and done < 200:
            decoder.decode(torch.tensor([done]))
            done += 1
        print(json.dumps({SPEED: done / (time.perf_counter() - begin)}), flush=True)


def summarise(rounds: list[list[dict[str, Any]]], seconds: float) -> dict[str, Any]:
    """Median, least and most of each case, and the median of its ratio to what comes by itself within a round."""
    from hasten.machine import describe

    keys = ("model", "threads", "company", "setting")
    speeds = [{tuple(case[key] for key in keys): case[SPEED] for case in found} for found in rounds]
    rows = []
    for case in sorted(speeds[0], key=lambda case: (case[0], case[1], COMPANIES.index(case[2]))):
        own = [found[case] for found in speeds]
        row = dict(zip(keys, case, strict=True)) | {SPEED: median(own), "min": min(own), "max": max(own)}
        usual = (*case[:3], USUAL)
        if usual in speeds[0]:
            row["over_as_it_comes"] = median(found[case] / found[usual] for found in speeds)
        rows.append(row)
    return {
        "schema": 1,
        "machine": describe().to_json(),
        "what": f"decode after 8 tokens for {seconds} s, batch 1, the fused native kernels; tokens/s",
        "settings": SETTINGS,
        "rows": rows,
        "rounds": rounds,
    }


if __name__ == "__main__":
    tyro.cli(Threads).run()
