"""Our native kernels beside other programs on the same weights, in interleaved rounds.

    python benchmarks/compare.py --output benchmarks/results/compare.json \\
        --hasten bf16=FOLDER int8=FOLDER int4-g32=FOLDER int4-g128=FOLDER \\
        --llama-cpp PYTHON bf16=FILE.gguf int8=FILE.gguf int4-g32=FILE.gguf int4-g128=FILE.gguf \\
        --ik-llama-cpp PYTHON bf16=FILE.gguf int8=FILE.gguf int4-g32=FILE.gguf \\
        --openvino PYTHON bf16=FOLDER int8=FOLDER int4-g128=FOLDER int4-g128=FOLDER_OF_ANOTHER_FORMAT \\
        --vllm PYTHON bf16=FOLDER --transformers PYTHON bf16=FOLDER
    python benchmarks/compare.py --show benchmarks/results/compare.json     # as Markdown

A peer is given as the Python of its environment, then its models; before each stands which of ours it is compared with:
a format, or a format, a dash and what tells two of ours apart. What each has to do, and the script that has it do so,
is in `benchmarks/peers/`; `--short` asks less of a slow machine. `hasten quantize --lm-head same` makes our quantized
folders; docs/ladder.md says how to obtain the peers. A round goes through all pairs, the peer and then ours, each in a
process of its own, with the read bandwidth measured before and after each. Beside every speed stands its share of that
bandwidth: tokens/s times the bytes of weights that a token must read, the cache (about 40 tokens) not counted.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import tyro

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

    def run(self, *, threads: int, timeout: float, work: Work = LONG) -> dict[str, Any]:
        """What its script answers, with the bandwidth right before and after (their mean); or {"error": one line}."""
        before = bandwidth_of(threads)
        command = [*self.command, str(self.model), "--threads", str(threads), "--format", self.format]
        command += ["--short"] * (work == SHORT)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": _without_paths(str(error))}
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            print(done.stderr[-2000:], file=sys.stderr)
            last = done.stderr.strip().splitlines()[-1:] or ["it printed no RESULT"]
            return {"error": _without_paths(f"exit status {done.returncode}: {last[0]}")}
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        bandwidth = (before + bandwidth_of(threads)) / 2
        found["bandwidth_gb_s"] = bandwidth / 1e9
        found["share_of_bandwidth"] = found["decode"] * bytes_read(self.model) / bandwidth
        return found


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Measure ours and the peers in turn."""

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
    rounds: int = 3
    threads: int = 2
    timeout: float = 900.0
    """Seconds for one run of one program."""
    output: Path | None = None
    """Write the JSON here."""
    show: Path | None = None
    """Print a JSON that was written before, and measure nothing."""

    def run(self) -> None:
        if self.show is not None:
            print(table(json.loads(self.show.read_text())))
            return
        work = SHORT if self.short else LONG
        report = measure(
            self.pairs(), work, rounds=self.rounds, threads=self.threads, timeout=self.timeout, output=self.output
        )
        print(table(report))

    def pairs(self) -> list[tuple[Program, Program]]:
        """(peer, ours of the format that it is compared with), in the order of the options."""
        own = _programs("hasten", "run_hasten.py", (sys.executable, *self.hasten))
        ours = {program.ours: program for program in own}
        if len(ours) < len(own):
            raise SystemExit("--hasten: two have one name; tell them apart: int4-g32=FOLDER int4-g128=FOLDER")
        peers = [
            *_programs("llama.cpp", "run_llama_cpp.py", self.llama_cpp),
            *_programs("ik_llama.cpp", "run_ik_llama_cpp.py", self.ik_llama_cpp),
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
    found = []
    for model in models:
        ours, mark, path = model.partition("=")
        if not mark or not Path(path).exists():
            raise SystemExit(f"{name}: a model is given as FORMAT=PATH of what exists; found {model!r}")
        command = (python, str(PEERS / script))
        found.append(Program(name=name, ours=ours, model=Path(path), command=command))
    return found


def say(line: str) -> None:
    """To the terminal at once, also where it is a file or a pipe."""
    print(line, file=sys.stderr, flush=True)


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
    """hasten's instruction set in this environment, and whether that stands in for a processor without AVX-512."""
    from hasten.ops.native import choose_isa

    given = {name: os.environ[name] for name in AVX2_SWITCH if name in os.environ}
    return {
        "isa": choose_isa(),
        "environment": given,
        "avx2_switch": all(given.get(name, "").lower() == "avx2" for name in AVX2_SWITCH),
    }


def measure(
    pairs: list[tuple[Program, Program]],
    work: Work,
    *,
    rounds: int,
    threads: int,
    timeout: float,
    output: Path | None,
) -> dict[str, Any]:
    """The report of `summarise`, of interleaved rounds over all pairs; written to `output` after every round."""
    from hasten.machine.files import write_json

    found: list[list[dict[str, Any]]] = []
    start = time.monotonic()
    for number in range(rounds):
        found.append([])
        for index, pair in enumerate(pairs):
            at = f"round {number + 1} of {rounds}, pair {index + 1} of {len(pairs)}"
            one = {}
            for side, program in zip(("peer", "hasten"), pair, strict=True):
                elapsed = timedelta(seconds=round(time.monotonic() - start))
                say(f"{elapsed} {at}: measuring {program.name}, {program.model.name}")
                one[side] = program.run(threads=threads, timeout=timeout, work=work)
                say(f"    {outcome(one[side])}")
            found[-1].append(one)
        report = summarise(pairs, found, threads=threads, work=work)
        write_json(output, report)  # a long measurement may be stopped
    return report


def summarise(
    pairs: list[tuple[Program, Program]], rounds: list[list[dict[str, Any]]], *, threads: int, work: Work = LONG
) -> dict[str, Any]:
    """Each pair with its rounds, the medians of both sides, and the ratios of these medians."""
    from hasten.machine import describe

    rows = []
    for index, (peer, ours) in enumerate(pairs):
        found = [one[index] for one in rounds]
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
        "what": f"{work}; medians of {len(rounds)} round{'s' * (len(rounds) > 1)}",
        "protocol": asdict(work),
        "pairs": rows,
    }


def bandwidth_of(threads: int) -> float:
    """Bytes/s that so many threads read."""
    from hasten.machine.measure import limited_threads, read_bandwidth

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


if __name__ == "__main__":
    tyro.cli(Compare).run()
