"""What a step costs outside of its kernels, what watching it costs, and how long a command takes to start.

    python benchmarks/profiling.py overhead --model MODEL --output benchmarks/results/profile-overhead.json
    python benchmarks/profiling.py tokens --output benchmarks/results/token-overhead.json
    python benchmarks/profiling.py start --models smollm2-135m gemma3-270m --output benchmarks/results/start.json

`hasten profile` is what a user runs; its reports are in the tables too.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._inductor import config as inductor
from torch.profiler import ProfilerActivity, profile, record_function

import hasten
from hasten.engine.compiled import compile_blocks
from hasten.engine.given_texts import GivenTexts
from hasten.measure.script import Report, Script, Table, TimedScript, main, markdown
from hasten.measure.timing import interleaved, median_ratio, timed
from hasten.model.fused import fuse_where_it_fits
from hasten.model.initialize import initialize
from hasten.planning.shapes import shape_config
from hasten.profiling.meter import Meter
from hasten.profiling.show import HEAD, cells, in_the_tree
from hasten.profiling.steps import Answers, ServedAnswers, training
from hasten.profiling.trace import covered
from hasten.profiling.tree import PartTime, folded, ordered
from hasten.training.recipes import RECIPES
from hasten.training.setup import set_up


@dataclass(frozen=True, kw_only=True)
class ProfileOverhead(TimedScript):
    """What watching a step costs, and whether its parts take what other timers say.

    Steps with and without a `hasten.profiling.meter.Meter` by turns: a training step of a recipe, one of a model that
    appends a token, and one of the engine. Beside some parts a timer of its own is read, which is all that looks at
    such a step.
    """

    result = "profile-overhead"
    model: Path
    """A folder of a model, run in bfloat16 and fused where it fits."""
    recipe: str = "demo"
    """The recipe whose training step is measured, its blocks not compiled: most parts, and most to watch."""
    rounds: int = 30
    """Rounds of training steps; ten times as many of a token, twice of the engine, which reads prompts again."""
    threads: int = 1
    """One: where others work, two wait for each other, and that is no step's own time."""

    def measure(self) -> Report:
        recipe = RECIPES[self.recipe]
        techniques, run = replace(recipe.techniques, compile=False), replace(recipe.run, threads=self.threads)
        made = replace(recipe, techniques=techniques, run=run)
        setup = set_up(made, progress=False)
        batches = [setup.batches.batch(position) for position in range(recipe.data.accumulation)]
        model = fuse_where_it_fits(hasten.load(self.model, dtype="bfloat16"))
        _, decode = Answers(model, batch=1, prompt_tokens=128).works()
        _, serve = ServedAnswers(model, batch=8, prompt_tokens=128).works()
        step = setup.step
        token = [(model.stack, "run", "model.blocks", "forward"), (model.stack, "scores", "model.head", "forward")]
        block = setup.model.blocks[0]
        learning = [
            (block.attention, "forward", "model.blocks.0.attention", "forward"),
            (block.mlp, "forward", "model.blocks.0.mlp", "forward"),
            (setup.model, "forward", "model", "forward"),
            (step.precision, "backward", "model", "backward"),
            (step, "update", "update", "forward"),
        ]
        rows = []
        for name, work, timers, times in (
            ("training", training(setup, batches), learning, 1),
            ("decode", decode, token, 10),
            ("serve, 8 requests", serve, token, 2),
        ):
            owned = [timer for timer in timers if timer[0] is not None]
            rows.append({"step": name} | watched_and_not(work, owned, times * self.rounds))
        return {"profile_overhead": rows}


Timer = tuple[Any, str, str, str]  # the owner of a method, its name, and the part and the phase that it is


