"""How fast a model decodes in each format of its weights, in interleaved rounds of one ladder.

    python benchmarks/format_speeds.py --model runs/code-25m/model --gptq GPTQ_INT4_G32 \\
        --text held-out.jsonl --llama-python PYTHON_WITH_LLAMA_CPP --output benchmarks/results/format-speeds.json \\
        --picture benchmarks/results/format-speeds.png

The folders are made by `hasten quantize` (rounding to nearest, which has the speed of every method: the rows of --gptq
are there to show it); llama.cpp's files by its own quantizer from our BF16 export. llama.cpp decodes its own.

The folder by GPTQ and that by rounding to nearest are also run by turns in one process, a few tokens each, with a
second copy of the latter that shows the noise; --only-paired measures nothing else.
"""

import json
import random
import subprocess
import tempfile
import time
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from quantize_quality import command, digest

CASES = {  # name -> options of hasten quantize, rung
    "bfloat16": (None, "native-bf16"),
    "int8": (["--scheme", "int8", "--activations", "int8"], "native-int8"),
    "int8, 16-bit activations": (None, "int8-weight-only"),
    "int4 g128": (["--scheme", "int4", "--group-size", "128"], "native-int4"),
    "int4 g64": (["--scheme", "int4", "--group-size", "64"], "native-int4"),
    "int4 g32": (["--scheme", "int4", "--group-size", "32"], "native-int4"),
    "int3 g32": (["--scheme", "int3", "--group-size", "32"], "native-bf16"),
    "int3 g128": (["--scheme", "int3", "--group-size", "128"], "native-bf16"),
}
PUBLISHED = ("Q8_0", "Q4_0", "Q4_K_M", "Q3_K_M")
PROMPT, NEW = 256, 128  # tokens
TURN = 32  # tokens in a row of one of two that are paired
LOADS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpeeds:
    """Measure decoding."""

    model: Path
    """The model's folder, in plain weights."""

    gptq: Path | None = None
    """The same in int4 g32 by GPTQ."""

    text: str | None = None
    """Also score each format on the first 200 KB of this, by the products that are timed; llama.cpp's files by ours."""

    llama_python: Path | None = None
    """A Python that has llama-cpp-python: llama.cpp's formats too."""

    cases: tuple[str, ...] = tuple(CASES)
    """Which formats of ours."""

    rounds: int = 20
    """Every format once in each."""

    paired_rounds: int = 600
    """Turns of the pair; 0: none."""

    only_paired: bool = False
    """The pair alone."""

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case."""

    picture: Path | None = None
    """Where to draw tokens a second by what is lost."""

    def run(self) -> None:
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        if self.picture is not None and (self.only_paired or self.text is None):
            raise SystemExit("--picture takes --text, and the table: leave out --only-paired")
        with tempfile.TemporaryDirectory(prefix="hasten-format-speeds-") as place:
            settings = {"model": self.model.parent.name, "prompt_tokens": PROMPT}
            settings["weights_sha256"] = digest(self.model)
            report: dict[str, Any] = {"machine": describe().to_json(), "settings": settings}
            nearest = Path(place) / "int4-g32"
            if not self.only_paired:
                report = self.ladder(Path(place), settings)
            if self.gptq is not None and self.paired_rounds:
                if not nearest.exists():
                    quantize(self.model, nearest, CASES["int4 g32"][0])
                configure(threads="auto", seed=None)
                report["paired"] = paired(nearest, self.gptq, self.paired_rounds)
                print(json.dumps(report["paired"], indent=2))
        if self.output is not None:
            write_json(self.output, report)
        if self.picture is not None:
            draw(report, self.picture)

    def ladder(self, place: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """All formats, each in a process of its own."""
        from hasten.bench.generate import RUNGS, GenerateLadder
        from hasten.bench.models import BenchmarkModel
        from hasten.bench.process import Rung

        wanted = [(name, *CASES[name], self.model) for name in self.cases]
        if self.gptq is not None:
            wanted.append(("int4 g32 by gptq", None, "native-int4", self.gptq))
        ladder = GenerateLadder(
            model=str(self.model),
            device="cpu",
            text=self.text,
            dtype="bfloat16",
            prompt_tokens=PROMPT,
            new_tokens=NEW,
            rounds=self.rounds,
        )
        made, bits = [], {"bfloat16": 16.0}
        for name, options, mode, folder in wanted:
            if options is not None:
                folder = place / name.replace(" ", "-")
                bits[name] = quantize(self.model, folder, options)
            arguments = {"ladder": ladder, "mode": RUNGS[mode], "source": BenchmarkModel(model=str(folder))}
            techniques = RUNGS[mode].techniques
            made.append(Rung(name, techniques, "hasten.bench.generate_rung:GenerateRung", arguments))
        if self.llama_python is not None:
            command(["export", str(self.model), str(place / "plain.gguf"), "--gguf", "BF16"], parse=False)
            for kind in PUBLISHED:
                file = place / f"{kind}.gguf"
                script = Path(__file__).with_name("llama_cpp_quantize.py")
                subprocess.run([self.llama_python, script, place / "plain.gguf", file, kind], check=True)
                arguments = {"python": self.llama_python, "file": file, "plain": self.model, "text": self.text}
                made.append(Rung(f"llama.cpp {kind}", ("llama.cpp",), "format_speeds:LlamaCpp", arguments))
        bits["int8, 16-bit activations"] = bits.get("int8")
        if self.gptq is not None:
            bits["int4 g32 by gptq"] = stored_bits(self.gptq, self.model)
        report = ladder.measure(made, kind="generate", settings=settings, dtypes=())
        for row in report["rows"]:
            row.setdefault("bits_per_weight", bits.get(row["name"]))
        ladder.show(report | {"settings": report["settings"] | {"gptq": None, "left_out": {}}})
        return report


def quantize(model: Path, folder: Path, options: list[str]) -> float:
    """A folder by `hasten quantize`; its bits per weight in all."""
    head = ["--lm-head", "int8"]  # also a tied one
    bits: float = command(["quantize", str(model), *options, *head, "--output", str(folder)])["bits_per_weight"]
    return bits


def stored_bits(folder: Path, plain: Path) -> float:
    """All that a folder stores, per weight of the plain model."""
    from safetensors.torch import load_file

    stored, weights = ([*load_file(place / "model.safetensors").values()] for place in (folder, plain))
    return 8 * sum(one.nbytes for one in stored) / sum(one.numel() for one in weights)


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of formats that hasten or llama.cpp makes. The file has one that was chosen by bits."""
    own = {*CASES, "int4 g32 by gptq"}
    return [row for row in rows if row["name"] in own or row["name"].startswith("llama.cpp")]


