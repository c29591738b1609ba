"""How fast a server answers, how soon it starts, and how long running texts pause.

    python benchmarks/serving.py llm --hasten bf16=FOLDER int8=FOLDER --vllm PYTHON FOLDER \\
        --output benchmarks/results/compare-serving.json
    python benchmarks/serving.py fairness --output benchmarks/results/serve-fairness.json
    python benchmarks/serving.py restart --output benchmarks/results/serve-restart.json
    python benchmarks/serving.py start --models demo=FOLDER llama-1.1b=FOLDER,--quantize,int8 \\
        --output benchmarks/results/serve-start.json

Load tests are `hasten bench serve`.
"""

import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

import hasten
from hasten.bench.serve_restart import restart_round, say_something
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.engine.settings import EngineSettings
from hasten.machine.measure import limited_threads, matrix_rate, read_bandwidth
from hasten.measure.script import Report, Script, Table, TimedScript, main, markdown
from hasten.measure.workers import Worker, serving
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.planning.shapes import SHAPES


@dataclass(frozen=True, kw_only=True)
class LlmBesideVllm(Script):
    """Output tokens/s of hasten.LLM and of vLLM on the same weights, in interleaved rounds.

    Every program is started once and loads its model; between its turns it is stopped (SIGSTOP), so that a program
    which waits busily takes nothing from the others. A turn is all requests at once: random prompts of 128 tokens,
    answers of 64, no end-of-text, greedy. The last turns of ours are 4 samples a prompt: shared, and as requests of
    their own.

    After each round the machine's limits are measured, and from them what no program could exceed at a turn: all
    prompts' products at the matrix rate, then a step for each token of an answer, at the matrix rate or at the
    memory's, whichever is slower (attention, norms and the cache cost nothing in this bound).
    """

    result, of_this_machine = "compare-serving", ("hasten", "vllm")
    hasten: tuple[str, ...]
    """NAME=FOLDER of each of ours."""
    vllm: tuple[str, str] | None = None
    """The Python that has vLLM, and the folder."""
    rounds: int = 3
    threads: int = 2

    def measure(self) -> Report:
        programs, rounds, limits = list[Program](), list[dict[str, dict[str, Any]]](), list[dict[str, float]]()
        try:
            if self.vllm is not None:
                programs.append(Program("vllm", self.vllm[0], "serve_vllm.py", self.vllm[1], self.threads))
            for name, _, folder in (item.partition("=") for item in self.hasten):
                programs.append(Program(f"hasten {name}", sys.executable, "serve_hasten.py", folder, self.threads))
            for _ in range(self.rounds):
                found: dict[str, dict[str, Any]] = {}
                for turn, order in (TURNS | SAMPLES).items():
                    for program in programs:
                        if turn not in SAMPLES or program.name != "vllm":
                            one = program.turn(*order)
                            one["tokens_per_second"] = one["output_tokens"] / one["seconds"]
                            found.setdefault(turn, {})[program.name] = one
                rounds.append(found)
                limits.append(measured_limits(self.threads))
        finally:
            for program in programs:
                program.close()
        return {
            "kind": "compare-serving",
            "workload": {"prompt_tokens": PROMPT, "output_tokens": ANSWER, "threads": self.threads},
            "versions": {program.name: program.versions for program in programs},
            "start_seconds": {program.name: round(program.start_seconds, 1) for program in programs},
            "output_tokens_per_second": turn_medians(rounds),
            "ratios": turn_ratios(rounds),
            "limits": limits,
            "bounds": speed_bounds(limits),
            "rounds": rounds,
        }


@dataclass(frozen=True, kw_only=True)
class ServeStart(Script):
    """Seconds from `hasten serve` to where it listens, to /ready, and to the first token of a first request.

    Medians over the rounds, each in a process of its own, the kernels built beforehand.
    """

    of_this_machine = ("models",)
    models: tuple[str, ...]
    """NAME=MODEL[,OPTION…] of each."""
    rounds: int = 3

    def measure(self) -> Report:
        rows: list[dict[str, Any]] = []
        for name, _, rest in (item.partition("=") for item in self.models):
            model, *extra = rest.split(",")
            started_server(model, extra)  # builds kernels and fills the page cache
            rounds = [started_server(model, extra) for _ in range(self.rounds)]
            medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
            rows.append({"name": name, "options": extra, **medians, "rounds": rounds})
            print(rows[-1], flush=True)
        return {"kind": "serve-start", "seconds": rows}