def watched_and_not(work: Any, timers: list[Timer], rounds: int) -> dict[str, Any]:
    """A step without and with a meter, and parts beside their timers."""
    meter = Meter(work.model, work.calls)
    plain, seen = list[float](), list[float]()
    watched: dict[tuple[str, str], list[float]] = {(part, phase): [] for _, _, part, phase in timers}
    timed: dict[tuple[str, str], list[float]] = {part: [] for part in watched}
    for number in range(-5, rounds):
        work.prepare()
        start = time.perf_counter()
        work.step()
        alone = time.perf_counter() - start
        with meter:
            work.prepare()
            meter.restart()
            start = time.perf_counter()
            work.step()
            observed = time.perf_counter() - start
            spent = meter.spent()
        work.prepare()
        seconds = step_with_timers(work, timers)
        if number < 0:  # warms up
            continue
        plain.append(alone)
        seen.append(observed)
        for part, phase in watched:
            inside = [s for (name, own), s in spent.items() if f"{name}.".startswith(f"{part}.") and own == phase]
            watched[part, phase].append(sum(inside))
            timed[part, phase].append(seconds[part, phase])
    # The fastest of each: where others work, a median is theirs as well.
    parts = {
        part if phase == "forward" else f"{part}, {phase}": {"watched": min(own), "timed": min(timed[part, phase])}
        for (part, phase), own in watched.items()
    }
    return {
        "rounds": rounds,
        "parts_watched": len(spent),
        "seconds": statistics.median(plain),
        "overhead": statistics.median(one / other for one, other in zip(seen, plain, strict=True)) - 1,
        "overhead_of_the_fastest": min(seen) / min(plain) - 1,
        "parts": parts,
    }


def step_with_timers(work: Any, timers: list[Timer]) -> dict[tuple[str, str], float]:
    """Take a step; the seconds inside these methods, by the part and phase that each is."""
    seconds = {(part, phase): 0.0 for _, _, part, phase in timers}

    def put(owner: Any, name: str, *part: str) -> None:
        call = getattr(owner, name)

        def timed(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            made = call(*given, **options)
            seconds[part[0], part[1]] += time.perf_counter() - start
            return made

        setattr(owner, name, timed)

    for timer in timers:
        put(*timer)
    work.step()
    for owner, name, *_ in timers:
        delattr(owner, name)
    return seconds


def shape_model(shape: str) -> Any:
    return initialize(shape_config(shape), seed=0, dtype=torch.bfloat16).eval()


KERNELS = ("aten::", "hasten", "mkl", "cpp_", "graph_")  # beginnings of the names of what computes


@dataclass(frozen=True, kw_only=True)
class TokenOverhead(TimedScript):
    """A token's time outside of all kernels, eager, compiled and native; and compiled prompts.

    A decode step under torch's profiler, in which the kernels are PyTorch's operators, the loops that Inductor made and
    our native calls; between them is Python. The profiler makes a step longer, so the share is of the traced step, and
    an untraced step is beside it. Prompts: the same prompt with eager blocks, with blocks compiled for its length, and
    with blocks compiled for any length (dynamic shapes), in interleaved rounds.
    """

    result = "token-overhead"
    shapes: tuple[str, ...] = ("llama-120m", "llama-1.1b")
    """Whose tokens are measured; prompts are of the first."""
    context: int = 64
    """Tokens before the measured one."""
    prompt_tokens: int = 512
    steps: int = 30
    """Decode steps that are measured, and as many that are traced."""
    rounds: int = 9
    """Rounds of the prompts."""

    def measure(self) -> Report:
        tokens = [self.token(shape, way) for shape in self.shapes for way in ("eager", "compiled", "native")]
        return {"tokens": tokens, "prompts": self.prompts()}

    def token(self, shape: str, way: str) -> dict[str, Any]:
        """Seconds of a decode step, and the share of a traced one that lies outside of all kernels."""
        inductor.cpp.enable_kernel_profile = True  # its loops are named in a trace
        model = shape_model(shape)
        if way == "native":
            hasten.fuse(model)
        if way == "compiled":
            compile_blocks(model)
        decoder = GivenTexts(model, batch=1, capacity=self.context + 64, compiled=way == "compiled")
        decoder.prefill([[token % model.config.vocab_size for token in range(3, 3 + self.context)]])

        def step() -> None:
            decoder.truncate(self.context)
            decoder.decode(torch.tensor([7])).argmax(-1).tolist()

        for _ in range(5):
            step()
        seconds = interleaved({"": step}, self.steps)[""]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(self.steps):
                with record_function("a step"):
                    step()
        events = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events())
        kernels = [(start, end) for start, end, name in events if name.startswith(KERNELS)]
        traced = [(start, end) for start, end, name in events if name == "a step"]
        outside = [1 - covered(kernels, *span) / (span[1] - span[0]) for span in traced]
        return {
            "shape": shape,
            "way": way,
            "seconds": median(seconds),
            "traced_seconds": median(end - start for start, end in traced) / 1e6,
            "outside_share": median(outside),
            "outside_seconds": median(part * (end - start) for part, (start, end) in zip(outside, traced, strict=True))
            / 1e6,
        }

    def prompts(self) -> list[dict[str, Any]]:
        """Prompts by blocks that are eager, compiled for one length, and for any."""
        lengths = (self.prompt_tokens, self.prompt_tokens - 37)
        calls: dict[Any, Callable[[], object]] = {}
        first: dict[Any, float] = {}
        for way, dynamic in (("eager", None), ("compiled", False), ("compiled for any length", True)):
            model = shape_model(self.shapes[0])
            if way != "eager":
                for block in model.blocks:
                    block.compile(dynamic=dynamic)
            decoder = GivenTexts(model, batch=1, capacity=self.prompt_tokens)

            def call(length: int, decoder: Any = decoder) -> None:
                decoder.truncate(0)
                decoder.prefill([[token % 1000 for token in range(3, 3 + length)]]).argmax(-1).tolist()

            torch._dynamo.reset()
            for length in lengths:
                calls[way, length] = partial(call, length)
                first[way, length] = timed(calls[way, length])
        times = interleaved(calls, self.rounds)
        found = []
        for (way, length), own in times.items():
            row = {"way": way, "tokens": length, "first_seconds": first[way, length], "seconds": median(own)}
            found.append(row | {"ratio": median_ratio(times["eager", length], own)})
        return found


