"""`hasten bench serve`: latency and throughput of a server under load."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from hasten.bench.models import BenchmarkModel
from hasten.bench.serve import DEFINITIONS, SCHEMA, LatencyLimits, measure
from hasten.bench.serve_targets import EngineTarget, HttpTarget, Target
from hasten.bench.serve_workload import Workload
from hasten.cli.options import DraftOptions, EngineOptions, LoadOptions
from hasten.effects import Needs, Unless
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError
from hasten.machine import describe
from hasten.machine.progress import share
from hasten.measure.draw import draw_curves
from hasten.measure.options import Benchmark, check_least, say
from hasten.measure.table import machine_line

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class ServeBenchmark(Benchmark, DraftOptions, EngineOptions, LoadOptions):
    """Serving: latency, throughput and goodput of any OpenAI-compatible URL, or of the engine in this process."""

    model: str | None = None  # type: ignore[assignment]
    """A folder or hub id that is loaded and measured in this process, without HTTP; with --url its name there."""
    shape: str | None = None
    """In place of --model: a named shape with random weights."""
    url: str | None = None
    """URL of a running server, such as http://127.0.0.1:8000."""
    api_key: Annotated[str | None, Needs("url")] = None
    """Key of that server."""
    engine: tyro.conf.OmitArgPrefixes[EngineSettings] = field(default_factory=EngineSettings)
    """In this process: limits of the engine."""
    cache_gib: float | None = None
    """In this process: GiB of the cache; by default half of what is free, and never more than can be used."""
    draft: str = "none"
    """In this process: what proposes tokens, as for serve. None by default: answers to prompts of random tokens often
    repeat themselves, which suffix guesses too easily."""
    workload: Workload = field(default_factory=Workload)
    """What is sent."""
    rates: tuple[float, ...] = (math.inf,)
    """Requests a second, several separated by commas: 1,2,4; inf sends all at once."""
    limits: LatencyLimits = field(default_factory=LatencyLimits)
    """What counts as goodput."""
    file_dtypes: tuple[str, ...] = ()
    """In this process: also measure the model loaded from a folder in these dtypes, as a user loads one that is stored
    so: float32,float16 adds the rows float32-file and float16-file."""
    warmup: int = 2
    """Requests before the first rate that are not counted."""
    vocabulary: Annotated[int | None, Needs("url")] = None
    """Token ids of prompts are below it; what the server says, else 1000."""

    EFFECTS: ClassVar = {
        **{
            one.name: Unless("url")
            for one in (*fields(LoadOptions), *fields(EngineSettings))
            if one.name not in ("model", "cache_bytes")
        },
        **dict.fromkeys(("shape", "draft", "cache_gib", "no_prefix_cache", "file_dtypes"), Unless("url")),
        "burstiness": Unless("rates", (math.inf,)),
        "spread": Unless("lengths", "fixed"),
        "prefix_groups": Needs("shared_prefix_tokens"),
    }

    def run(self) -> dict[str, Any]:
        """Send the loads and return the report. Raises ConfigError for options that do not go together."""
        from hasten.server import require_packages

        if self.url is None and (self.model is None) == (self.shape is None):
            raise ConfigError(
                "give --url of a running server, or one of --model and --shape to measure in this process"
            )
        if unknown := set(self.file_dtypes) - {"float32", "float16", "bfloat16"}:
            raise ConfigError(f"--file-dtypes takes float32, float16 and bfloat16; found {min(unknown)!r}")
        if self.url is not None:
            require_packages(("httpx",))
        if not self.rates or not all(rate > 0 for rate in self.rates):
            found = ",".join(f"{rate:g}" for rate in self.rates)
            raise ConfigError(f"--rates takes numbers above 0 separated by commas, such as 1,2,4; found {found!r}")
        check_least("--warmup", self.warmup, 0)
        summary, requests, target = asyncio.run(self._measure())
        return {
            "schema": SCHEMA,
            "kind": "serve",
            "machine": describe().to_json(),
            "target": target,
            "workload": asdict(self.workload) | {"rates": list(self.rates)},  # infinite ones are null in JSON
            "summary": summary,
            "requests": requests,
            "definitions": DEFINITIONS,
        }

    def draw(self, report: dict[str, Any], path: str) -> None:
        """TTFT and TPOT, median and 99th percentile, against the output tokens/s that were reached, as a PNG."""
        loads = [entry for entry in report["summary"] if "error" not in entry]
        loads.sort(key=lambda entry: entry["output_tokens_per_second"])
        series = {}
        for name, text in (("ttft_ms", "first token"), ("tpot_ms", "each further token")):
            for key, which in (("p50", "median"), ("p99", "99th percentile")):
                points = [(entry["output_tokens_per_second"], entry[name][key]) for entry in loads if entry[name]]
                if points:
                    x, y = zip(*points, strict=True)
                    series[f"{text}, {which}"] = (x, y)
        workload = report["workload"]
        what = f"{workload['prompt_tokens']}-token prompts, {workload['output_tokens']}-token answers"
        if workload["lengths"] != "fixed":
            what = f"lengths like {workload['lengths']}'s"
        machine = machine_line(report["machine"])
        draw_curves(
            series,
            path,
            title="Latency against load",
            subtitle=f"{workload['requests']} requests a load, {what}, n = {workload['n']}; {machine}",
            x_label="output tokens/s reached",
            y_label="milliseconds",
            log_y=True,
        )

    def show(self, report: dict[str, Any]) -> bool:
        """Print what the figures mean (they were shown load by load); whether all loads could be measured."""
        for name, text in DEFINITIONS.items():
            say(f"  {name}: {text}")
        return not any("error" in entry for entry in report["summary"])

    async def _measure(self) -> Any:
        if self.url is not None:
            target = HttpTarget(self.url, model=self.model, key=self.api_key, vocabulary=self.vocabulary)
            await target.prepare()
            facts: dict[str, Any] = {"in_process": False, "model": target.model}
            summaries, requests = await self._loads(target)
        else:
            facts = {"in_process": True, "dtype": self.dtype, "quantize": self.quantize}
            facts["model"] = self.shape or str(self.model).rstrip("/").rsplit("/", 1)[-1]
            facts |= {"max_sequences": self.engine.max_sequences, "token_budget": self.engine.budget}
            facts["draft"] = self.draft.rstrip("/").rsplit("/", 1)[-1]
            summaries, requests = [], []
            for dtypes in ((), *((dtype,) for dtype in self.file_dtypes)):
                one = replace(self, file_dtypes=dtypes)
                model = one.load()
                found = await one._loads(EngineTarget(self.start_engine(model, model.tokenizer)), first=len(summaries))
                summaries += [entry | {"row": f"{dtype}-file"} for entry in found[0] for dtype in dtypes] or found[0]
                requests += found[1]
        return summaries, requests, facts

    async def _loads(self, target: Target, *, first: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Send each rate's load. first: the number of the first one among all of the report's loads."""
        name = f"{self.file_dtypes[0]}-file, " if self.file_dtypes else ""
        summaries, requests = list[dict[str, Any]](), list[dict[str, Any]]()
        try:
            if self.warmup:
                seed = self.workload.seed + 10**6
                await measure(target, replace(self.workload, requests=self.warmup, rate=math.inf, seed=seed))
            for index, rate in enumerate(self.rates):
                # A seed of its own: else the prompts of the load before would lie in the prefix cache.
                workload = replace(self.workload, rate=rate, seed=self.workload.seed + 1000 * index)
                with share(f"{name}{rate:g} requests/s") as progress:
                    load = await measure(target, workload, progress=progress)
                summaries.append(load.summary(self.limits))
                requests += load.requests(first + index)
                show_load(summaries[-1], name)
        finally:
            await target.close()
        return summaries, requests

    def title(self) -> str:
        return super().title() if self.shape is None else f"{self.shape} (random weights)"

    def read_model(self, device: str) -> Transformer:
        """The checkpoint, or random weights of the shape; with file_dtypes, from a folder in the only one of them."""
        if self.file_dtypes:
            from hasten.bench.generate_rung import from_file
            from hasten.machine import resolve_dtype

            (stored,), model = self.file_dtypes, BenchmarkModel(shape=self.shape, model=self.model)
            return from_file(model.build(dtype=resolve_dtype(stored), device="cpu", seed=self.workload.seed), device)
        if self.shape is None:
            return super().read_model(device)
        import torch

        dtype = torch.bfloat16 if self.dtype == "auto" else getattr(torch, self.dtype)
        return BenchmarkModel(shape=self.shape).build(dtype=dtype, device=device, seed=self.workload.seed)


def show_load(summary: dict[str, Any], name: str = "") -> None:
    """One load, to standard error. name: printed before its rate."""
    if "error" in summary:
        say(f"{name}all {summary['failed']} requests failed: {summary['error']}")
        return
    rate = "all at once" if summary["rate"] is None else f"{summary['rate']:g} requests/s"
    lines = [
        f"{name}{rate}: {summary['completed']} completed, {summary['failed']} failed in {summary['seconds']:.1f} s; "
        f"{summary['output_tokens_per_second']:.1f} output tokens/s, {summary['requests_per_second']:.2f} requests/s, "
        f"goodput {summary['goodput']:.2f} requests/s"
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        found = summary[f"{name}_ms"]
        if found:
            figures = "  ".join(f"{key} {value:,.1f}" for key, value in found.items())
            lines.append(f"  {name:<5} ms  {figures}")
    for key, text in (("prefix_hit_rate", "prefix cache hits"), ("blocks_saved", "blocks saved by sharing")):
        if key in summary:
            lines.append(f"  {text}: {summary[key]:.1%}")
    say("\n".join(lines))
