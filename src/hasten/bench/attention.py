"""Time and memory of every attention kernel against the length: where the square is, and where it is not.

Each kernel and length is a process of its own, because memory once touched is never fully given back; the kernels of
one length are measured in interleaved rounds. Memory is the peak above a process that has run the same kernel on a few
tokens: inputs, output, gradients and whatever the kernel needs in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from hasten.bench.attention_picture import draw_growth
from hasten.errors import ConfigError
from hasten.machine import available_cores, available_memory, describe, resolve_device, resolve_dtype, thread_count
from hasten.machine.memory import peak_memory, process_memory, reset_peak_memory
from hasten.measure.options import BenchmarkOptions, check_finite, say
from hasten.measure.process import Rung, run_interleaved
from hasten.measure.table import format_value, print_growth
from hasten.ops.picker import pick

if TYPE_CHECKING:
    from hasten.ops.attention import AttentionRequest

EXPLICIT = {"reference": 4, "math": 4}  # kernels that write all scores to memory, and how many copies a gradient needs
LEAST_SECONDS = 0.2  # of one measurement: short calls are repeated
PRODUCTS = {"forward": 1, "forward_backward": 3.5}  # of the forward pass: backward has five instead of two
PHASES = tuple(PRODUCTS)
WARM_TOKENS = 32
SETTINGS = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "device", "rounds", "threads", "seed")


@dataclass(frozen=True, kw_only=True)
class AttentionGrowth(BenchmarkOptions):
    """Attention: time and peak memory of every kernel against the length, as a table, JSON and two pictures."""

    picture: str | None = None
    """Draw the report into two PNGs: NAME-time.png and NAME-memory.png, for NAME or NAME.png."""
    seed: int = 0
    """Decides the random inputs."""
    batch: int = 1
    """Sequences."""
    heads: int = 8
    """Query heads."""
    kv_heads: int | None = None
    """Key/value heads; as many as query heads by default."""
    head_dim: int = 64
    """Head size."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of q, k and v."""
    causal: bool = True
    """A query sees the keys up to its own position."""
    backward: bool = True
    """Also the backward pass."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens (T = S)."""
    kernels: tuple[str, ...] = ()
    """Only these, separated by commas; all that serve the call by default."""
    rounds: int = 3
    """Every kernel is measured once in each round; the median counts."""
    point_seconds: float = 60.0
    """Skip lengths at which a kernel would take longer than this."""

    def run(self) -> dict[str, Any]:
        """Measure and return the report. Raises ConfigError for kernels that are unknown or cannot serve the call."""
        if not self.lengths or min(self.lengths) < 1 or self.rounds < 1:
            raise ConfigError(f"lengths and rounds start at 1; found {self.lengths} and {self.rounds}")
        check_finite("--point-seconds", self.point_seconds)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if min(self.batch, self.heads, kv_heads, self.head_dim) < 1 or self.heads % kv_heads:
            raise ConfigError("--batch, --heads, --kv-heads and --head-dim start at 1, and heads are shared evenly")
        threads = thread_count(self.threads) or available_cores().physical
        ready = replace(self, kv_heads=kv_heads, device=str(resolve_device(self.device)), threads=threads)
        machine = describe().to_json()
        points: list[dict[str, Any]] = []
        names, absent = ready._kernels()
        for tokens in sorted(self.lengths):
            points += ready._length(names, tokens, points)
        return {
            "schema": 1,
            "kind": "attention",
            "machine": machine,
            "settings": {name: getattr(ready, name) for name in SETTINGS}
            | {"gradient": self.backward, "lengths": sorted(self.lengths)},
            "points": points,
            "growth": growth(points),
            "absent": absent,
        }

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES if self.backward else PHASES[:1]

    def request(self, tokens: int) -> AttentionRequest:
        """The call that is measured, of one length."""
        import torch

        from hasten.ops.attention import AttentionRequest, AttentionSpec

        spec = AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            causal=self.causal,
        )
        return AttentionRequest(
            spec=spec,
            device=torch.device(self.device),
            dtype=resolve_dtype(self.dtype),
            batch=self.batch,
            queries=tokens,
            keys=tokens,
            gradient=self.backward,
        )

    def flops(self, tokens: int) -> float:
        """FLOPs of the forward pass: two products of T × S × D a head, half of them where it is causal."""
        return 4 * self.batch * self.heads * self.head_dim * tokens**2 * (0.5 if self.causal else 1)

    def pictures(self, name: str) -> tuple[str, ...]:
        """NAME-time.png and NAME-memory.png. Raises ConfigError for a name that ends as another kind of picture."""
        path = Path(name)
        if path.suffix not in ("", ".png") and not path.suffix[1:].isdigit():
            raise ConfigError(f"--picture is {name}; the pictures are PNG: give a name that ends so, or no ending")
        stem = path.with_suffix("") if path.suffix == ".png" else path
        return tuple(f"{stem}-{what}.png" for what in ("time", "memory"))

    def draw(self, report: Mapping[str, Any], *paths: str | Path) -> None:
        """Time and memory against the length, as two PNGs."""
        draw_growth(report, *paths)

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print the table to standard error; whether any kernel could be measured."""
        print_growth(report)
        return any("rounds" in point for point in report["points"])

    def _kernels(self) -> tuple[list[str], dict[str, str]]:
        from hasten.ops.attention import KERNELS

        request = self.request(max(self.lengths))
        if self.kernels:
            return [pick(KERNELS, request, forced=name).name for name in self.kernels], {}
        refused = {k.name: reason for k in KERNELS if (reason := k.unsupported_reason(request)) is not None}
        # Two that only choose among the others.
        return [k.name for k in KERNELS if k.name not in (*refused, "sdpa", "triton")], refused

    def _length(self, names: Sequence[str], tokens: int, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One length: all kernels that fit, in interleaved rounds."""
        points: dict[str, dict[str, Any]] = {name: {"kernel": name, "tokens": tokens} for name in names}
        rungs = []
        for name, point in points.items():
            if (reason := self._too_much(name, tokens, before)) is not None:
                point["skipped"] = reason
                continue
            arguments = {"kernel": name, "tokens": tokens, "call": self}
            process: dict[str, Any] = {"device": self.device, "threads": self.threads, "seed": self.seed}
            rungs.append(Rung(name, (), "hasten.bench.attention:AttentionRung", arguments, **process))
        tell, timeout = (lambda text: say(f"{tokens} tokens, {text}")), 600 + 4 * self.point_seconds
        for run in run_interleaved(rungs, rounds=self.rounds, timeout=timeout, tell=tell):
            points[run.rung.name] |= self._summary(run.rounds, tokens) if run.error is None else {"error": run.error}
        return list(points.values())

    def _summary(self, rounds: list[dict[str, float]], tokens: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for phase in self.phases:
            seconds, products = f"{phase}_seconds", PRODUCTS[phase]
            found[seconds] = median(metrics[seconds] for metrics in rounds)
            found[f"{phase}_gflops"] = products * self.flops(tokens) / found[seconds] / 1e9
            found[f"{phase}_peak_bytes"] = rounds[0][f"{phase}_peak_bytes"]
        return found | {"rounds": rounds}

    def _too_much(self, name: str, tokens: int, before: Sequence[dict[str, Any]]) -> str | None:
        """Why this point is left out: its scores will not fit, or it will take too long."""
        scores = 4 * self.batch * self.heads * tokens**2
        need = EXPLICIT.get(name, 0) * scores * (2 if self.backward else 1) // 2
        free = available_memory(self.device)
        if need > 0.9 * free:
            return f"it needs about {format_value(need, 'bytes')}, {format_value(free, 'bytes')} are free"
        own = [point for point in before if point["kernel"] == name]
        if not own:
            return None
        if "skipped" in own[-1] or "error" in own[-1]:
            return own[-1].get("skipped") or own[-1]["error"]
        seconds = sum(own[-1].get(f"{phase}_seconds", 0) for phase in PHASES) * (tokens / own[-1]["tokens"]) ** 2
        return f"it would take about {seconds:.0f} s" if seconds > self.point_seconds else None


class AttentionRung:
    """Set up in a child: inputs of one length, for one kernel, after a warm-up on a few tokens."""

    def __init__(self, *, kernel: str, tokens: int, call: AttentionGrowth) -> None:
        from hasten.ops.attention import KERNELS

        self.call, self.request = call, call.request(tokens)
        self.device = self.request.device
        self.run = pick(KERNELS, self.request, forced=kernel).run
        self.inputs = self._inputs(WARM_TOKENS)
        for phase in self.call.phases:
            self._once(phase)
        reset_peak_memory(self.call.device)
        self.baseline = process_memory() if self.call.device == "cpu" else 0
        self.inputs = self._inputs(tokens)

    def _inputs(self, tokens: int) -> list[Any]:
        import torch

        call, heads = self.call, (self.call.heads, *2 * [self.call.kv_heads or self.call.heads])
        like: dict[str, Any] = {"dtype": self.request.dtype, "device": self.device, "requires_grad": call.backward}
        return [torch.randn(call.batch, tokens, own, call.head_dim, **like) for own in heads]

    def _once(self, phase: str) -> None:
        import torch

        if phase == "forward":
            with torch.no_grad():
                self.run(*self.inputs, self.request.spec)
        else:
            self.run(*self.inputs, self.request.spec).sum().backward()
            for x in self.inputs:
                x.grad = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self) -> dict[str, float]:
        """Seconds of each phase, and the peak memory so far after it; the second needs more than the first."""
        found: dict[str, float] = {}
        for phase in self.call.phases:
            calls, start = 1, time.perf_counter()
            self._once(phase)
            if time.perf_counter() - start < LEAST_SECONDS:  # it was the warm-up
                calls, start = 0, time.perf_counter()
                while calls == 0 or time.perf_counter() - start < LEAST_SECONDS:
                    self._once(phase)
                    calls += 1
            found[f"{phase}_seconds"] = (time.perf_counter() - start) / calls
            found[f"{phase}_peak_bytes"] = max(0, peak_memory(self.call.device) - self.baseline)
        return found


def growth(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each kernel the exponents p of time ~ Tᵖ and memory ~ Tᵖ between its two longest lengths."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(point["kernel"] for point in points):
        own = [point for point in points if point["kernel"] == name and "rounds" in point]
        if len(own) < 2:
            continue
        one, other = own[-2:]
        phase = PHASES[1] if f"{PHASES[1]}_seconds" in other else PHASES[0]
        step = math.log(other["tokens"] / one["tokens"])
        found[name] = {
            "from": one["tokens"],
            "to": other["tokens"],
            "time": math.log(other[f"{phase}_seconds"] / one[f"{phase}_seconds"]) / step,
            "memory": math.log(max(1, other[f"{phase}_peak_bytes"]) / max(1, one[f"{phase}_peak_bytes"])) / step,
        }
    return found