PROMPT = "The capital of France is"  # printed before the answer


@dataclass(frozen=True, kw_only=True)
class Start(Script):
    """How long `hasten generate` takes to start, in turns with `import torch`.

    Each measurement is a process of its own. Of each model two commands: one for a single token, timed to its end, and
    one for an answer of 32 tokens, timed to the text of the first. A round before the counted ones builds the kernels,
    brings files into the page cache, and writes Python's bytecode, which pip does when it installs a package.
    """

    result, of_this_machine = "start", ("models",)
    models: tuple[str, ...]
    """Folders, files or short names."""
    rounds: int = 7
    """Rounds that count, by their medians."""

    def measure(self) -> Report:
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(self.rounds + 1):
            found = {"import torch": timed_process([sys.executable, "-c", "import torch"])}
            for model in self.models:
                one, answer = (self.generated(model, tokens) for tokens in (1, 32))
                found[Path(model).name] = one | {"first_text_seconds": answer["first_text_seconds"]}
            if number:
                rounds.append(found)
        return {"kind": "start", "rounds": rounds}

    def generated(self, model: str, tokens: int) -> dict[str, float]:
        """Time a command. A folder without a tokenizer takes and prints tokens as numbers."""
        given, before = ["--prompt", PROMPT], len(PROMPT)
        if Path(model).is_dir() and not (Path(model) / "tokenizer.json").exists():
            given, before = ["--prompt-ids", *map(str, range(3, 19))], 0
        options = ["--max-new-tokens", str(tokens), "--temperature", "0", "--ignore-eos"]
        return timed_process([sys.executable, "-m", "hasten", "generate", model, *given, *options], before)


def timed_process(line: list[str], before: int = 0) -> dict[str, float]:
    """Seconds to the end of a process, of the processors meanwhile, and to text after `before` bytes."""
    started, read, first = time.perf_counter(), 0, 0.0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    while part := os.read(process.stdout.fileno(), 1 << 16):  # unbuffered: comes when the command writes it
        read += len(part)
        if not first and read > before:
            first = time.perf_counter() - started
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the command failed: {' '.join(line)}")
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "first_text_seconds": first}


