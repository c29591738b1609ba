"""One model in ranks of one thread each, against one process of as many threads, on the same cores.

    python benchmarks/tensor_parallel.py --shape llama-1.1b --layers 4 --rounds 20 --output FILE.json --picture FILE.png

Writes a random model into a temporary folder in each format. All processes stay alive and measure in turns, so that
they see the same states of a shared machine; what is compared is the median over rounds of the ratio within a round.
`communication` is the time of a token's sums and gathers by themselves, over that of the token: an upper bound, since
inside a step the ranks' waiting for each other counts in it too. `peak` is the memory that loading and fusing takes at
its peak, in times of what the rank then holds. `predicted` is the speed of several sockets or machines over that of one
like this one, from the communication model: the link between these ranks as measured here (of two sockets: at best), of
gloo on the loopback (of two machines: at best, and with fused blocks, which they do not have), and those of the table.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch.distributed as dist
import tyro

from hasten.distributed.communication import fitted
from hasten.machine import Link
from hasten.planning.devices import LINKS
from hasten.planning.memory import InferenceUse
from hasten.planning.plan import inference_phases

WARMUP = 2
DEGREES = (2, 4, 8)  # of the predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Measure decode and prefill of one model held by several ranks."""

    shape: str = "llama-1.1b"
    layers: int = 4
    """Of the shape's; the ratio hardly depends on them, and the head's share falls with them."""
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
    output: Path | None = None
    """Where to write the JSON; printed in any case."""
    picture: Path | None = None
    """Draw the measured and the predicted speeds of decoding into this PNG."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        if self.runs:
            report = combined([json.loads(path.read_text()) for path in self.runs])
            write_json("-", report)
            write_json(self.output, report)
            if self.picture is not None:
                self.draw(report["rows"])
            return
        rows = []
        for name in self.formats:
            with tempfile.TemporaryDirectory(prefix="hasten-tensor-parallel-") as temporary:
                folder = Path(self.models or temporary) / f"{name}-{self.layers}"
                if not (folder / "config.json").exists():
                    write_model(folder, self.shape, self.layers, name)
                rows.append({"format": name} | self.measure(str(folder)))
                print(json.dumps(rows[-1]), flush=True)
        settings = {name: getattr(self, name) for name in ("shape", "layers", "ranks", "prompt", "tokens", "rounds")}
        report = {"schema": 1, "machine": describe().to_json(), **settings, "rows": rows}
        write_json("-", report)
        write_json(self.output, report)
        if self.picture is not None:
            self.draw(rows)

    def draw(self, rows: list[dict[str, Any]]) -> None:
        """Speeds over one process's, by ranks: dots as measured on the same cores, lines for as many more cores."""
        from hasten.bench.draw import LINES, curve_axes

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

    def measure(self, folder: str) -> dict[str, Any]:
        """What the ranks and the one process do, and the ratios."""
        arguments = [folder, str(self.prompt), str(self.tokens)]
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        common |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        several = [
            start([*arguments, "1"], common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(self.ranks)
        ]
        alone = [start([*arguments, str(self.ranks)], {})]
        try:
            about = {"ranks": [answer(one) for one in several], "alone": answer(alone[0])}
            found: dict[str, list[dict[str, float]]] = {"ranks": [], "alone": []}
            for number in range(WARMUP + self.rounds):
                for name, group in (("ranks", several), ("alone", alone)):
                    for one in group:
                        assert one.stdin is not None
                        one.stdin.write("go\n")
                        one.stdin.flush()
                    first, *_ = [answer(one) for one in group]
                    if number >= WARMUP:
                        found[name].append(first)
        finally:
            for one in (*several, *alone):
                one.kill()
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
        """By the link: how many times as fast so many sockets or machines are as one, whose seconds are given."""
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


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For docs/parallel-inference.md."""
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
    return [f"{count} ranks of one thread / one process of {count}", *head[1:]], rows


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process that measures when it is told."""
    command = [sys.executable, __file__, "--child", *arguments]
    return subprocess.Popen(
        command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """Its next line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("a process has ended")
    found: dict[str, float] = json.loads(line)
    return found


def config_of(shape: str, layers: int) -> Any:
    """The config of a shape with so many layers."""
    from hasten.model.families import read_config
    from hasten.planning.shapes import shape_config

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
    """A random model of the shape, with so many layers."""
    import torch

    import hasten
    from hasten.model.initialize import initialize
    from hasten.quantization import Int4, Int8, quantize

    model = initialize(config_of(shape, layers), seed=0, dtype=torch.bfloat16).eval()
    if format != "bf16":
        quantize(model, Int8() if format == "int8" else Int4(group_size=128))
    hasten.save(model, folder)


def child(folder: str, prompt: int, tokens: int, threads: int, batch: int = 1) -> None:
    """Load, say how much memory that took, and measure a round for each line of standard input."""
    import torch

    from hasten.checkpoints.load import load
    from hasten.distributed.launch import joined
    from hasten.distributed.tensor_parallel import tensor_parallel
    from hasten.engine.given_texts import GivenTexts
    from hasten.machine import peak_memory, process_memory, reset_peak_memory
    from hasten.model.fused import fuse
    from hasten.ops.collective import RankGroup
    from hasten.ops.native import library

    def sum_seconds(group: RankGroup, rows: tuple[int, ...], times: int = 8) -> dict[int, float]:
        """Of a sum, by its bytes: of so many rows of the model's width."""
        found = {}
        for count in rows:
            states = torch.zeros(count, model.config.hidden_size, dtype=torch.bfloat16)
            begun = time.perf_counter()
            for _ in range(times):
                group.sum(states)
            found[states.nbytes] = (time.perf_counter() - begun) / times
        return found

    torch.set_num_threads(threads)
    library()
    with joined() as ranks, tensor_parallel(ranks) as group, torch.inference_mode():
        reset_peak_memory()
        before = process_memory()
        model = fuse(load(folder, group=group))
        peak = peak_memory() - before
        held = sum(tensor.nbytes for tensor in model.state_dict().values())
        print(json.dumps({"held": held, "peak": peak, "times": peak / held}), flush=True)
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
            told: dict[str, Any] = {"prefill": times[0] - begun, "decode": times[-1] - times[0]}
            each = [after - before for before, after in pairwise(times)]
            told |= {"token": median(each), "least_token": min(each)}
            if group is not None:
                sums = 2 * len(model.config.layers) + 1
                begun = time.perf_counter()
                for _ in range(sums):
                    group.sum(x)
                told["sum"] = (time.perf_counter() - begun) / sums
                told["communication"] = told["sum"] * sums
                groups = {"shared memory": group, "gloo": RankGroup(group.rank, group.size)}
                told["links"] = {name: sum_seconds(one, (1, 64)) for name, one in groups.items()}
            decoder.truncate(0)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        tyro.cli(TensorParallel).run()
