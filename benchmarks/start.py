"""How long `hasten generate` takes to start, for published files, in turns with `import torch`.

    python benchmarks/start.py smollm2-135m gemma3-270m --output benchmarks/results/start.json

Each measurement is a process of its own. Of each model two commands: one for a single token, timed to its end, and one
for an answer of 32 tokens, timed to the text of the first. A round before the counted ones builds the kernels, brings
files into the page cache, and writes Python's bytecode, which pip does when it installs a package.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

PROMPT = "The capital of France is"  # printed before the answer


@dataclass(frozen=True, kw_only=True)
class Start:
    """Measure the seconds of a start."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders, files or short names."""

    rounds: int = 7
    """Rounds that count, by their medians."""

    output: Path | None = None
    """Where to write the JSON; the table is printed in any case."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(self.rounds + 1):
            found = {"import torch": measured([sys.executable, "-c", "import torch"])}
            for model in self.models:
                one, answer = (measured(command(model, tokens)) for tokens in (1, 32))
                found[Path(model).name] = one | {"first_text_seconds": answer["first_text_seconds"]}
            if number:
                rounds.append(found)
        report = {"schema": 1, "kind": "start", "machine": describe().to_json(), "rounds": rounds}
        print(*table(report), sep="\n")
        write_json(self.output, report)


def command(model: str, tokens: int) -> list[str]:
    options = ["--prompt", PROMPT, "--max-new-tokens", str(tokens), "--temperature", "0", "--ignore-eos"]
    return [sys.executable, "-m", "hasten", "generate", model, *options]


def measured(line: list[str]) -> dict[str, float]:
    """Seconds to the end of a process, of the processors meanwhile, and to the first text behind the prompt."""
    started, read, first = time.perf_counter(), 0, 0.0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    while part := os.read(process.stdout.fileno(), 1 << 16):  # unbuffered: comes when the command writes it
        read += len(part)
        if not first and read > len(PROMPT):
            first = time.perf_counter() - started
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the command failed: {' '.join(line)}")
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "first_text_seconds": first}


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Medians, and the median of the ratios to `import torch` in the same round."""
    rounds = report["rounds"]
    head = ["", "one token, s", "of `import torch`", "CPU seconds", "first text of 32 tokens, s"]
    rows = []
    for name in rounds[0]:
        own = {key: median(one[name][key] for one in rounds) for key in rounds[0][name]}
        ratio = median(one[name]["seconds"] / one["import torch"]["seconds"] for one in rounds)
        first = f"{own['first_text_seconds']:.2f}" if own["first_text_seconds"] else ""
        label = f"`{name}`"
        rows.append([label, f"{own['seconds']:.2f}", f"{ratio:.2f} ×", f"{own['cpu_seconds']:.2f}", first])
    return head, rows


if __name__ == "__main__":
    tyro.cli(Start).run()