def start_table(report: Report) -> str:
    """Medians, and the median of the ratios to `import torch` in the same round."""
    rounds = report["rounds"]
    head = ["", "one token, s", "of `import torch`", "CPU seconds", "first text of 32 tokens, s"]
    rows = []
    for name in rounds[0]:
        own = {key: median(one[name][key] for one in rounds) for key in rounds[0][name]}
        ratio = median(one[name]["seconds"] / one["import torch"]["seconds"] for one in rounds)
        first = f"{own['first_text_seconds']:.2f}" if own["first_text_seconds"] else ""
        label = f"`{name}`"
        rows.append([label, f"{own['seconds']:.2f}", f"{ratio:.2f} ×", f"{own['cpu_seconds']:.2f}", first])
    return markdown(head, rows)


def tree_table(name: str) -> Callable[[Report], str]:
    """`hasten profile`: the tree of one kind of step."""

    def render(report: Report) -> str:
        phase: dict[str, Any] = next(one for one in report["phases"] if one["name"] == name)
        rows = ordered(folded(PartTime(**row) for row in phase["rows"]), "tree")
        body = [[in_the_tree(row).replace("  ", "&emsp;"), *cells(row, rows[0])] for row in rows]
        rate, bandwidth = phase["limits"]["rates"][phase["dtype"]], phase["limits"]["bandwidth"]
        end = f"Limits: {rate / 1e9:,.0f} GFLOP/s in {phase['dtype']}, {bandwidth / 1e9:.1f} GB/s."
        traced = {name: f"{1e3 * phase['traced'][name]:.3g} ms" for name in ("seconds", "outside")}
        end += f" A traced step took {traced['seconds']}, {traced['outside']} of it outside of all kernels."
        return f"{markdown([*HEAD, 'ms above it'], body)}\n\n{end}"

    return render


def overhead_table(report: Report) -> str:
    """`profiling.py overhead`: what watching costs, and parts beside their own timers."""
    rows = []
    for step in report["profile_overhead"]:
        found = step["parts"].items()
        parts = [f"`{name}` {1e3 * part['watched']:.3g} / {1e3 * part['timed']:.3g}" for name, part in found]
        costs = f"{step['overhead']:+.1%}", f"{step['overhead_of_the_fastest']:+.1%}"
        rows.append([step["step"], f"{1e3 * step['seconds']:.3g}", str(step["rounds"]), *costs, "; ".join(parts)])
    head = [
        "step",
        "ms",
        "rounds",
        "watched, it takes (median)",
        "(the fastest)",
        "parts, the fastest: watched / timed alone, ms",
    ]
    return markdown(head, rows)


def token_table(report: Report) -> str:
    """`profiling.py tokens`: a token's time, and how much of it lies outside of all kernels."""
    body = [
        [
            one["shape"],
            one["way"],
            *(f"{1e3 * one[name]:.3g} ms" for name in ("seconds", "traced_seconds", "outside_seconds")),
            f"{one['outside_share']:.0%}",
        ]
        for one in report["tokens"]
    ]
    return markdown(["shape", "", "a token", "traced", "outside of all kernels", "share"], body, left=2)


def prompt_table(report: Report) -> str:
    """`profiling.py tokens`: prompts by eager and by compiled blocks."""
    body = [
        [
            *(one["way"], str(one["tokens"]), f"{1e3 * one['seconds']:.3g} ms"),
            *(f"{one['ratio']:.2f}×", f"{one['first_seconds']:.1f} s"),
        ]
        for one in report["prompts"]
    ]
    return markdown(["blocks", "tokens", "a prompt", "speed", "the first"], body)


TABLES: dict[str, Table] = {
    "start": start_table,
    "token-overhead tokens": token_table,
    "token-overhead prompts": prompt_table,
    "profile-demo-train tree": tree_table("step"),
    "profile-demo-generate decode": tree_table("decode"),
    "profile-overhead": overhead_table,
}


if __name__ == "__main__":
    main({"overhead": ProfileOverhead, "tokens": TokenOverhead, "start": Start}, TABLES)