def draw(report: dict[str, Any], path: Path) -> None:
    """Tokens a second by KL divergence; a point's size is its bits per weight."""
    from hasten.bench.draw import LINES, curve_axes
    from hasten.bench.table import machine_line

    with curve_axes(
        path,
        title="Speed by what is lost",
        subtitle=f"{report['settings']['model']}, one sequence; {machine_line(report['machine'])}; MBU beside each",
        x_label="KL divergence from bfloat16 (nats per token; 0 is drawn at 1e-5)",
        y_label="decode tokens/s",
    ) as axes:
        for color, program in zip(LINES, ("hasten", "llama.cpp"), strict=False):
            rows = shown(report["rows"])
            own = [row for row in rows if row["name"].startswith("llama.cpp") == (program == "llama.cpp")]
            points = [(max(row["kl_mean"], 1e-5), row["decode_tokens_per_second"]) for row in own]
            sizes = [4 * row["bits_per_weight"] for row in own]
            axes.scatter(*zip(*points, strict=True), s=sizes, color=color, label=program)
            for point, row in zip(points, own, strict=True):
                text = f"{row['name'].removeprefix('llama.cpp ')}, {row['mbu']:.0%}"
                axes.annotate(text, point, xytext=(3, 3), textcoords="offset points", fontsize=6)
        axes.set_xscale("log")


