"""A wheel where there is no compiler: which versions of torch load its libraries, and seconds until a first token.

python benchmarks/wheels.py --wheel FILE --pythons PYTHON PYTHON --output benchmarks/results/wheel.json
"""

import json
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hasten.measure.script import Report, Script, Table, main, markdown


@dataclass(frozen=True, kw_only=True)
class Wheel(Script):
    """A wheel in environments of several versions of torch: what loads, and seconds until a model's first token.

    The wheel is unpacked into a folder that comes before an interpreter's own packages. No compiler can be found.
    """

    result, of_this_machine = "wheel", ("wheel", "pythons", "model")
    wheel: Path
    """Made by `make wheel`."""
    pythons: tuple[Path, ...]
    """Interpreters with torch and hasten's dependencies."""
    model: str = "smollm2-135m"
    """A short name, a folder or a file."""
    rounds: int = 5
    """Starts of each; the first is not counted, and the medians are."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-wheel-") as place:
            with zipfile.ZipFile(self.wheel) as packed:
                packed.extractall(place)
            libraries = sorted(Path(place).glob("hasten/ops/prebuilt/*/*.so"))
            size = {
                "wheel_bytes": self.wheel.stat().st_size,
                "library_bytes": [one.stat().st_size for one in libraries],
            }
            return size | {"torches": [self._torch(python, Path(place), libraries) for python in self.pythons]}

    def _torch(self, python: Path, place: Path, libraries: Sequence[Path]) -> Report:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(place), "PATH": str(place), "CXX": ""}

        def answer(code: str, *arguments: str) -> Any:
            line = [str(python), "-c", code, *arguments]
            return subprocess.run(line, env=environment, cwd=place, capture_output=True, text=True, check=False)

        loaded = [answer(LOAD, str(one)).returncode == 0 for one in libraries]
        found = []
        for _ in range(self.rounds):
            done = answer(FIRST_TOKEN, self.model)
            if done.returncode:
                raise SystemExit(f"{python} has no first token: {done.stderr[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
        seconds = [one["seconds"] for one in found[1:]]
        facts = {name: found[0][name] for name in ("torch", "isa", "prebuilt")}
        return facts | {"loaded": sum(loaded), "of": len(loaded), "first_token_seconds": median(seconds)}


LOAD = "import sys, torch\ntorch.ops.load_library(sys.argv[1])"
FIRST_TOKEN = """
import time
begun = time.perf_counter()
import json, sys
import hasten
model = hasten.load(sys.argv[1])
next(iter(hasten.stream(model, "The capital of France is", max_new_tokens=4)))
seconds = time.perf_counter() - begun
import torch
from hasten.ops.native import library
own = library()
print(json.dumps({
    "seconds": seconds, "torch": torch.__version__, "isa": own.isa, "prebuilt": "prebuilt" in own.path.parts
}))
"""


def wheel_table(report: Report) -> str:
    """A row for each version of torch."""
    rows = [
        [one["torch"], f"{one['loaded']} of {one['of']}", one["isa"], f"{one['first_token_seconds']:.2f}"]
        for one in report["torches"]
    ]
    return markdown(["torch", "libraries that load", "the one taken", "import to first token, s"], rows)


TABLES: dict[str, Table] = {"wheel": wheel_table}


if __name__ == "__main__":
    main({"wheel": Wheel}, TABLES)
