"""`train.jsonl`: one line a step, and nothing twice when a run goes on from a checkpoint."""

import json
import warnings
from pathlib import Path
from typing import Any

from hasten.errors import HastenWarning
from hasten.machine.files import write_atomically
from hasten.training.checkpoints import writing


class Journal:
    """Appends one JSON object a line to a file, each line at once, so that a killed run loses none.

    The fields of a line: step (from 1), loss, validation_loss (where it was measured), learning_rate, gradient_norm,
    tokens (so far), tokens_per_second, mfu, seconds (so far), spike, scale and skipped (float16).
    """

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Keep the lines up to step `keep_steps` that are there already, and remove the others."""
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read(path) if line["step"] <= keep_steps] if keep_steps else []
            if keep_steps and (not kept or kept[-1]["step"] < keep_steps):
                last = kept[-1]["step"] if kept else 0
                message = (
                    f"{path} can be read up to step {last} only; the lines from there to step {keep_steps} are lost"
                )
                warnings.warn(message, HastenWarning, stacklevel=2)
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. Raises ResourceError for a full disk."""
        with writing(self.path):
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a train.jsonl up to the first that is none, as one cut off by a kill. [] where there is no file."""
    lines: list[dict[str, Any]] = []
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return lines
    for line in found.split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            break
        lines.append(value)
    return lines
