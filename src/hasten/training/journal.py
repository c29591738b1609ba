"""The log `train.jsonl`: one line a step, and no step twice after resuming; and the detection of loss spikes."""

import json
import warnings
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from hasten.errors import HastenWarning
from hasten.machine.files import write_atomically
from hasten.training.run_folder import write_error, writing

# A spike is more than DEVIATIONS standard deviations above the mean of up to WINDOW earlier losses, at least FEWEST.
WINDOW = 64
FEWEST = 16
DEVIATIONS = 5.0


class Journal:
    """Appends one JSON object a line to a file; each line is written at once, so that a killed run loses none.

    Fields of a line: step (from 1), loss, validation_loss (if measured), learning_rate, gradient_norm, tokens (so far),
    tokens_per_second, mfu, seconds (so far), spike, kept_blocks (layer dropping), scale and skipped (float16).
    """

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Open the file, keeping its lines up to step `keep_steps` and removing later ones.

        Warns if fewer steps can be read. Raises ResourceError for a full disk, CheckpointError for another failure.
        """
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read(path) if line["step"] <= keep_steps] if keep_steps else []
            if keep_steps and (not kept or kept[-1]["step"] < keep_steps):
                last = kept[-1]["step"] if kept else 0
                message = f"{path} can be read only up to step {last}; the lines from there to {keep_steps} are lost"
                warnings.warn(message, HastenWarning, stacklevel=2)
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. Raises ResourceError for a full disk, CheckpointError for another failure."""
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise write_error(self.path, error) from None

    def close(self) -> None:
        """Close the file."""
        with writing(self.path):
            self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a train.jsonl up to the first invalid one, such as one cut off by a kill; [] without a file."""
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


def is_spike(loss: float, recent: list[float]) -> bool:
    """Whether a loss is a spike, far above the `recent` ones: often the first sign of a diverging run.

    Also updates `recent`: a spike is not added to it, unless spikes last for a whole window.
    """
    spike = False
    if len(recent) >= FEWEST:
        mean = fmean(recent)
        # If the loss hardly moves, a thousandth of it is still no spike.
        deviation = max(pstdev(recent), 1e-3 * abs(mean))
        spike = loss > mean + DEVIATIONS * deviation
    if spike and len(recent) > FEWEST:
        recent.pop(0)
    else:
        recent[:] = [*recent[-WINDOW + 1 :], loss]
    return spike
