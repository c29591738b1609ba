"""How fast a model decodes in each format of its weights, and whether anything is slower than in another version.

    python benchmarks/speeds.py formats --model runs/code-25m/model --gptq GPTQ_INT4_G32 \\
        --text held-out.jsonl --llama-python PYTHON_WITH_LLAMA_CPP --output benchmarks/results/format-speeds.json \\
        --picture benchmarks/results/format-speeds.png
    git worktree add /tmp/before COMMIT
    python benchmarks/speeds.py versions --before-source /tmp/before/src --output FILE

The folders are made by `hasten quantize` (rounding to nearest, which has the speed of every method: the rows of --gptq
are there to show it); llama.cpp's files by its own quantizer from our BF16 export. llama.cpp decodes its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import hasten
from hasten.bench.generate import RUNGS, TEXT_BYTES, GenerateLadder
from hasten.bench.models import BenchmarkModel, choose_rungs
from hasten.bench.train import TrainLadder, TrainRung
from hasten.checkpoints.gguf.header import read_gguf
from hasten.checkpoints.load import open_checkpoint
from hasten.data import read_documents
from hasten.evaluation.divergence import divergence
from hasten.machine import available_cores
from hasten.measure.draw import LINES, curve_axes
from hasten.measure.process import Rung
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.table import machine_line
from hasten.measure.workers import Worker
from hasten.model.fused import fuse_where_it_fits
from hasten.planning.cost import kv_bytes_per_token
from quantization import LLAMA_CPP_QUANTIZE, digest, export_gguf, quantized_bits

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Versions(Script):
    """Two versions of hasten in turns. A rung is set up in a process of each version; the two measure one by one."""

    result = "versions"
    before_source: Path
    """The src folder of the other version."""
    shape: str = "llama-1.1b"
    rungs: tuple[str, ...] = ()
    """Only these."""
    rounds: int = 8
    threads: int = len(os.sched_getaffinity(0))

    def measure(self) -> Report:
        before = self.before_source
        if not (before / "hasten").is_dir():
            raise SystemExit(f"{before} holds no hasten; give the src folder of a checkout")
        with tempfile.TemporaryDirectory(prefix="hasten-versions-") as folder:
            known = version_rungs(self.shape, folder)
            names = choose_rungs(known, self.rungs)
            how = {"rounds": self.rounds, "threads": self.threads}
            rows = [two_versions(before, name, *known[name], **how) for name in names]
        commits = {"before": commit(before), "now": commit(ROOT / "src")}
        return {"commits": commits, "isa": os.environ.get("HASTEN_ISA"), "rows": rows}


def version(source: Path, threads: int, setup: str, arguments: dict[str, Any]) -> Worker:
    """A process that measures one rung with the hasten of one source folder."""
    environment = {"PYTHONPATH": str(source), "HASTEN_MEASURE": "0"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = arguments["compile_cache"]
    command = [sys.executable, "-c", PROCESS, threads, setup, json.dumps(arguments)]
    return Worker(f"hasten of {source}", command, environment)


def speeds_of(found: dict[str, float]) -> dict[str, float]:
    """The speeds of one measurement, in tokens/s."""
    return {k: speed for k, speed in found.items() if "tokens_per_second" in k and not k.startswith("predicted")}


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


@dataclass(frozen=True, kw_only=True)
class FormatSpeeds(Script):
    """Tokens a second in each format, and what each format loses."""

    result = "format-speeds"
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
    picture: Path | None = None
    """Where to draw tokens a second by what is lost."""

    def measure(self) -> Report:
        if self.picture is not None and self.text is None:
            raise SystemExit("--picture draws what is lost: give --text too")
        settings = {"model": self.model.parent.name, "prompt_tokens": PROMPT, "weights_sha256": digest(self.model)}
        with tempfile.TemporaryDirectory(prefix="hasten-format-speeds-") as place:
            found = self.ladder(Path(place), settings)
        if self.picture is not None:
            draw_speeds(found, self.picture)
        return found

    def ladder(self, place: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """All formats, each in a process of its own."""
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
                bits[name] = quantized_bits(self.model, folder, options)
            arguments = {"ladder": ladder, "mode": RUNGS[mode], "source": BenchmarkModel(model=str(folder))}
            techniques = RUNGS[mode].techniques
            made.append(Rung(name, techniques, "hasten.bench.generate_rung:GenerateRung", arguments))
        if self.llama_python is not None:
            export_gguf(self.model, place / "plain.gguf")
            for kind in PUBLISHED:
                file = place / f"{kind}.gguf"
                script = LLAMA_CPP_QUANTIZE
                subprocess.run([self.llama_python, script, place / "plain.gguf", file, kind], check=True)
                arguments = {"python": self.llama_python, "file": file, "plain": self.model, "text": self.text}
                made.append(Rung(f"llama.cpp {kind}", ("llama.cpp",), "speeds:LlamaCpp", arguments))
        bits["int8, 16-bit activations"] = bits.get("int8")
        if self.gptq is not None:
            bits["int4 g32 by gptq"] = stored_bits(self.gptq, self.model)
        report = ladder.measure(made, kind="generate", settings=settings, dtypes=())
        for row in report["rows"]:
            row.setdefault("bits_per_weight", bits.get(row["name"]))
        ladder.show(report | {"settings": report["settings"] | {"gptq": None, "left_out": {}}})
        return report


def stored_bits(folder: Path, plain: Path) -> float:
    """All that a folder stores, per weight of the plain model."""
    stored, weights = ([*load_file(place / "model.safetensors").values()] for place in (folder, plain))
    return 8 * sum(one.nbytes for one in stored) / sum(one.numel() for one in weights)


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of formats that hasten or llama.cpp makes. The file has one that was chosen by bits."""
    own = {*CASES, "int4 g32 by gptq"}
    return [row for row in rows if row["name"] in own or row["name"].startswith("llama.cpp")]


