"""Two versions of hasten in turns: is anything slower than before? A rung of a ladder is set up in a process of each
version, and the two measure one after the other, so that both meet the same states of the machine.

    git worktree add /tmp/before COMMIT
    python benchmarks/versions.py /tmp/before/src --json results.json
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hasten.bench.train import TrainLadder, TrainRung
from hasten.machine import describe
from hasten.machine.files import write_json

NOW = Path(__file__).resolve().parents[1] / "src"
NATIVE = ("native-bf16", "native-int8", "native-int4")
# What a version's process does: set up a rung, then measure it once for each line that it is sent.
PROCESS = """
import importlib, inspect, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what else is printed is no answer
import torch
torch.set_num_threads(int(sys.argv[1]))
module, name = sys.argv[2].split(":")
setup, arguments = getattr(importlib.import_module(module), name), json.loads(sys.argv[3])
parameters = inspect.signature(setup).parameters
given = {name: arguments[name] for name in parameters if name in arguments}
if "ladder" in given:  # a version whose rungs are given objects
    from hasten.bench.generate import RUNGS, GenerateLadder
    given |= {"ladder": GenerateLadder(**given["ladder"]), "mode": RUNGS[arguments["rung"]]}
if "recipe" in given and parameters["recipe"].annotation == "Recipe":
    from hasten.training.recipe import Recipe
    given["recipe"] = Recipe.from_json(given["recipe"])
if "config" in parameters:
    from hasten.planning.shapes import shape_config
    given["config"] = shape_config(arguments["shape"])
rung = setup(**given)
for line in sys.stdin:
    rung.measure() if line.strip() == "warm" else None
    print(json.dumps(rung.measure()), file=answers, flush=True)
"""


class Version:
    """A process that measures one rung with the hasten of one source folder."""

    def __init__(self, source: Path, threads: int, setup: str, arguments: dict[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(source), "HASTEN_MEASURE": "0"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = arguments["compile_cache"]
        command = [sys.executable, "-c", PROCESS, str(threads), setup, json.dumps(arguments)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, line: str = "") -> dict[str, float]:
        """Of one measurement: its speeds, in tokens/s."""
        assert self.process.stdin is not None, "a pipe"
        assert self.process.stdout is not None, "a pipe"
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"the process of a version ended with status {self.process.wait()}")
        found = json.loads(answer).items()
        return {k: speed for k, speed in found if "tokens_per_second" in k and not k.startswith("predicted")}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.close()
        self.process.wait()


def rungs(shape: str, compiled: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: what sets a rung up, and its arguments, named as in every version. compiled: torch's folder."""
    common = {"device": "cpu", "compile_cache": compiled, "seed": 0, "dtype": "bfloat16"}
    model = {"model": {"shape": shape}, "subject": {"shape": shape, "folder": None}}  # its name now, and before
    common |= {"prompt_tokens": 512, "new_tokens": 32}
    ladder = {name: common[name] for name in common if name != "compile_cache"}
    common |= model | {"ladder": ladder | {"shape": shape}}
    found = {name: ("hasten.bench.generate_rung:GenerateRung", common | {"rung": name, "way": name}) for name in NATIVE}
    recipe, _ = TrainLadder(shape="gpt2-124m", sequence_length=256).recipe_and_config(2)
    recipe = replace(recipe, techniques=replace(recipe.techniques, precision="bfloat16"))
    training = {"recipe": asdict(recipe), "shape": "gpt2-124m", "steps": 2, "device": "cpu", "compile_cache": compiled}
    return found | {"train-gpt2-124m": (f"{TrainRung.__module__}:{TrainRung.__name__}", training)}


def compare(
    before: Path, name: str, setup: str, arguments: dict[str, Any], *, rounds: int, threads: int
) -> dict[str, Any]:
    """Both versions of one rung: the speeds of all rounds, their ratios, and the median of those."""
    versions = {"before": Version(before, threads, setup, arguments), "now": Version(NOW, threads, setup, arguments)}
    found: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    for version in versions.values():
        version.measure("warm")
    for number in range(rounds):
        for which in ("before", "now") if number % 2 else ("now", "before"):
            found[which].append(versions[which].measure())
    for version in versions.values():
        version.close()
    row: dict[str, Any] = {"rung": name, "rounds": found, "ratio": {}, "ratios": {}}
    for metric in found["now"][0]:
        speeds = {which: [one[metric] for one in each] for which, each in found.items()}
        ratios = [now / before for now, before in zip(speeds["now"], speeds["before"], strict=True)]
        # Of neighbours: the memory's speed changes within a run, and medians would be of unlike states.
        row["ratio"][metric], row["ratios"][metric] = statistics.median(ratios), ratios
        shown = " ".join(f"{ratio:.2f}" for ratio in row["ratios"][metric])
        print(f"{name} {metric}: now / before {row['ratio'][metric]:.3f}, in each round {shown}", flush=True)
    return row


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("before", type=Path, help="the src folder of the other version")
    parser.add_argument("--shape", default="llama-1.1b")
    parser.add_argument("--rungs", default="", help="only these, separated by commas")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not (given.before / "hasten").is_dir():
        parser.error(f"{given.before} holds no hasten; give the src folder of a checkout")
    folder = tempfile.TemporaryDirectory(prefix="hasten-versions-")
    known = rungs(given.shape, folder.name)
    names = given.rungs.split(",") if given.rungs else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no rung {unknown[0]!r}; known: {', '.join(known)}")
    commits = {which: commit(source) for which, source in (("before", given.before), ("now", NOW))}
    rows = [compare(given.before, name, *known[name], rounds=given.rounds, threads=given.threads) for name in names]
    report = {"machine": describe().to_json(), "commits": commits, "isa": os.environ.get("HASTEN_ISA"), "rows": rows}
    write_json(given.json, report)


def commit(source: Path) -> str:
    """Of a checkout, with a + where files differ from it."""
    return subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