class LlamaCpp:
    """A rung of the ladder: llama.cpp decodes one of its files, in a process of its Python."""

    def __init__(self, *, python: Path, file: Path, plain: Path, text: str | None) -> None:
        from hasten.checkpoints.gguf.header import read_gguf
        from hasten.checkpoints.load import open_checkpoint
        from hasten.machine import available_cores
        from hasten.planning.cost import kv_bytes_per_token

        self.scores = {} if text is None else scores(file, plain, text)
        header = read_gguf(file)
        tied = "output.weight" not in header.tensors
        read = sum(one.bytes for name, one in header.tensors.items() if tied or name != "token_embd.weight")
        weights = sum(prod(one.shape) for one in header.tensors.values())
        stored = sum(one.bytes for one in header.tensors.values())
        cache = kv_bytes_per_token(open_checkpoint(plain).config, 2)  # of float16
        self.facts = {
            "bytes_per_token": read + cache * (PROMPT + NEW // 2),
            "bits_per_weight": 8 * stored / weights,
            "context": PROMPT + NEW // 2,
            "decoded_tokens": NEW,
        }
        script = Path(__file__).with_name("llama_cpp_speed.py")
        numbers = map(str, (PROMPT, NEW, available_cores().physical))
        self.process = subprocess.Popen(
            [python, script, file, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def describe(self) -> dict[str, Any]:
        return self.facts | self.scores

    def measure(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("measure\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found


def scores(file: Path, plain: Path, text: str) -> dict[str, float]:
    """How far a file is from the model that it was made of, by our products."""
    import hasten
    from hasten.bench.generate import TEXT_BYTES
    from hasten.data import read_documents
    from hasten.evaluation.divergence import divergence
    from hasten.model.fused import fuse_where_it_fits

    models = [fuse_where_it_fits(hasten.load(one, dtype="bfloat16")) for one in (file, plain)]
    found = divergence(*models, list(read_documents(text, limit_bytes=TEXT_BYTES)))
    return {"perplexity": found.perplexity, "kl_mean": found.kl_mean, "kl_99": found.kl_99, "top1": found.top1}


def paired(nearest: Path, gptq: Path, rounds: int) -> dict[str, Any]:
    """Two folders by turns in one process, and a second copy of the first: tokens/s, and the median of the ratios with
    the interval that holds it with 95% (of order statistics, whatever the distribution).

    They are loaded anew `LOADS` times in changing order: where weights lie in memory is worth a percent or two.
    """
    import torch

    import hasten
    from hasten.engine.given_texts import GivenTexts
    from hasten.model.fused import fuse

    prompt = torch.randint(3, 256, (1, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    folders = {"rtn": nearest, "gptq": gptq, "rtn again": nearest}
    speeds: dict[str, list[float]] = {name: [] for name in folders}
    orders, names = random.Random(0), list(folders)
    each = rounds // LOADS
    rounds = each * LOADS
    for number in range(LOADS * (each + 5)):
        if (number := number % (each + 5)) == 0:
            orders.shuffle(names)
            decoders, first = {}, {}
            for name in names:
                model = hasten.load(folders[name], dtype="bfloat16")
                decoders[name] = GivenTexts(fuse(model), batch=1, capacity=PROMPT + TURN)
                first[name] = decoders[name].prefill(prompt).argmax(-1)
        orders.shuffle(names)
        for name in names:
            decoders[name].truncate(PROMPT)
            tokens, start = first[name], time.perf_counter()
            for _ in range(TURN):
                tokens = decoders[name].decode(tokens).argmax(-1)
            if number >= 5:
                speeds[name].append(TURN / (time.perf_counter() - start))
    found: dict[str, Any] = {
        "rounds": rounds,
        "loads": LOADS,
        "tokens": TURN,
        "speeds": {n: median(s) for n, s in speeds.items()},
    }
    for name in ("gptq", "rtn again"):
        ratios = sorted(one / other for one, other in zip(speeds[name], speeds["rtn"], strict=True))
        off = int(0.98 * sqrt(rounds)) + 1  # 1.96 standard deviations of a rank
        low, high = ratios[max(0, rounds // 2 - off)], ratios[min(rounds - 1, rounds // 2 + off)]
        found[f"{name} / rtn"] = {"median": median(ratios), "low": low, "high": high}
    return found


if __name__ == "__main__":
    import tyro

    tyro.cli(FormatSpeeds).run()