def draw_speeds(report: dict[str, Any], path: Path) -> None:
    """Tokens a second by KL divergence; a point's size is its bits per weight."""
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
        script = LLAMA_CPP_QUANTIZE.with_name("llama_cpp_speed.py")
        numbers = map(str, (PROMPT, NEW, available_cores().physical))
        self.worker = Worker("llama.cpp", [python, script, file, *numbers])

    def describe(self) -> dict[str, Any]:
        return self.facts | self.scores

    def measure(self) -> dict[str, float]:
        found: dict[str, float] = self.worker.ask("measure")
        return found


def scores(file: Path, plain: Path, text: str) -> dict[str, float]:
    """How far a file is from the model that it was made of, by our products."""
    models = [fuse_where_it_fits(hasten.load(one, dtype="bfloat16")) for one in (file, plain)]
    found = divergence(*models, list(read_documents(text, limit_bytes=TEXT_BYTES)))
    return {"perplexity": found.perplexity, "kl_mean": found.kl_mean, "kl_99": found.kl_99, "top1": found.top1}


NATIVE = ("native-bf16", "native-int8", "native-int4")
# What a version's process does: set up a rung, then measure it once for each line that it is sent.
PROCESS = """
import importlib, inspect, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what else is printed is no answer
import torch
torch.set_num_threads(int(sys.argv[1]))
class Serving:  # LLM.generate over prompts of random tokens, all of them at once
    def __init__(self, shape, requests, prompt_tokens, group_size):
        import hasten
        from hasten.bench.models import BenchmarkModel
        from hasten.quantization import Int4, quantize
        model = BenchmarkModel(shape=shape).build(dtype=torch.bfloat16, device="cpu", seed=0)
        if group_size:
            model = quantize(model, Int4(group_size=group_size))
        self.llm, self.requests, self.prompt_tokens = hasten.LLM(model), requests, prompt_tokens
        self.params = hasten.SamplingParams(temperature=0, max_new_tokens=32)
    def measure(self):
        import time
        shape = (self.requests, self.prompt_tokens)
        prompts = torch.randint(self.llm.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        started = time.perf_counter()
        answers = self.llm.generate(prompts.tolist(), self.params)
        tokens = sum(len(answer.tokens) for answer in answers)
        return {"served_tokens_per_second": tokens / (time.perf_counter() - started)}
module, name = sys.argv[2].split(":")
setup, arguments = getattr(importlib.import_module(module), name), json.loads(sys.argv[3])
parameters = inspect.signature(setup).parameters
given = {name: arguments[name] for name in parameters if name in arguments}
if "ladder" in given:
    from hasten.bench.generate import RUNGS, GenerateLadder
    given |= {"ladder": GenerateLadder(**given["ladder"]), "mode": RUNGS[arguments["rung"]]}
if "recipe" in given:
    from hasten.training.recipe import Recipe
    given["recipe"] = Recipe.from_json(given["recipe"])
if "config" in parameters:
    from hasten.planning.shapes import shape_config
    given["config"] = shape_config(arguments["shape"])
rung = setup(**given)
for line in sys.stdin:
    rung.measure() if line.strip() == "warm" else None
    print(json.dumps(rung.measure()), file=answers, flush=True)
"""