@dataclass(frozen=True, kw_only=True)
class ServeRestart(Script):
    """Seconds to the first token of a coding agent's first request (`hasten.bench.serve_restart`), by `hasten serve`.

    In each round: by a server without --prefix-cache; by one with an empty folder, which it fills; by one started
    again on that folder, whose files are first dropped from the page cache; and by the same once more, from memory.
    Each server says something short before. All four must answer the same text.
    """

    result = "serve-restart"
    model: str = "gemma3-270m"
    rounds: int = 1
    max_tokens: int = 16

    def measure(self) -> Report:
        rounds = [restart_round(self.model, max_tokens=self.max_tokens) for _ in range(self.rounds)]
        medians = {way: median(one[way]["first_token"] for one in rounds) for way in rounds[0]}
        share = median(one["restarted"]["first_token"] / one["without"]["first_token"] for one in rounds)
        same = len({found["text"] for one in rounds for found in one.values()}) == 1
        return {"kind": "serve-restart", "first_token": medians, "share": share, "passed": same, "rounds": rounds}


PEERS = Path(__file__).parent / "peers"
PROMPT, ANSWER = 128, 64
PARAMETERS = 1_034_420_224  # of the 1.1 B shape's matrix products; its embedding is only looked up
HEAD = 32_000 * 2048  # of them; a prompt needs it for its last token only
# name -> requests, samples of each, times that each prompt is sent
TURNS = {"8": (8, 1, 1), "32": (32, 1, 1)}
SAMPLES = {"8 prompts, 4 samples shared": (8, 4, 1), "8 prompts, 4 requests each": (8, 1, 4)}


class Program(Worker):
    """One engine with its model in a process of its own, which is stopped between its turns."""

    def __init__(self, name: str, python: str, script: str, model: str, threads: int) -> None:
        start = time.monotonic()
        super().__init__(name, [python, PEERS / script, model, "--threads", threads])
        self.versions = self.answer()
        self.start_seconds = time.monotonic() - start
        self._signal(signal.SIGSTOP)

    def turn(self, requests: int, samples: int, repeated: int) -> dict[str, float]:
        self._signal(signal.SIGCONT)
        found: dict[str, float] = self.ask(f"{requests} {PROMPT} {ANSWER} {samples} {repeated}")
        self._signal(signal.SIGSTOP)
        expected = requests * samples * repeated * ANSWER
        if found["output_tokens"] != expected:
            sys.exit(f"{self.name} gave {found['output_tokens']} tokens; {expected} were requested")
        return found

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)  # its own children too


def measured_limits(threads: int) -> dict[str, float]:
    """Bytes/s of memory, FLOP/s in bfloat16, OP/s in int8."""
    with limited_threads(threads):
        bandwidth = read_bandwidth()
    return {"bandwidth": bandwidth, "bfloat16": matrix_rate("bfloat16"), "int8": matrix_rate("int8")}


def speed_bounds(limits: list[dict[str, float]]) -> dict[str, dict[str, float]]:
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


