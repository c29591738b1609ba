"""Our native kernels beside other programs on the same weights, in interleaved rounds.

    python benchmarks/compare.py --output benchmarks/results/compare.json \\
        --hasten bf16=FOLDER int8=FOLDER int4=FOLDER \\
        --llama-cpp PYTHON bf16=FILE.gguf int8=FILE.gguf int4=FILE.gguf \\
        --openvino PYTHON bf16=FOLDER int8=FOLDER int4=FOLDER int4=FOLDER_OF_ANOTHER_FORMAT \\
        --vllm PYTHON bf16=FOLDER --transformers PYTHON bf16=FOLDER
    python benchmarks/compare.py --show benchmarks/results/compare.json     # as Markdown

A peer is given as the Python of its environment, then its models; before each stands which of ours it is compared with.
What each has to do, and the script that has it do so, is in `benchmarks/peers/`; `hasten quantize --lm-head same` makes
our quantized folders. A round goes through all pairs, the peer and then ours, each in a process of its own, with the
read bandwidth measured before and after each. Beside every speed stands its share of that bandwidth: tokens/s times the
bytes of weights that a token must read, the cache (about 40 tokens) not counted.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))
from protocol import WHAT  # noqa: E402
from weights import bytes_read  # noqa: E402

METRICS = ("decode", "prefill", "bandwidth_gb_s", "share_of_bandwidth")


@dataclass(frozen=True, kw_only=True)
class Program:
    """One model in one program."""

    name: str
    format: str
    model: Path
    command: tuple[str, ...]

    def run(self, *, threads: int, timeout: float) -> dict[str, Any]:
        """What its script answers, with the bandwidth right before and after (their mean); or {"error": one line}."""
        from hasten.machine import read_bandwidth

        before = read_bandwidth(threads=threads)
        command = [*self.command, str(self.model), "--threads", str(threads), "--format", self.format]
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
        bandwidth = (before + read_bandwidth(threads=threads)) / 2
        found["bandwidth_gb_s"] = bandwidth / 1e9
        found["share_of_bandwidth"] = found["decode"] * bytes_read(self.model) / bandwidth
        return found


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Measure ours and the peers in turn."""

    hasten: tuple[str, ...] = ()
    """FORMAT=FOLDER … of ours: bf16, int8, int4."""
    llama_cpp: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FILE.gguf …"""
    openvino: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FOLDER of an export …"""
    vllm: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FOLDER …"""
    transformers: tuple[str, ...] = ()
    """PYTHON, then FORMAT=FOLDER …"""
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
        pairs = self.pairs()
        rounds: list[list[dict[str, Any]]] = []
        for number in range(self.rounds):
            rounds.append([])
            for peer, ours in pairs:
                found = {
                    side: program.run(threads=self.threads, timeout=self.timeout)
                    for side, program in (("peer", peer), ("hasten", ours))
                }
                rounds[-1].append(found)
                print(f"round {number + 1}: {peer.name} {peer.model.name}: {json.dumps(found)}", file=sys.stderr)
        report = summarise(pairs, rounds, threads=self.threads)
        if self.output is not None:
            self.output.write_text(json.dumps(report, indent=2) + "\n")
        print(table(report))

    def pairs(self) -> list[tuple[Program, Program]]:
        """(peer, ours of the format that it is compared with), in the order of the options."""
        ours = {p.format: p for p in _programs("hasten", "run_hasten.py", (sys.executable, *self.hasten))}
        peers = [
            *_programs("llama.cpp", "run_llama_cpp.py", self.llama_cpp),
            *_programs("OpenVINO", "run_openvino.py", self.openvino),
            *_programs("vLLM", "run_vllm.py", self.vllm),
            *_programs("transformers", "run_transformers.py", self.transformers),
        ]
        missing = sorted({peer.format for peer in peers} - ours.keys())
        if missing or not peers:
            raise SystemExit(f"--hasten {missing[0]}=FOLDER is missing" if missing else "no peer is given; see --help")
        return [(peer, ours[peer.format]) for peer in peers]


def _programs(name: str, script: str, given: tuple[str, ...]) -> list[Program]:
    if not given:
        return []
    python, *models = given
    found = []
    for model in models:
        format, mark, path = model.partition("=")
        if not mark or not Path(path).exists():
            raise SystemExit(f"{name}: a model is given as FORMAT=PATH of what exists; found {model!r}")
        command = (python, str(PEERS / script))
        found.append(Program(name=name, format=format, model=Path(path), command=command))
    return found


def _without_paths(text: str) -> str:
    return re.sub(r"(?:/[^\s/'\"]+)+/", "", text)[:300]


def summarise(
    pairs: list[tuple[Program, Program]], rounds: list[list[dict[str, Any]]], *, threads: int
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
            "hasten": ours.format,
            "weight_bytes_per_token": {"peer": bytes_read(peer.model), "hasten": bytes_read(ours.model)},
        }
        rows.append(row)
        if worked:
            row["versions"] = worked[0]["peer"]["versions"]
            row["settings"] = worked[0]["peer"]["settings"]
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
    return {"schema": 2, "machine": describe().to_json(), "threads": threads, "what": WHAT, "pairs": rows}


def table(report: dict[str, Any]) -> str:
    """The medians as Markdown: decode with the share of the read bandwidth, prefill, ours over theirs."""
    lines = [
        "| peer | its model | decode: its, ours | ours / its | share of bandwidth: its, ours | prefill: its, ours "
        "| ours / its |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["pairs"]:
        if "median" not in row:
            errors = [side["error"] for one in row["rounds"] for side in one.values() if "error" in side]
            lines.append(f"| {row['peer']} | {row['model']} | failed: {errors[0]} | | | | |")
            continue
        peer, ours, ratio = row["median"]["peer"], row["median"]["hasten"], row["ratio"]
        lines.append(
            f"| {row['peer']} | {row['model']} | {peer['decode']:.1f}, {row['hasten']} {ours['decode']:.1f} "
            f"| {ratio['decode']:.2f}× | {peer['share_of_bandwidth']:.0%}, {ours['share_of_bandwidth']:.0%} "
            f"| {peer['prefill']:.0f}, {ours['prefill']:.0f} | {ratio['prefill']:.2f}× |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(Compare).run()
