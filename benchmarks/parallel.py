"""What ranks of this machine do together: one model in several, and the steps of two that train.

    python benchmarks/parallel.py tensor --layers 22 --output benchmarks/results/tensor-parallel.json \\
        --picture benchmarks/results/tensor-parallel.png
    python benchmarks/parallel.py zero --output benchmarks/results/zero-profile.json

What the stages of ZeRO hold and send, and how they scale: zero.py.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hasten
from hasten.bench.train import StepOptions
from hasten.checkpoints.load import load
from hasten.data import Batch
from hasten.distributed.communication import fitted
from hasten.distributed.launch import joined
from hasten.distributed.tensor_parallel import tensor_parallel
from hasten.engine.given_texts import GivenTexts
from hasten.machine import Link, peak_memory, process_memory, reset_peak_memory
from hasten.measure.draw import LINES, curve_axes
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import Worker, child_command, on_ranks, reply
from hasten.model.families import read_config
from hasten.model.fused import fuse
from hasten.model.initialize import initialize
from hasten.ops.collective import RankGroup
from hasten.ops.native import library
from hasten.planning.devices import LINKS
from hasten.planning.memory import InferenceUse
from hasten.planning.plan import inference_phases
from hasten.planning.shapes import shape_config
from hasten.quantization import Int4, Int8, quantize
from hasten.training import build
from hasten.training.precision import choose_precision
from hasten.training.recipe import Parallel


def worker(arguments: list[Any], place: dict[str, str] | None = None) -> Worker:
    return Worker("a rank", child_command(__file__, "model", *arguments), place)


def places(ranks: int) -> list[dict[str, str]]:
    """The environment of each of some ranks, which meet at a new store."""
    STORES.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(STORES[-1].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


STORES: list[dist.TCPStore] = []  # as long as this process


def together(workers: Sequence[Worker]) -> list[dict[str, float]]:
    """The answers of several that measure at the same time."""
    for one in workers:
        one.send()
    return [one.answer() for one in workers]


def profile_rank(steps: str, out: str) -> None:
    """One rank: every stage under the profiler; the first one writes what it found."""
    torch.set_num_threads(1)
    with joined() as ranks:
        rows = [ZeroProfile.stage(zero, int(steps), ranks) for zero in range(4)]
        if ranks.first:
            Path(out).write_text(json.dumps(rows))


WARMUP = 2
DEGREES = (2, 4, 8)  # of the predictions


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Script):
    """Decode and prefill of one model in ranks of one thread each, against one process of as many threads.

    Writes a random model into a temporary folder in each format. All processes stay alive and measure in turns on the
    same cores; what is compared is the median over rounds of the ratio within a round. `communication` is the time of a
    token's sums and gathers by themselves, over that of the token: an upper bound, since inside a step the ranks'
    waiting for each other counts in it too. `peak` is the memory that loading and fusing takes at its peak, in times of
    what the rank then holds. `predicted` is the speed of several sockets or machines over that of one like this one,
    from the communication model: the link between these ranks as measured here (of two sockets: at best), of gloo on
    the loopback (of two machines: at best, and with fused blocks, which they do not have), and those of the table.
    """

    result = "tensor-parallel"
    shape: str = "llama-1.1b"
    layers: int = 4
    """Layers of the shape; the ratio hardly depends on them, and the head's share falls with them."""
    ranks: int = 2
    formats: tuple[Literal["bf16", "int8", "int4"], ...] = ("bf16", "int8", "int4")
    prompt: int = 256
    tokens: int = 32
    """Decoded in a round."""
    rounds: int = 20
    models: Path | None = None
    """Where the random models are, or are put; by default they are not kept."""
    runs: tuple[Path, ...] = ()
    """Measure nothing: count the rounds of all these reports of the same settings, and take the rest from the last."""
    picture: Path | None = None
    """Draw the measured and the predicted speeds of decoding into this PNG."""

    def measure(self) -> Report:
        if self.runs:
            found = combined([json.loads(path.read_text()) for path in self.runs])
        else:
            found = {name: getattr(self, name) for name in ("shape", "layers", "ranks", "prompt", "tokens", "rounds")}
            found["rows"] = [self.of_format(name) for name in self.formats]
        if self.picture is not None:
            self.draw(found["rows"])
        return found

    def of_format(self, name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="hasten-tensor-parallel-") as temporary:
            folder = Path(self.models or temporary) / f"{name}-{self.layers}"
            if not (folder / "config.json").exists():
                write_model(folder, self.shape, self.layers, name)
            row = {"format": name} | self.compared(str(folder))
        print(json.dumps(row), flush=True)
        return row

    def draw(self, rows: list[dict[str, Any]]) -> None:
        """Speeds over one process's, by ranks: dots as measured on the same cores, lines for as many more cores."""
        assert self.picture is not None
        title = "Decoding with tensor parallelism"
        subtitle = "dots: ranks on the cores of one process; lines: predicted, such cores for each rank"
        labels = {"x_label": "ranks", "y_label": "times the speed of one process"}
        with curve_axes(self.picture, title=title, subtitle=subtitle, **labels) as axes:
            for row, color in zip(rows, LINES, strict=False):
                for name, style in zip(row["links"], ("-", "--"), strict=True):
                    gains = row["predicted"][row["links"][name]["source"]]["decode"]
                    label = f"{row['format']}, {name}"
                    axes.plot([1, *gains], [1, *gains.values()], color=color, linestyle=style, label=label)
                axes.plot(self.ranks, row["speed"]["decode"]["ratio"], "o", color=color)

    def compared(self, folder: str) -> dict[str, Any]:
        """What the ranks and the one process do, and the ratios."""
        arguments = [folder, self.prompt, self.tokens]
        several = [worker([*arguments, 1], place) for place in places(self.ranks)]
        alone = [worker([*arguments, self.ranks])]
        try:
            about = {"ranks": [one.answer() for one in several], "alone": alone[0].answer()}
            found: dict[str, list[dict[str, float]]] = {"ranks": [], "alone": []}
            for number in range(WARMUP + self.rounds):
                for name, group in (("ranks", several), ("alone", alone)):
                    first, *_ = together(group)
                    if number >= WARMUP:
                        found[name].append(first)
        finally:
            for one in (*several, *alone):
                one.close()
        speed = {
            phase: speeds({name: [self._rate(one, phase) for one in rounds] for name, rounds in found.items()})
            for phase in ("decode", "prefill")
        }
        share = median(one["communication"] * self.tokens / one["decode"] for one in found["ranks"])
        microseconds = 1e6 * median(one["sum"] for one in found["ranks"])
        links = {
            name: fitted(
                {int(size): median(one["links"][name][size] for one in found["ranks"]) for size in sizes},
                ranks=self.ranks,
                source=f"{name}, as measured here",
            )
            for name, sizes in found["ranks"][0]["links"].items()
        }
        whole = {phase: median(one[phase] for one in found["alone"]) for phase in speed}
        return {
            "speed": speed,
            "communication": share,
            "sum_microseconds": microseconds,
            "memory": about,
            "links": {name: asdict(link) for name, link in links.items()},
            "predicted": self.gains(whole, links),
        }

    def gains(self, whole: dict[str, float], links: dict[str, Link]) -> dict[str, dict[str, dict[int, float]]]:
        """By link: how many times as fast several sockets or machines are as one, whose seconds are given."""
        config = config_of(self.shape, self.layers)
        length = self.prompt + self.tokens
        found: dict[str, dict[str, dict[int, float]]] = {}
        for link in (*links.values(), *(LINKS[name] for name in ("sockets", "infiniband", "ethernet"))):
            gains = found.setdefault(link.source, {"prefill": {}, "decode": {}})
            for degree in DEGREES:
                use = InferenceUse(
                    length=length, new_tokens=self.tokens, step=self.prompt, weights=0, row_bytes=2, degree=degree
                )
                for (phase, gain), one in zip(gains.items(), inference_phases(config, use), strict=True):
                    steps = self.tokens if phase == "decode" else 1
                    between = steps * link.seconds(exchanges=one.exchanges, received=one.sent, ranks=degree)
                    gain[degree] = whole[phase] / (whole[phase] / degree + between)
        return found

    def _rate(self, one: dict[str, float], phase: str) -> float:
        """Tokens a second."""
        return (self.tokens if phase == "decode" else self.prompt) / one[phase]


