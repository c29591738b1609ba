"""The planner's predictions beside what is measured: memory and time of training, of generating and of serving.

    python benchmarks/plan.py --output benchmarks/results/plan.json            # memory, then speed
    python benchmarks/plan.py --only memory --output …                         # keeps the other half of the file
    python benchmarks/plan.py --only speed --minutes 8 --output …              # in pieces: goes on where it ended

Each case runs in a process of its own, forked from one that has imported everything. Memory: the peak of the resident
set above what a tiny model of the same kind left behind. Speed: what `hasten plan` predicts from a few measured blocks,
and in the same process the whole model, in turns; medians. Small shapes, so that a case takes seconds.
"""

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from hasten.bench.plan import PlanOptions, make_plan
from hasten.bench.predict import random_model
from hasten.bench.train import TrainRung
from hasten.engine.engine import Engine
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.engine.settings import EngineSettings
from hasten.machine import configure, describe, peak_memory, process_memory, reset_peak_memory
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.model.families import read_config
from hasten.planning.devices import REACHED
from hasten.planning.shapes import gpt2, llama
from hasten.training.recipe import Optimizer, Parallel, Techniques

CPU = torch.device("cpu")
LLAMA = llama(256, 704, 4, 4, 2, vocab_size=2048, max_position_embeddings=2048)
WIDE = llama(512, 1408, 3, 8, 2, vocab_size=2048, max_position_embeddings=2048)
GPT2 = gpt2(256, 4, 4, vocab_size=2048, n_positions=1024)
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True}
GEMMA = LLAMA | {
    "model_type": "gemma2", "head_dim": 64, "sliding_window": 128, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0, "attn_logit_softcapping": None,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
SERVED = llama(1024, 2816, 6, 16, 4, vocab_size=4096, max_position_embeddings=4096)


FLOAT32 = Techniques(compile=False, precision="float32")
SELECTIVE, FULL = Techniques(compile=False, checkpointing="selective"), Techniques(compile=False, checkpointing="full")
DROPPED = Techniques(compile=False, layer_drop=0.5)
COMPILED = Techniques()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: a config.json, and options of `hasten plan`."""

    config: dict[str, Any]
    options: PlanOptions


def train(config: dict[str, Any], rows: int = 8, length: int = 256, **options: Any) -> Case:
    """A case of training."""
    return Case(config=config, options=PlanOptions(**{"use": "train", "batch_size": rows, "length": length} | options))


def generate(config: dict[str, Any], rows: int, length: int, **options: Any) -> Case:
    """A case of generating, or serving."""
    return Case(
        config=config, options=PlanOptions(**{"batch_size": rows, "length": length, "new_tokens": 32} | options)
    )


CASES = {
    "llama": train(LLAMA),
    "llama, float32": train(LLAMA, techniques=FLOAT32),
    "llama, batch 32": train(LLAMA, 32),
    "llama, 2,048 tokens": train(LLAMA, 2, 2048),
    "llama, wide": train(WIDE, 4),
    "llama, 4 micro-batches": train(LLAMA, accumulation=4),
    "llama, selective recompute": train(LLAMA, 32, techniques=SELECTIVE),
    "llama, full recompute": train(LLAMA, 32, techniques=FULL),
    "llama, LAMB": train(WIDE, 4, optimizer=Optimizer(kind="lamb")),
    "llama, Muon": train(WIDE, 4, optimizer=Optimizer(kind="muon")),
    "llama, masters in float32": train(WIDE, 4, parallel=Parallel(policy="float32-masters")),
    "GPT-2, 2 micro-batches": train(GPT2, 16, accumulation=2),
    "llama, layer dropping": train(LLAMA, 16, techniques=DROPPED),
    "llama, LoRA": train(WIDE, 8, use="lora"),
    "GPT-2": train(GPT2),
    "GPT-2, float32, 1,024 tokens": train(GPT2, 2, 1024, techniques=FLOAT32),
    "GPT-2, LoRA, full recompute": train(GPT2, 16, use="lora", techniques=FULL),
    "Qwen 3": train(QWEN),
    "Gemma 2": train(GEMMA),
    "Mixtral": train(MIXTRAL),
    "llama, compiled": train(LLAMA, 16, techniques=COMPILED),
    "llama, wide, compiled": train(WIDE, 8, techniques=COMPILED),
    "GPT-2, compiled": train(GPT2, 16, techniques=COMPILED),
    "generate, bfloat16": generate(SERVED, 1, 512),
    "generate, batch 8": generate(SERVED, 8, 512),
    "generate, int8": generate(SERVED, 1, 512, weights="int8"),
    "generate, int4": generate(SERVED, 1, 512, weights="int4-g128"),
    "generate, 3,072 tokens, int8 cache": generate(SERVED, 4, 3072, kv_cache_dtype="int8"),
    "generate, GPT-2": generate(GPT2 | {"n_embd": 1024, "n_head": 16, "n_inner": 4096}, 4, 256),
    "serve, batch 4": generate(SERVED, 4, 256, use="serve"),
    "serve, batch 16": generate(SERVED, 16, 256, use="serve"),
    "serve, int4, batch 8": generate(SERVED, 8, 256, use="serve", weights="int4-g128"),
}


def config_of(case: Case) -> Any:
    """The model's config."""
    return read_config(case.config)


@contextmanager
def planned(case: Case, **changes: Any) -> Iterator[Any]:
    """The case's plan."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        yield make_plan(folder, replace(case.options, **changes))


class Training:
    """The steps of a case."""

    def __init__(self, case: Case, config: Any, **data: int) -> None:
        recipe = case.options.recipe()
        recipe = replace(recipe, data=replace(recipe.data, **data))
        if recipe.techniques.precision == "auto":
            recipe = replace(recipe, techniques=replace(recipe.techniques, precision="bfloat16"))
        self.rung = TrainRung(recipe=recipe, config=config, steps=1, device="cpu")

    def run(self) -> dict[str, float]:
        """One step; its seconds."""
        return {"step": self.rung.measure()["milliseconds_per_batch"] / 1e3}

    def largest_moment(self) -> None:
        """Two steps as at the beginning of a run, when no block is dropped."""
        self.rung.block_scales = None
        self.run()
        self.run()


class Generating:
    """A case's prompts and answers, by the static cache or the engine."""

    def __init__(self, case: Case, config: Any, **changes: int) -> None:
        self.options = replace(case.options, **changes)
        weights = "bfloat16" if self.options.weights == "auto" else self.options.weights
        self.model, self.vocab = random_model(config, weights), config.vocab_size
        self.batch, self.prompt = self.options.batch_size or 1, self.options.length - self.options.new_tokens
        gc.collect()

    def run(self) -> dict[str, float]:
        """Seconds of all prompts, and of a token of each sequence."""
        prompts = torch.randint(self.vocab, (self.batch, self.prompt)).tolist()
        return self.served(prompts) if self.options.use == "serve" else self.generated(prompts)

    def generated(self, prompts: list[list[int]]) -> dict[str, float]:
        new, cache = self.options.new_tokens, self.options.kv_cache_dtype
        decoder = GivenTexts(self.model, batch=self.batch, capacity=self.options.length, kv_cache_dtype=cache)
        start = time.perf_counter()
        tokens = decoder.prefill(prompts).argmax(-1).tolist()
        middle, times = time.perf_counter(), []
        for _ in range(new - 1):
            began = time.perf_counter()
            tokens = decoder.decode(torch.tensor(tokens)).argmax(-1).tolist()
            times.append(time.perf_counter() - began)
        return {"prompt": middle - start, "token": median(times)}

    def served(self, prompts: list[list[int]]) -> dict[str, float]:
        settings = EngineSettings(max_length=self.options.length, max_sequences=self.batch)
        engine = Engine(self.model, None, settings)
        params = SamplingParams(temperature=0, max_new_tokens=self.options.new_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add(Request(id=str(number), prompt=tuple(prompt), params=params))
        prompting, times = 0.0, []
        while not engine.idle:
            began = time.perf_counter()
            before = engine.stats().computed_tokens
            engine.step()
            took, computed = time.perf_counter() - began, engine.stats().computed_tokens - before
            if computed == self.batch:  # a token of each
                times.append(took)
            elif len(times) == 0:  # prompts, and the tokens of those that were read before
                prompting += took
        engine.close()
        return {"prompt": prompting, "token": median(times)}

    def largest_moment(self) -> None:
        """All prompts and a few tokens."""
        self.run()


def warm_up(case: Case) -> Any:
    """What runs the case, after it has run a model of nearly no size."""
    kind: Any = Training if case.options.training else Generating
    least = {"context": 8, "accumulation": 1} if case.options.training else {"length": 40}
    kind(case, read_small(case), batch_size=1, **least).largest_moment()
    gc.collect()
    return kind


def memory(name: str) -> dict[str, Any]:
    """Predicted and measured peak of a case, in bytes."""
    case = CASES[name]
    kind: Any = Training if case.options.training else Generating
    small = read_small(case)
    warm = (
        {"batch_size": 1, "context": 8, "accumulation": 1} if case.options.training else {"batch_size": 1, "length": 40}
    )
    kind(case, small, **warm).largest_moment()
    gc.collect()
    reset_peak_memory()
    baseline = process_memory()
    running = kind(case, config_of(case))
    if not case.options.training:
        reset_peak_memory()  # making the model is not what is planned
    running.largest_moment()
    measured = peak_memory() - baseline
    return predicted_memory(case) | {"measured_bytes": measured}


def predicted_memory(case: Case) -> dict[str, Any]:
    """The same, predicted."""
    with planned(case, device="epyc") as plan:  # any CPU: nothing is measured
        parts = {part: size for part, size in plan.memory.parts.items() if size}
        return {"predicted_bytes": plan.memory.peak, "moment": plan.memory.moment, "parts": parts}


def read_small(case: Case) -> Any:
    """A model of the same kind and nearly no size, which loads what the case will need."""
    config = config_of(case)
    small = {"hidden_size": 64, "intermediate_size": 64, "expert_size": 64 if config.experts else 0}
    small |= {"heads": 2, "kv_heads": 2, "head_dim": 32, "vocab_size": 128, "padded_vocab_size": 128}
    ropes = tuple(replace(rope, dim=32) for rope in config.ropes)
    return replace(config, layers=config.layers[:1], ropes=ropes, **small)


def speed(name: str, rounds: int = 4) -> dict[str, Any]:
    """Predicted and measured seconds of a case's phases, in turns."""
    configure()
    case = CASES[name]
    kind: Any = Training if case.options.training else Generating
    running, found = kind(case, config_of(case)), []
    running.run()
    for _ in range(rounds):
        with planned(case, device="cpu") as plan:
            predicted = {phase.name: phase.seconds(plan.device) for phase in plan.phases}
            limits = {phase.name: phase.limit(plan.device) for phase in plan.phases}
        tries = [running.run() for _ in range(3)]
        measured = {phase: median(one[phase] for one in tries) for phase in predicted}
        found.append({"predicted": predicted, "measured": measured, "limits": limits})
    return {
        "rounds": found,
        "ratios": {
            phase: median(one["predicted"][phase] / one["measured"][phase] for one in found)
            for phase in found[0]["predicted"]
        },
    }


def in_a_process(call: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """A call in a process forked from this one, which has computed nothing yet."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        try:
            answers.put(call(name))
        except Exception as error:
            answers.put({"error": f"{type(error).__name__}: {error}"})

    process = context.Process(target=child)
    process.start()
    try:
        return answers.get(timeout=900)
    finally:
        process.join(10)
        process.kill()


@dataclass(frozen=True, kw_only=True)
class Planned(Script):
    """Compare the planner's predictions with measurements."""

    result = "plan"
    only: Literal["both", "memory", "speed", "predictions"] = "both"
    """predictions: those of memory again, beside what was measured before (after the count has changed)."""
    cases: tuple[str, ...] = ()
    """Some of the cases, measured again; all by default. The time of compiled ones is not predicted."""
    minutes: float = 1e9
    """Begin no case after this many. The next run leaves out what this one has measured: the file says which."""

    def measure(self) -> Report:
        report = {"cases": {}} | self.before()
        if self.only == "predictions":
            for name, found in report["cases"].items():
                found["memory"] |= predicted_memory(CASES[name])
            return report
        torch.set_num_threads(1)  # no threads before the forks, and no processes that compile for them
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for name in self.cases or ("llama, LoRA", "generate, int4", "serve, batch 4"):  # import everything
            warm_up(CASES[name])
        end = time.monotonic() + 60 * self.minutes
        done = report.setdefault("done", {})  # by what: the cases of a measurement that has not come to its end
        for what, call in (("memory", memory), ("speed", speed)):
            wanted = [name for name in CASES if what == "memory" or CASES[name].options.techniques != COMPILED]
            for name in (one for one in wanted if one in (self.cases or wanted)):
                known = name in done.get(what, ()) and not self.cases
                if self.only not in ("both", what) or known or time.monotonic() > end:
                    continue
                found = in_a_process(call, name)
                if "error" not in found and not self.cases:
                    done.setdefault(what, []).append(name)
                if set(done.get(what, ())) >= set(wanted):
                    del done[what]  # the next run measures all again
                report["cases"].setdefault(name, {"use": CASES[name].options.use})[what] = found
                said = found.get("error") or found.get("ratios") or found["predicted_bytes"] / found["measured_bytes"]
                print(f"{what:7} {name:36} {said}", flush=True)
                self.write(report | {"machine": describe().to_json()})
        return report | {"machine": describe().to_json()}


MEMORY, SPEED = 0.15, 0.20  # how far a prediction may be off


def plan_memory(report: Report) -> str:
    """Peaks of the resident set, in MB."""
    rows, within = [], []
    for name, found in report["cases"].items():
        memory = found.get("memory", {})
        if "measured_bytes" not in memory:
            continue
        predicted, measured = memory["predicted_bytes"], memory["measured_bytes"]
        within.append(abs(predicted / measured - 1) <= MEMORY)
        numbers = [f"{predicted / 1e6:,.0f}", f"{measured / 1e6:,.0f}", _ratio(predicted / measured, MEMORY)]
        rows.append([name, found["use"], *numbers])
    head = ["", "use", "predicted, MB", "measured, MB", "ratio"]
    return f"{markdown(head, rows, left=2)}\n\n{sum(within)} of {len(within)} within {MEMORY:.0%}."


def plan_speed(report: Report) -> str:
    """Seconds of a step, of prompts and of tokens, medians of the rounds; and what the roofline alone would predict."""
    rows, within, alone = [], list[bool](), list[bool]()
    for name, found in report["cases"].items():
        for phase, ratio in found.get("speed", {}).get("ratios", {}).items():
            within.append(abs(ratio - 1) <= SPEED)
            each = [one["predicted"][phase] / one["measured"][phase] for one in found["speed"]["rounds"]]
            spread = f"{min(each):.2f} to {max(each):.2f}"
            limit = median(one["limits"][phase] / one["measured"][phase] for one in found["speed"]["rounds"])
            roofline = limit / REACHED["cpu"][phase]
            alone.append(abs(roofline - 1) <= SPEED)
            numbers = [_milliseconds(found["speed"], phase), _ratio(ratio, SPEED), spread, _ratio(roofline, SPEED)]
            rows.append([name, phase, *numbers])
    if not rows:
        return "Not measured yet."
    head = ["", "phase", "measured, ms", "predicted / measured", "in each round", "roofline alone / measured"]
    counts = f"{sum(within)} of {len(within)} within {SPEED:.0%}; by the roofline alone {sum(alone)}."
    return f"{markdown(head, rows, left=2)}\n\n{counts}"


def _milliseconds(speed: dict[str, Any], phase: str) -> str:
    times = sorted(one["measured"][phase] for one in speed["rounds"])
    return f"{1e3 * times[len(times) // 2]:,.1f}"


def _ratio(ratio: float, most: float) -> str:
    return f"{ratio:.2f}" if abs(ratio - 1) <= most else f"**{ratio:.2f}**"


TABLES: dict[str, Table] = {
    "plan memory": plan_memory,
    "plan speed": plan_speed,
}


if __name__ == "__main__":
    main({"compare": Planned}, TABLES)
