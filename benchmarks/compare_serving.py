"""Output tokens/s of hasten.LLM and of vLLM on the same weights, in interleaved rounds.

    python benchmarks/compare_serving.py --output benchmarks/results/compare-serving.json \
        --hasten bf16=FOLDER int8=FOLDER --vllm PYTHON FOLDER --rounds 3

Every program is started once and loads its model; between its turns it is stopped (SIGSTOP), so that a program which
waits busily takes nothing from the others. A turn is all requests at once: random prompts of 128 tokens, answers of 64,
no end-of-text, greedy. The last turns of ours are 4 samples a prompt: shared, and as requests of their own.

After each round the machine's limits are measured, and from them what no program could exceed at a turn: all prompts'
products at the matrix rate, then a step for each token of an answer, at the matrix rate or at the memory's, whichever
is slower (attention, norms and the cache cost nothing in this bound).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
PROMPT, ANSWER = 128, 64
PARAMETERS = 1_034_420_224  # of the 1.1 B shape's matrix products; its embedding is only looked up
HEAD = 32_000 * 2048  # of them; a prompt needs it for its last token only
# name -> requests, samples of each, times that each prompt is sent
TURNS = {"8": (8, 1, 1), "32": (32, 1, 1)}
SAMPLES = {"8 prompts, 4 samples shared": (8, 4, 1), "8 prompts, 4 requests each": (8, 1, 4)}


class Program:
    """One engine with its model in a process of its own."""

    def __init__(self, name: str, python: str, script: str, model: str, threads: int) -> None:
        self.name = name
        start = time.monotonic()
        command = [python, str(PEERS / script), model, "--threads", str(threads)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.versions = json.loads(self._line("READY"))
        self.start_seconds = time.monotonic() - start
        self._signal(signal.SIGSTOP)

    def turn(self, requests: int, samples: int, repeated: int) -> dict[str, float]:
        self._signal(signal.SIGCONT)
        assert self.child.stdin is not None
        self.child.stdin.write(f"{requests} {PROMPT} {ANSWER} {samples} {repeated}\n")
        self.child.stdin.flush()
        found: dict[str, float] = json.loads(self._line("ANSWER"))
        self._signal(signal.SIGSTOP)
        expected = requests * samples * repeated * ANSWER
        if found["output_tokens"] != expected:
            sys.exit(f"{self.name} gave {found['output_tokens']} tokens; {expected} were asked for")
        return found

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.child.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self.child.pid, number)  # its own children too

    def _line(self, word: str) -> str:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        sys.exit(f"{self.name} ended before it said {word}; its own words stand above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hasten", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    programs: list[Program] = []
    rounds: list[dict[str, dict[str, Any]]] = []
    limits: list[dict[str, float]] = []
    try:
        if given.vllm:
            programs.append(Program("vllm", given.vllm[0], "serve_vllm.py", given.vllm[1], given.threads))
        for item in given.hasten:
            name, folder = item.split("=", 1)
            programs.append(Program(f"hasten {name}", sys.executable, "serve_hasten.py", folder, given.threads))
        for number in range(given.rounds):
            found: dict[str, dict[str, Any]] = {}
            for turn, order in (TURNS | SAMPLES).items():
                for program in programs:
                    if turn in SAMPLES and program.name == "vllm":
                        continue
                    one = program.turn(*order)
                    one["tokens_per_second"] = one["output_tokens"] / one["seconds"]
                    found.setdefault(turn, {})[program.name] = one
                    print(f"round {number + 1}, {turn}: {program.name} {one['tokens_per_second']:.1f}", file=sys.stderr)
            rounds.append(found)
            limits.append(measured_limits(given.threads))
    finally:
        for program in programs:
            program.close()
    from hasten.machine import describe
    from hasten.machine.files import write_json

    report = {
        "schema": 1,
        "kind": "compare-serving",
        "machine": describe().to_json(),
        "workload": {"prompt_tokens": PROMPT, "output_tokens": ANSWER, "threads": given.threads},
        "versions": {program.name: program.versions for program in programs},
        "start_seconds": {program.name: round(program.start_seconds, 1) for program in programs},
        "output_tokens_per_second": medians(rounds),
        "ratios": ratios(rounds),
        "limits": limits,
        "bounds": bounds(limits),
        "rounds": rounds,
    }
    write_json(given.output, report)
    print(json.dumps({name: report[name] for name in ("output_tokens_per_second", "bounds", "ratios")}, indent=2))


def measured_limits(threads: int) -> dict[str, float]:
    """Bytes/s of memory, FLOP/s in bfloat16, OP/s in int8."""
    from hasten.machine.measure import limited_threads, matrix_rate, read_bandwidth

    with limited_threads(threads):
        bandwidth = read_bandwidth()
    return {"bandwidth": bandwidth, "bfloat16": matrix_rate("bfloat16"), "int8": matrix_rate("int8")}


def bounds(limits: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Output tokens/s that the largest limits of the rounds allow, of each turn without shared samples."""
    best = {name: max(one[name] for one in limits) for name in limits[0]}
    found = {}
    for turn, (requests, _, _) in TURNS.items():
        found[turn] = {}
        for name, size in (("bfloat16", 2), ("int8", 1)):
            prompts = requests * 2 * (PROMPT * (PARAMETERS - HEAD) + HEAD) / best[name]
            step = max(requests * 2 * PARAMETERS / best[name], PARAMETERS * size / best["bandwidth"])
            # A prompt gives the first token of its answer.
            found[turn][name] = round(requests * ANSWER / (prompts + (ANSWER - 1) * step), 1)
    return found


def medians(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each turn and program over the rounds."""
    return {
        turn: {
            name: round(statistics.median(one[turn][name]["tokens_per_second"] for one in rounds), 1)
            for name in rounds[0][turn]
        }
        for turn in rounds[0]
    }


def ratios(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Medians of the ratios within a round: ours to vLLM, and 4 samples shared to 4 requests each."""
    shared, apart = SAMPLES
    found = {}
    for name in rounds[0][shared]:

        def median(top: tuple[str, str], bottom: tuple[str, str]) -> float:
            def speed(one: dict[str, dict[str, Any]], at: tuple[str, str]) -> float:
                return float(one[at[0]][at[1]]["tokens_per_second"])

            return round(statistics.median(speed(one, top) / speed(one, bottom) for one in rounds), 3)

        for turn in TURNS:
            if "vllm" in rounds[0][turn]:
                found[f"{name} / vllm at {turn}"] = median((turn, name), (turn, "vllm"))
        found[f"{name}: shared / each"] = median((shared, name), (apart, name))
    return found


if __name__ == "__main__":
    main()