def tensor_table(report: Report) -> str:
    """Speeds of the ranks beside those of one process."""
    count = report["ranks"]
    head = [
        "weights",
        "decode, tokens/s",
        "ratio",
        "prefill, tokens/s",
        "ratio",
        "a sum",
        "of a token",
        "peak of loading",
    ]
    rows = []
    for row in report["rows"]:
        cells = [row["format"]]
        for phase in ("decode", "prefill"):
            speed = row["speed"][phase]
            cells += [f"{speed['ranks']:,.0f} / {speed['alone']:,.0f}", f"{speed['ratio']:.2f}×"]
        peak = max(one["times"] for one in row["memory"]["ranks"])
        rows.append([*cells, f"{row['sum_microseconds']:.0f} µs", f"{row['communication']:.1%}", f"{peak:.2f}×"])
    return markdown([f"{count} ranks of one thread / one process of {count}", *head[1:]], rows)


def config_of(shape: str, layers: int) -> Any:
    """The config of a shape with `layers` layers."""
    return read_config(dict(shape_config(shape).source) | {"num_hidden_layers": layers})


def speeds(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of tokens/s, of the ratios within rounds, and the ratio of the medians."""
    medians = {name: median(own) for name, own in rates.items()}
    ratio = median(one / other for one, other in zip(rates["ranks"], rates["alone"], strict=True))
    return medians | {"ratio": ratio, "ratio of medians": medians["ranks"] / medians["alone"], "rounds": rates}


def combined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The last report, with the speeds of all their rounds."""
    report = reports[-1] | {"rounds": sum(one["rounds"] for one in reports)}
    for row, *earlier in zip(report["rows"], *(one["rows"] for one in reports[:-1]), strict=True):
        for phase, speed in row["speed"].items():
            of_all = [*(one["speed"][phase]["rounds"] for one in earlier), speed["rounds"]]
            row["speed"][phase] = speeds({name: [x for own in of_all for x in own[name]] for name in speed["rounds"]})
    return report


def write_model(folder: Path, shape: str, layers: int, format: str) -> None:
    """Write a random model of the shape, with `layers` layers."""
    model = initialize(config_of(shape, layers), seed=0, dtype=torch.bfloat16).eval()
    if format != "bf16":
        quantize(model, Int8() if format == "int8" else Int4(group_size=128))
    hasten.save(model, folder)


def rank_of_model(folder: str, *numbers: str) -> None:
    """Load, say how much memory that took, and measure a round for each line of standard input."""

    def sum_seconds(group: RankGroup, rows: tuple[int, ...], times: int = 8) -> dict[int, float]:
        """Seconds of a sum by its bytes, for each number of rows of the model's width."""
        found = {}
        for count in rows:
            states = torch.zeros(count, model.config.hidden_size, dtype=torch.bfloat16)
            begun = time.perf_counter()
            for _ in range(times):
                group.sum(states)
            found[states.nbytes] = (time.perf_counter() - begun) / times
        return found

    prompt, tokens, threads, batch = map(int, (*numbers, "1")[:4])
    torch.set_num_threads(threads)
    library()
    with joined() as ranks, tensor_parallel(ranks) as group, torch.inference_mode():
        reset_peak_memory()
        before = process_memory()
        model = fuse(load(folder, group=group))
        peak = peak_memory() - before
        held = sum(tensor.nbytes for tensor in model.state_dict().values())
        reply({"held": held, "peak": peak, "times": peak / held})
        decoder = GivenTexts(model, batch=batch, capacity=prompt + tokens + 1)
        ids = torch.randint(model.config.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        x = torch.randn(1, model.config.hidden_size)
        for _ in sys.stdin:
            begun = time.perf_counter()
            next_tokens = decoder.prefill([ids] * batch).argmax(dim=-1)
            times = [time.perf_counter()]
            for _ in range(tokens):
                next_tokens = decoder.decode(next_tokens).argmax(dim=-1)
                times.append(time.perf_counter())
            found: dict[str, Any] = {"prefill": times[0] - begun, "decode": times[-1] - times[0]}
            each = [after - before for before, after in pairwise(times)]
            found |= {"token": median(each), "least_token": min(each)}
            if group is not None:
                sums = 2 * len(model.config.layers) + 1
                begun = time.perf_counter()
                for _ in range(sums):
                    group.sum(x)
                found["sum"] = (time.perf_counter() - begun) / sums
                found["communication"] = found["sum"] * sums
                groups = {"shared memory": group, "gloo": RankGroup(group.rank, group.size)}
                found["links"] = {name: sum_seconds(one, (1, 64)) for name, one in groups.items()}
            decoder.truncate(0)
            reply(found)


# Beginnings of the profiler's names. FSDP's own time is mostly waiting for a message.
PARTS = {
    "products": ("aten::mm", "aten::addmm"),
    "gathers": ("FSDP::all_gather", "c10d::_allgather", "gloo:all_gather"),
    "reductions": ("FSDP::post_backward_reduce", "c10d::_reduce_scatter", "c10d::allreduce", "gloo:"),
    "copies": ("aten::copy_", "aten::cat", "aten::split", "fsdp::"),
}


@dataclass(frozen=True, kw_only=True)
class ZeroProfile(Script):
    """Where a step of two ranks spends its time at each stage of ZeRO, by torch's profiler on rank 0.

    The demo's step as `scaling` measures it: 4 rows of 256 tokens a rank, one thread each, blocks not compiled. Of each
    operator the time that is its own (not that of what it calls) in a step, beside a step that is not watched.
    """

    result = "zero-profile"
    steps: int = 12
    """Without the profiler, and a third as many with it."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            on_ranks(2, child_command(__file__, "profile", self.steps, out))
            settings = {"recipe": "demo", "rows": 4, "context": 256, "ranks": 2, "steps": self.steps}
            return {"settings": settings, "rows": json.loads(out.read_text())}

    @staticmethod
    def stage(zero: int, steps: int, ranks: Any) -> dict[str, Any]:
        recipe, config = StepOptions(recipe="demo", sequence_length=256).recipe_and_config(4)
        techniques, data = replace(recipe.techniques, compile=False), replace(recipe.data, batch_size=4 * ranks.size)
        recipe, _ = choose_precision(replace(recipe, techniques=techniques, data=data, parallel=Parallel(zero=zero)))
        step = build.training_step(initialize(build.training_config(recipe, config), seed=0), recipe, ranks=ranks)
        tokens = torch.randint(config.vocab_size, (4, 257), generator=torch.Generator().manual_seed(ranks.rank))
        batch = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)]
        for _ in range(3):
            step.run(batch)
        seconds = []
        for _ in range(steps):
            dist.barrier()
            start = perf_counter()
            step.run(batch)
            seconds.append(perf_counter() - start)
        watched = max(1, steps // 3)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(watched):
                step.run(batch)
        own = {one.key: one.self_cpu_time_total / watched / 1e6 for one in seen.key_averages()}
        found: dict[str, Any] = {"zero": zero, "seconds": median(seconds), "watched": sum(own.values())}
        for part, names in PARTS.items():
            found[part] = sum(time for key, time in own.items() if key.startswith(names))
        found["operators"] = dict(sorted(own.items(), key=lambda item: -item[1])[:20])
        return found


def profile_table(report: Report) -> str:
    """Where the time of a step goes, by stage."""
    names = ("seconds", "watched", *PARTS)
    rows = [[f"zero {one['zero']}", *(f"{1e3 * one[name]:.0f} ms" for name in names)] for one in report["rows"]]
    return markdown(["", "step", "watched", *PARTS], rows)


TABLES: dict[str, Table] = {
    "tensor-parallel": tensor_table,
    "zero-profile": profile_table,
}


if __name__ == "__main__":
    main({"tensor": TensorParallel, "zero": ZeroProfile}, TABLES, {"model": rank_of_model, "profile": profile_rank})