def version_rungs(shape: str, compiled: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: what sets a rung up, and its arguments, named as in every version. compiled: torch's folder."""
    common: dict[str, Any] = {"compile_cache": compiled}
    ladder = {"device": "cpu", "seed": 0, "dtype": "bfloat16", "prompt_tokens": 512, "new_tokens": 32, "shape": shape}
    common |= {"ladder": ladder}
    found = {name: ("hasten.bench.generate_rung:GenerateRung", common | {"rung": name}) for name in NATIVE}
    recipe, _ = TrainLadder(shape="gpt2-124m", sequence_length=256).recipe_and_config(2)
    recipe = replace(recipe, techniques=replace(recipe.techniques, precision="auto"))
    training = {"recipe": asdict(recipe), "shape": "gpt2-124m", "steps": 2, "device": "cpu", "compile_cache": compiled}
    serving = {  # requests, tokens of each prompt, groups of int4 weights
        "serve-1": (1, 64, 0),
        "serve-16": (16, 64, 0),
        "serve-int4-g32": (1, 512, 32),
        "serve-int4-g128": (1, 512, 128),
    }
    for name, (requests, prompt, group) in serving.items():
        own = {"shape": shape, "requests": requests, "prompt_tokens": prompt, "group_size": group}
        found[name] = ("__main__:Serving", common | own)
    return found | {"train-gpt2-124m": (f"{TrainRung.__module__}:{TrainRung.__name__}", training)}


def two_versions(
    before: Path, name: str, setup: str, arguments: dict[str, Any], *, rounds: int, threads: int
) -> dict[str, Any]:
    """Both versions of one rung: the speeds of all rounds, their ratios, and the median of those."""
    sources = {"before": before, "now": ROOT / "src"}
    versions = {name: version(source, threads, setup, arguments) for name, source in sources.items()}
    found: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    for one in versions.values():
        speeds_of(one.ask("warm"))
    for number in range(rounds):
        for which in ("before", "now") if number % 2 else ("now", "before"):
            found[which].append(speeds_of(versions[which].ask()))
    for one in versions.values():
        one.close()
    row: dict[str, Any] = {"rung": name, "rounds": found, "ratio": {}, "ratios": {}}
    for metric in found["now"][0]:
        speeds = {which: [one[metric] for one in each] for which, each in found.items()}
        ratios = [now / before for now, before in zip(speeds["now"], speeds["before"], strict=True)]
        # Ratios of neighbours: the memory's speed changes within a run, and medians would be of unlike states.
        row["ratio"][metric], row["ratios"][metric] = statistics.median(ratios), ratios
        shown = " ".join(f"{ratio:.2f}" for ratio in row["ratios"][metric])
        print(f"{name} {metric}: now / before {row['ratio'][metric]:.3f}, in each round {shown}", flush=True)
    return row


def commit(source: Path) -> str:
    """The commit of a checkout, with a + where files differ from it."""
    return subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True
    ).stdout.strip()


def version_table(report: Report) -> str:
    """`versions.py`: what the later version makes of the earlier one's speeds."""
    rows = []
    for row in report["rows"]:
        for metric, ratio in row["ratio"].items():
            if metric.startswith("predicted"):
                continue
            what = next((name for name in ("prefill", "decode", "served") if name in metric), "training")
            each = row["ratios"][metric]
            rows.append(
                [row["rung"], what, f"{ratio:.2f}×", f"{min(each):.2f} to {max(each):.2f} in {len(each)} rounds"]
            )
    head = ["rung", "", f"{report['commits']['now']} / {report['commits']['before']}", "in each round"]
    return markdown(head, rows, left=2)


def speed_table(report: Report) -> str:
    """`format_speeds.py`: what each format gives, and what it costs; llama.cpp's without a prediction."""
    rows = []
    for one in shown(report["rows"]):
        speed = [f"{one['decode_tokens_per_second']:,.0f}", f"{one['speedup']:.2f}×", f"{one['mbu']:.0%}"]
        predicted = one.get("predicted_tokens_per_second")
        share = "" if predicted is None else f"{predicted / one['decode_tokens_per_second']:.2f}"
        size = [f"{one['bits_per_weight']:.2f}", f"{one['bytes_per_token'] / 1e6:.1f}"]
        loss = [f"{one['kl_mean']:.5f}", f"{one['perplexity']:.2f}"]
        rows.append([one["name"], *size, *speed, share, *loss])
    head = [
        "weights",
        "bits in all",
        "MB a token",
        "tokens/s",
        "speed-up",
        "MBU",
        "predicted / measured",
        "KL divergence",
        "perplexity",
    ]
    return markdown(head, rows)


TABLES: dict[str, Table] = {
    "format-speeds": speed_table,
    **dict.fromkeys(("versions-engine", "versions-engine-again", "versions-vnni"), version_table),
}


if __name__ == "__main__":
    main({"formats": FormatSpeeds, "versions": Versions}, TABLES)
