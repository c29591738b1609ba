"""What sharing a prompt's blocks saves, and what it does for throughput.

    python benchmarks/sharing.py blocks --output benchmarks/results/sharing.json
    python benchmarks/sharing.py speed --llama-python PYTHON --output benchmarks/results/sharing-speed.json

Samples and beams of one prompt share its blocks, and copy on write what they change.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
import torch

from hasten.bench.predict import random_model
from hasten.checkpoints.gguf.write import write_gguf
from hasten.engine.blocks import BlockManager
from hasten.engine.cache import row_format
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import TextSequence
from hasten.engine.settings import EngineSettings
from hasten.measure.script import Report, Script, Table, TimedScript, main, markdown
from hasten.measure.timing import median_ratio
from hasten.measure.workers import last_json
from hasten.model.initialize import initialize
from hasten.planning.cost import kv_bytes_per_token
from hasten.planning.shapes import shape_config

BLOCK, SLOTS, SEQUENCES = 16, 15_700, 256
LONGEST = 2048  # tokens of prompt and answer, not reached
CANDIDATES, LOGIT_SPREAD = 64, 2.5
MEANS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}  # tokens of prompt and answer, as published
SPREADS = {"alpaca": (0.95, 0.95), "sharegpt": (547 / 246, 244 / 322)}  # standard deviation ÷ mean
SCALES = (1.0, 0.5, 1.5)  # of the spread; the first is the one in the table
SEEDS = {"parallel": (0, 1, 2), "beam": (0,)}
# Steps of a run; percent saved with 2 … 6 samples or beams: the ends of the published ranges.
RUNS = {
    ("alpaca", "parallel"): (2000, (6.1, 9.8)),
    ("alpaca", "beam"): (800, (37.6, 55.2)),
    ("sharegpt", "parallel"): (12_000, (16.2, 30.5)),
    ("sharegpt", "beam"): (2500, (44.3, 66.3)),
}
WIDTHS = (2, 4, 6)


def length_pairs(random: np.random.Generator, data: str, *, scale: float = 1.0, count: int = 500) -> np.ndarray:
    """Pairs (N, 2) of prompt and answer tokens below `LONGEST` together, with the published means.

    Quantiles at even distances in a random order, not draws: the few longest decide much, and chance would too.
    """
    spread = scale * np.array(SPREADS[data])
    sigma = np.sqrt(np.log1p(spread**2))
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    shape = np.exp(np.stack([random.permutation(normal), random.permutation(normal)], axis=1) * sigma)
    means = np.array(MEANS[data])
    factor = means / shape.mean(0)
    for _ in range(50):  # what is left out takes from the means: lengthen the others until they are met
        pairs = np.maximum(1, np.rint(shape * factor))
        pairs = pairs[pairs.sum(1) < LONGEST]
        factor = factor * means / pairs.mean(0)
    return pairs.astype(int)


def survivors(random: np.random.Generator, width: int) -> Iterator[list[int]]:
    """For each token of a beam search, the beam that each of the `width` best continuations comes from."""
    scores = np.array([0.0] + [-np.inf] * (width - 1))  # all continue the prompt at first
    while True:
        logits = random.normal(0, LOGIT_SPREAD, (width, CANDIDATES))
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        total = (scores[:, None] + logits).ravel()
        best = np.argpartition(total, -width)[-width:]
        scores = total[best]
        yield sorted((best // CANDIDATES).tolist())


@dataclass(slots=True, eq=False)
class Group:
    """The samples or beams of one request: at first one sequence, the prompt."""

    prompt: int
    answer: int
    members: list[TextSequence]
    chosen: Iterator[list[int]] | None  # of beams: who goes on
    ready: set[TextSequence] = field(default_factory=set)  # those that can draw a token


class Server:
    """The scheduler at work; it is never idle, the next request waits behind those that run."""

    def __init__(self, kind: str, width: int, pairs: np.ndarray, random: np.random.Generator, slots: int = SLOTS):
        self.kind, self.width, self.random = kind, width, random
        self.pairs = itertools.cycle(pairs.tolist())
        self.manager = BlockManager(blocks=slots // BLOCK, block_size=BLOCK)
        self.books = Scheduler(self.manager, max_sequences=SEQUENCES, token_budget=1 << 16)
        self.groups: dict[int, Group] = {}
        self.tokens = itertools.count()  # no two texts have one in common but what they share

    def step(self) -> float:
        """One step; blocks as if nothing were shared ÷ blocks."""
        if not self.books.waiting:
            self.arrive()
        plan = self.books.plan()
        self.books.advance(plan)
        groups = {}
        for sequence in [entry.sequence for entry in plan if entry.complete]:
            groups[sequence.request] = group = self.groups[sequence.request]
            group.ready.add(sequence)
            if len(group.members) < self.width and len(sequence.tokens) == group.prompt:  # the prompt is computed
                group.members += [self.books.fork(sequence) for _ in range(self.width - 1)]
                group.ready.update(group.members)
        stats = self.manager.stats
        for group in groups.values():
            self.grow(group)
        return (stats.used_blocks + stats.blocks_saved) / stats.used_blocks

    def arrive(self) -> None:
        prompt, answer = next(self.pairs)
        tokens = list(itertools.islice(self.tokens, prompt))
        prompt_sequence = self.books.add(tokens, slots=self.width)
        chosen = survivors(self.random, self.width) if self.kind == "beam" else None
        self.groups[prompt_sequence.request] = Group(prompt, answer, [prompt_sequence], chosen)

    def grow(self, group: Group) -> None:
        """A token for every sample that is ready; for beams when all are, because they are chosen together."""
        if group.chosen is not None:
            if len(group.ready) < len(group.members):
                return
            self.choose(group, next(group.chosen))
            group.ready = set(group.members)
        for member in group.ready:
            self.books.accept(member, [next(self.tokens)])
            if len(member.tokens) == group.prompt + group.answer:
                self.books.finish(member)
        group.ready.clear()

    def choose(self, group: Group, parents: list[int]) -> None:
        """Member i goes on from what member parents[i] has; what nobody continues ends."""
        for index in set(range(len(group.members))) - set(parents):
            self.books.finish(group.members[index])
        kept: list[TextSequence] = []
        for parent in (group.members[index] for index in parents):
            kept.append(self.books.fork(parent) if parent in kept else parent)
        group.members = kept


def saved(kind: str, width: int, pairs: np.ndarray, random: np.random.Generator, *, steps: int) -> float:
    """Percent of the blocks without sharing that are saved."""
    server = Server(kind, width, pairs, random)
    ratios = [server.step() for _ in range(steps)]
    server.books.check()
    return 100 * (1 - 1 / float(np.mean(ratios[steps // 3 :])))


def saved_row(data: str, kind: str, scale: float) -> dict[str, Any]:
    """One line of the table: the means over the seeds, and each of them."""
    runs = []
    for seed in SEEDS[kind]:
        random = np.random.default_rng(seed)
        pairs = length_pairs(random, data, scale=scale)
        runs.append([saved(kind, width, pairs, random, steps=RUNS[data, kind][0]) for width in WIDTHS])
    return {
        "lengths": data,
        "kind": kind,
        "scale": scale,
        "spread": (pairs.std(0) / pairs.mean(0)).round(2).tolist(),
        "saved": dict(zip(WIDTHS, np.mean(runs, axis=0).round(1).tolist(), strict=True)),
        "runs": np.round(runs, 1).tolist(),
        "published": RUNS[data, kind][1],
    }


@dataclass(frozen=True, kw_only=True)
class SharedBlocks(Script):
    """How many blocks sharing saves, for parallel sampling and beam search as PagedAttention published it (minutes).

    Drives the engine's `Scheduler` and `BlockManager` through a serving run without a model. Like the published one
    (arXiv 2309.06180, figure 15; the authors' scheduler counted and their script for the figure averaged):

    - In each step the blocks of all running sequences are counted, as if nothing were shared and as they are; the
      quotient is averaged over the steps, the first third of the run left out; saved is 1 - 1 / that average.
    - The cache has the 15.7 thousand slots of their OPT-13B on one A100 (their table 1) in blocks of 16, and at most
      256 sequences run. Pairs of 2,048 tokens and more are left out, and all samples get the length of the answer.

    Not published are the request rate with ShareGPT (here requests always wait, so that as many run as fit) and:

    - How lengths are spread around the published means. Here they are lognormal and independent: 500 pairs, for samples
      the mean of three random orders. For ShareGPT standard deviation ÷ mean is 547 ÷ 246 for prompts and 244 ÷ 322 for
      answers (arXiv 2408.12757, table 4, another cut of the same conversations). For Alpaca both are 0.95, which is
      σ = 0.8 of the logarithm: no figure is known to us. The JSON has narrower and wider ones too.
    - A beam's next token has log-probabilities of normally distributed logits over 64 candidates, standard deviation
      2.5 (entropy near 1.8 nats); the best k of all go on, as in a beam search.
    """

    result = "sharing"

    def measure(self) -> Report:
        rows = [saved_row(data, kind, scale) for data, kind in RUNS for scale in SCALES]
        settings = {"seeds": SEEDS, "block_size": BLOCK, "slots": SLOTS, "sequences": SEQUENCES, "means": MEANS}
        return {"schema": 2, "settings": settings, "rows": rows}


PEER = Path(__file__).parent / "peers" / "parallel_llama_cpp.py"


@dataclass(frozen=True, kw_only=True)
class SharingSpeed(TimedScript):
    """Samples and beams of one request beside as many requests of their own, in tokens of answers a second.

    The real engine over a cache of fixed size, a queue that is never empty until the end, random weights. Five ways, in
    turns, for n samples of each prompt:

    - samples: one request, n samples; they share the prompt's blocks.
    - cached: n requests of the same prompt, the prefix cache on. alone: the same without a prefix cache.
    - beams: one request, n beams.
    - beams by requests: every token of every beam a request of its own over the prefix cache, which gives the likeliest
      tokens to choose from: how beam search is made where an engine does not support it.

    llama.cpp (`peers/parallel_llama_cpp.py`): n sequences of one prompt, whose cells they share, and n prompts of their
    own; as many prompts at a time as the same cache holds.
    """

    result = "sharing-speed"
    shape: str = "llama-120m"
    """A named shape."""
    samples: tuple[int, ...] = (2, 4, 6)
    """Samples of each prompt."""
    prompts: int = 4
    """That wait at the beginning."""
    prompt_tokens: int = 161
    """Length of each: ShareGPT's mean, as in the paper."""
    new_tokens: int = 96
    """Length of each sample."""
    beam_tokens: int = 24
    """Length of each beam: a request for each token of each takes its time."""
    slots: int = 2560
    """Tokens that the cache holds."""
    rounds: int = 3
    """Every way once in each, after one with two samples that warms up."""
    llama_python: Path | None = None
    """A Python that has llama-cpp-python."""

    def measure(self) -> Report:
        torch.manual_seed(0)
        config = shape_config(self.shape)
        engines = Engines(random_model(config, "bfloat16"), self)
        ways: dict[str, Callable[[int], dict[str, float]]] = {
            "samples": engines.samples,
            "cached": engines.requests,
            "alone": partial(engines.requests, prefix_cache=False),
            "beams": engines.beams,
            "beams by requests": engines.beams_by_requests,
        }
        pairs = [("samples", "cached"), ("samples", "alone"), ("beams", "beams by requests")]
        with tempfile.TemporaryDirectory() as folder:
            if self.llama_python is not None:
                file = Path(folder) / "model.gguf"
                write_gguf(initialize(config, seed=0, dtype=torch.bfloat16), file, "BF16")
                ways |= {f"llama.cpp, {kind}": partial(self.peer, file, kind) for kind in ("shared", "alone")}
                pairs += [("llama.cpp, shared", "llama.cpp, alone"), ("samples", "llama.cpp, shared")]
            for way in ways.values():
                way(2)
            return {"rows": [self.row(n, ways, pairs) for n in self.samples]}

    def row(self, n: int, ways: Mapping[str, Callable[[int], Any]], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(self.rounds):
            for name, way in ways.items():
                found[name].append(way(n))
        medians = {name: {key: median(one[key] for one in each) for key in each[0]} for name, each in found.items()}
        speeds = {name: [one["tokens_per_second"] for one in each] for name, each in found.items()}
        ratios = {f"{a} / {b}": median_ratio(speeds[a], speeds[b]) for a, b in pairs}
        return {"samples": n, "ways": medians, "ratios": ratios, "rounds": speeds}

    def peer(self, file: Path, kind: str, n: int) -> dict[str, float]:
        """llama.cpp in a process of its own."""
        sizes = [n, self.prompts, self.prompt_tokens, self.new_tokens, self.slots, self.threads]
        return dict(last_json([self.llama_python, PEER, file, kind, *sizes]))


class Engines:
    """The ways, over a cache of the same size."""

    def __init__(self, model: Any, options: SharingSpeed) -> None:
        self.model, self.options = model, options
        generator = torch.Generator().manual_seed(0)
        shape = (options.prompts, options.prompt_tokens)
        self.prompts = torch.randint(3, model.config.vocab_size, shape, generator=generator).tolist()

    def engine(self, *, prefix_cache: bool = True) -> Any:
        config = self.model.config
        row = row_format("auto").bytes(config.head_dim, torch.bfloat16)
        size = int(self.options.slots * kv_bytes_per_token(config, row / config.head_dim))
        most = self.options.prompt_tokens + max(self.options.new_tokens, self.options.beam_tokens)
        return Engine(self.model, None, EngineSettings(cache_bytes=size, max_length=most, prefix_cache=prefix_cache))

    def samples(self, n: int) -> dict[str, float]:
        return self.drained(self.engine(), [self.request(i, n=n) for i in range(self.options.prompts)])

    def requests(self, n: int, *, prefix_cache: bool = True) -> dict[str, float]:
        made = [self.request(i, copy) for i in range(self.options.prompts) for copy in range(n)]
        return self.drained(self.engine(prefix_cache=prefix_cache), made)

    def beams(self, n: int) -> dict[str, float]:
        made = [self.request(i, beam_width=n, n=n) for i in range(self.options.prompts)]
        return self.drained(self.engine(), made)

    def request(self, prompt: int, copy: int = 0, **options: int) -> Any:
        params = SamplingParams(
            temperature=0.8, seed=100 * prompt + copy, max_new_tokens=self.options.new_tokens, ignore_eos=True
        )
        if "beam_width" in options:
            params = replace(params, temperature=0.0, seed=None, max_new_tokens=self.options.beam_tokens)
        return Request(id=f"{prompt}-{copy}", prompt=tuple(self.prompts[prompt]), params=params, **options)

    def drained(self, engine: Any, requests: list[Any]) -> dict[str, float]:
        """All of them answered."""
        for request in requests:
            engine.add(request)
        start, most, running = time.perf_counter(), 0, 0
        while not engine.idle:
            engine.step()
            stats = engine.stats()
            most, running = max(most, stats.used_blocks), max(running, stats.running)
        return self.counted(engine, time.perf_counter() - start, most, running)

    def counted(self, engine: Any, seconds: float, most: int, running: int) -> dict[str, float]:
        stats = engine.stats()
        engine.close()
        return {
            "tokens_per_second": stats.generated_tokens / seconds,
            "computed_tokens": stats.computed_tokens,
            "most_blocks": most,
            "most_sequences": running,
            "preemptions": stats.preemptions,
        }

    def beams_by_requests(self, n: int) -> dict[str, float]:
        """Beam search by its caller: a request for the next token of each beam, the likeliest of all go on."""
        engine, params = self.engine(), SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        beams = {i: [(0.0, tuple(prompt))] for i, prompt in enumerate(self.prompts)}
        start, most, running = time.perf_counter(), 0, 0
        for _ in range(self.options.beam_tokens):
            asked = {f"{i}-{b}": (i, beam) for i, own in beams.items() for b, beam in enumerate(own)}
            for name, (_, (_, text)) in asked.items():
                engine.add(Request(id=name, prompt=text, params=params, logprobs=n))
            found: dict[int, list[tuple[float, tuple[int, ...]]]] = {i: [] for i in beams}
            while not engine.idle:
                for output in engine.step():
                    i, (score, text) = asked[output.request_id]
                    for token in output.logprobs or ():
                        found[i] += [(score + one.logprob, (*text, one.token)) for one in token.top]
                stats = engine.stats()
                most, running = max(most, stats.used_blocks), max(running, stats.running)
            beams = {i: sorted(own, reverse=True)[:n] for i, own in found.items()}
        counted = self.counted(engine, seconds := time.perf_counter() - start, most, running)
        return counted | {"tokens_per_second": self.options.prompts * n * self.options.beam_tokens / seconds}


def block_table(report: Report) -> str:
    """`sharing.py blocks`: blocks saved by 2, 4 and 6 samples or beams; the ends with other spreads of lengths."""
    rows = []
    for one in (one for one in report["rows"] if one["scale"] == 1.0):
        same = [r["saved"] for r in report["rows"] if (r["lengths"], r["kind"]) == (one["lengths"], one["kind"])]
        two, six = ([saved[samples] for saved in same] for samples in ("2", "6"))
        low, high = one["published"]
        found = [f"{value}%" for value in one["saved"].values()]
        ends = f"{min(two)}-{max(two)} to {min(six)}-{max(six)}%"
        rows.append([one["lengths"], one["kind"], *found, ends, f"{low}-{high}%"])
    head = ["lengths", "", "2", "4", "6", "half and 1.5 times the spread", "published, 2 to 6"]
    return markdown(head, rows, left=2)


def speed_table(report: Report) -> str:
    """Tokens of answers a second of each way."""
    names = list(report["rows"][0]["ways"])
    rows = []
    for row in report["rows"]:
        ways = row["ways"]
        speeds = [f"{ways[name]['tokens_per_second']:,.0f}" for name in names]
        together = "/".join(f"{ways[name]['most_sequences']:.0f}" for name in names[:3])
        ratios = [f"{ratio:.2f}×" for ratio in row["ratios"].values()]
        rows.append([str(row["samples"]), *speeds, together, *ratios])
    return markdown(["n", *names, "at once", *report["rows"][0]["ratios"]], rows)


TABLES: dict[str, Table] = {"sharing": block_table, "sharing-speed": speed_table}


if __name__ == "__main__":
    main({"blocks": SharedBlocks, "speed": SharingSpeed}, TABLES)
