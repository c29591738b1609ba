"""Our native kernels beside other programs on the same weights, in interleaved rounds.

    python benchmarks/compare.py --bf16 FOLDER --int8 FOLDER --int4 FOLDER \\
        --peer "llama.cpp bf16=COMMAND" --peer "llama.cpp q8_0=COMMAND" --output benchmarks/results/compare.json

A peer's command prints a line `RESULT … prefill512 X tok/s decode Y tok/s`. Ours does the same things: a prompt of 512
random tokens, then 64 tokens one by one after a prompt of 8, batch 1, two threads, each the median of three, in a
process of its own. Every round measures the read bandwidth, then ours and the peers in turn; ratios are formed within
a round.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

RESULT = re.compile(r"RESULT .*prefill512 ([\d.]+) tok/s decode ([\d.]+) tok/s")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Measure ours and the peers in turn."""

    bf16: Path | None = None
    """A model folder in bfloat16."""
    int8: Path | None = None
    """The same model from `hasten quantize --scheme int8`."""
    int4: Path | None = None
    """The same model from `hasten quantize --scheme int4 --lm-head same`."""
    peer: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=COMMAND, once for each peer."""
    rounds: int = 3
    threads: int = 2
    output: Path | None = None
    """Write the JSON here."""
    own: Path | None = None
    """Measure this folder only and print a RESULT line (what a round calls)."""

    def run(self) -> None:
        if self.own is not None:
            measure(self.own, self.threads)
            return
        ours = {"bf16": self.bf16, "int8": self.int8, "int4": self.int4}
        commands = {
            f"hasten {name}": [sys.executable, __file__, "--own", str(folder), "--threads", str(self.threads)]
            for name, folder in ours.items()
            if folder is not None
        }
        for peer in self.peer:
            name, _, command = peer.partition("=")
            commands[name] = shlex.split(command)
        rounds = []
        for index in range(self.rounds):
            rounds.append(one_round(commands, self.threads))
            print(f"round {index + 1}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True)
        report = summarise(commands, rounds)
        text = json.dumps(report, indent=2) + "\n"
        print(text)
        if self.output is not None:
            self.output.write_text(text)


def one_round(commands: dict[str, list[str]], threads: int) -> dict[str, Any]:
    """name -> {decode, prefill} in tokens/s, and the read bandwidth in GB/s."""
    from hasten.machine import read_bandwidth

    found: dict[str, Any] = {"bandwidth_gb_s": read_bandwidth(threads=threads) / 1e9}
    for name, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        match = RESULT.search(done.stdout)
        if match is None:
            raise SystemExit(f"{name} gave no RESULT line:\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
        found[name] = {"prefill": float(match[1]), "decode": float(match[2])}
    return found


def summarise(commands: dict[str, list[str]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and for every pair (ours, peer) the median of the ratios within a round."""
    from hasten.machine import describe

    own = [name for name in commands if name.startswith("hasten ")]
    rows = [
        {"name": name} | {kind: median(r[name][kind] for r in rounds) for kind in ("decode", "prefill")}
        for name in commands
    ]
    ratios = {
        f"{ours} / {peer}": {
            kind: median(r[ours][kind] / r[peer][kind] for r in rounds) for kind in ("decode", "prefill")
        }
        for ours in own
        for peer in commands
        if peer not in own
    }
    return {
        "schema": 1,
        "machine": describe().to_json(),
        "what": "prefill of 512 tokens, decode of 64 after 8, batch 1, two threads; tokens/s",
        "rows": rows,
        "ratios": ratios,
        "rounds": rounds,
    }


def measure(folder: Path, threads: int) -> None:
    """Print the RESULT line of a folder."""
    import torch

    import hasten
    from hasten.generation.decoder import Decoder
    from hasten.machine import configure

    configure(threads=threads, seed=0)
    model = hasten.fuse(hasten.load(folder, dtype="bfloat16"))
    decoder = Decoder(model, batch=1, capacity=600)
    found = []
    for _ in range(4):
        decoder.truncate(0)
        prompt = torch.randint(3, model.config.vocab_size - 1, (512,)).tolist()
        start = time.perf_counter()
        decoder.prefill([prompt])
        prefill = 512 / (time.perf_counter() - start)
        decoder.truncate(0)
        decoder.prefill([[5] * 8])
        tokens = torch.randint(3, model.config.vocab_size - 1, (64,))
        start = time.perf_counter()
        for token in tokens:
            decoder.decode(token[None])
        found.append((prefill, 64 / (time.perf_counter() - start)))
    warm = sorted(found[1:])
    decode = sorted(pair[1] for pair in found[1:])[1]
    print(f"RESULT {folder.name} prefill512 {warm[1][0]:.1f} tok/s decode {decode:.2f} tok/s")


if __name__ == "__main__":
    tyro.cli(Compare).run()