def turn_medians(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by turn and program."""
    return {
        turn: {
            name: round(statistics.median(one[turn][name]["tokens_per_second"] for one in rounds), 1)
            for name in rounds[0][turn]
        }
        for turn in rounds[0]
    }


def turn_ratios(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
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


@dataclass(frozen=True, kw_only=True)
class Fairness(TimedScript):
    """How long running texts pause while a long prompt is read: the longest time between two tokens of any of them.

    `streams` texts are written; after some steps a prompt of `prompt` tokens arrives. A pause is the time between two
    tokens of one text, so the time of a step: every step gives every text a token, which is asserted. Budgets are
    measured in turn; the last one reads the whole prompt in one step, which is what an engine without chunks does.
    """

    result = "serve-fairness"
    shape: str = "llama-120m"
    prompt: int = 1536
    """Tokens of the prompt that arrives."""
    streams: int = 4
    """Texts that are written meanwhile."""
    budgets: tuple[int, ...] = (64, 256, 512, 2048)
    """Tokens of a step."""
    before: int = 20
    """Steps before the prompt arrives, for comparison."""
    rounds: int = 5

    def measure(self) -> Report:
        model = hasten.fuse(initialize(read_config(SHAPES[self.shape]), seed=0, dtype=torch.bfloat16).eval())
        self.pauses(model, self.budgets[-1], seed=0)  # what is slow the first time
        found: dict[int, list[dict[str, float]]] = {budget: [] for budget in self.budgets}
        for number in range(self.rounds):
            for budget in self.budgets:
                found[budget].append(self.pauses(model, budget, seed=number + 1))
        rows = [
            {"budget": budget, **{name: median(one[name] for one in runs) for name in runs[0]}, "rounds": runs}
            for budget, runs in found.items()
        ]
        return {"kind": "serve-fairness", "workload": self.settings() | {"dtype": "bfloat16"}, "rows": rows}

    def pauses(self, model: Any, budget: int, *, seed: int) -> dict[str, float]:
        """Seconds: token (the median step before), pause (the longest one meanwhile), first_token (of the prompt)."""
        draw = random.Random(seed)
        engine = Engine(
            model, None, EngineSettings(max_sequences=self.streams + 1, token_budget=budget, prefix_cache=False)
        )

        def ask(name: str, count: int, answer: int) -> None:
            prompt = tuple(draw.randrange(model.config.vocab_size) for _ in range(count))
            params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=answer)
            engine.add(Request(id=name, prompt=prompt, params=params))

        names = {f"text-{i}" for i in range(self.streams)}
        for name in sorted(names):
            ask(name, 8, model.config.max_positions - 16)

        def step() -> tuple[float, set[str]]:
            start = time.perf_counter()
            pieces = engine.step()
            return time.perf_counter() - start, {piece.request_id for piece in pieces if piece.tokens}

        while step()[1] != names:
            pass
        before = [step()[0] for _ in range(self.before)]
        ask("prompt", self.prompt, 1)
        pauses: list[float] = []
        answered: set[str] = set()
        while "prompt" not in answered:
            seconds, answered = step()
            assert names <= answered, "a text got no token in a step"
            pauses.append(seconds)
        engine.close()
        return {"token": median(before), "pause": max(pauses), "first_token": sum(pauses)}


def started_server(model: str, options: list[str]) -> dict[str, float]:
    """Seconds from the command to each mark."""
    started = time.perf_counter()
    with serving(model, *options) as url:
        found = {"listening": time.perf_counter() - started}
        assert httpx.get(f"{url}/ready").status_code == 200
        found["ready"] = time.perf_counter() - started
        say_something(url)
        found["first_token"] = time.perf_counter() - started
        return found


def fairness_table(report: Report) -> str:
    """`serving.py fairness`."""
    rows = [
        [f"{one['budget']:,}", *(f"{one[key] * 1e3:.0f} ms" for key in ("token", "pause", "first_token"))]
        for one in report["rows"]
    ]
    head = ["`token_budget`", "between two tokens, before", "longest pause during the prompt", "prompt read after"]
    return markdown(head, rows, left=0)


def latency_table(report: Report) -> str:
    """`hasten bench serve --rates`."""
    rows = []
    for one in report["summary"]:
        first, each = one["ttft_ms"], one["tpot_ms"]
        rows.append(
            [
                "all at once" if one["rate"] is None else f"{one['rate']:g}",
                f"{one['output_tokens_per_second']:.0f}",
                f"{first['p50']:,.0f} ms ({first['p99']:,.0f})",
                f"{each['p50']:.0f} ms ({each['p99']:.0f})",
                f"{one['goodput_share']:.0%}",
            ]
        )
    head = ["requests/s", "output tokens/s", "TTFT, median (p99)", "TPOT, median (p99)", "goodput"]
    return markdown(head, rows, left=0)


def vllm_table(report: Report) -> str:
    """`serving.py llm`: all requests at once, beside vLLM and the bound of the machine."""
    rows = []
    for requests, bound in report["bounds"].items():
        found = report["output_tokens_per_second"][requests]
        cells = [f"{requests} requests", f"{found['vllm']:.1f}"]
        for name, dtype in (("hasten bf16", "bfloat16"), ("hasten int8", "int8")):
            ratio = report["ratios"][f"{name} / vllm at {requests}"]
            cells += [f"{found[name]:.1f}", f"{ratio:.2f}×", f"{bound[dtype]:.0f}"]
        rows.append(cells)
    head = ["output tokens/s", "vLLM, bf16", "hasten, bf16", "ratio", "bound", "hasten, int8", "ratio", "bound"]
    return markdown(head, rows)


def sample_table(report: Report) -> str:
    """`serving.py llm`: samples of one prompt that share its blocks, and the same as requests of their own."""
    speeds, kinds = report["output_tokens_per_second"], ("bf16", "int8")
    names = {
        "8 prompts, 4 samples shared": "4 samples of each of 8 prompts",
        "8 prompts, 4 requests each": "32 requests",
    }
    rows = [[text, *(f"{speeds[name][f'hasten {kind}']:.1f}" for kind in kinds)] for name, text in names.items()]
    rows.append(["ratio", *(f"{report['ratios'][f'hasten {kind}: shared / each']:.2f}×" for kind in kinds)])
    return markdown(["output tokens/s", *kinds], rows)


WAYS = ("without", "written", "restarted", "in-memory")


def restart_table(report: Report) -> str:
    """`serving.py restart`."""
    first, last = report["first_token"], report["rounds"][-1]["restarted"]
    head = ["tokens", "no folder", "filling one", "after a restart", "from memory", "restart / no folder", "read"]
    cells = [f"{last['prompt_tokens']:,}", *(f"{first[way]:.2f} s" for way in WAYS), f"{report['share']:.1%}"]
    return markdown(head, [[*cells, f"{last['bytes'] / 1e6:,.0f} MB"]], left=0)


TABLES: dict[str, Table] = {
    **dict.fromkeys(("serve-restart", "serve-restart-1.1b"), restart_table),
    "serve-fairness": fairness_table,
    "serve-latency-llama-1.1b-int8": latency_table,
    "compare-serving": vllm_table,
    "compare-serving samples": sample_table,
}


if __name__ == "__main__":
    main({"llm": LlmBesideVllm, "fairness": Fairness, "restart": ServeRestart, "start": ServeStart}, TABLES)
