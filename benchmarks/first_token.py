"""How long `hasten generate` takes from the start of the command to the text of its first token.

    python benchmarks/first_token.py FOLDER --output benchmarks/results/first-token.json

Each repetition is a process of its own, as a shell starts one: Python, torch, the folder's weights and the kernels are
loaded anew. One run beforehand builds the kernels and brings the folder into the page cache.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

LIMIT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Measure the seconds from the command's start to its first token."""

    model: Annotated[Path, tyro.conf.Positional]
    """A folder without a tokenizer: its tokens are printed as numbers, the first character is the first token's."""

    repetitions: int = 5
    """Processes that are measured; their median counts."""

    prompt_tokens: int = 16
    """Length of the prompt."""

    output: Path | None = None
    """Where to write the JSON; printed in any case."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        once(self)
        found = [once(self) for _ in range(self.repetitions)]
        median = statistics.median(row["first_token_seconds"] for row in found)
        result: dict[str, Any] = {
            "schema": 1,
            "kind": "first-token",
            "machine": describe().to_json(),
            "model": self.model.name,
            "weight_bytes": sum(file.stat().st_size for file in self.model.glob("*.safetensors")),
            "prompt_tokens": self.prompt_tokens,
            "first_token_seconds": median,
            "limit_seconds": LIMIT_SECONDS,
            "repetitions": found,
        }
        print(f"first token after {median:.2f} s (limit {LIMIT_SECONDS:g} s)")
        write_json(self.output, result)


def once(settings: FirstToken) -> dict[str, float]:
    """Seconds from the start of one command to its first token, and to its end."""
    ids = [str(3 + i) for i in range(settings.prompt_tokens)]
    command = [sys.executable, "-m", "hasten", "generate", str(settings.model), "--prompt-ids", *ids]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "4", "--temperature", "0", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    text = os.read(process.stdout.fileno(), 1)  # unbuffered: comes when the command writes it
    first = time.perf_counter() - started
    rest = process.stdout.read()
    if process.wait() or not (text + rest).split():
        raise SystemExit(f"the command failed: {' '.join(command)}")
    return {"first_token_seconds": first, "whole_command_seconds": time.perf_counter() - started}


if __name__ == "__main__":
    tyro.cli(FirstToken).run()
