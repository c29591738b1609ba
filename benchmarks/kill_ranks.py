"""Kills one of two ranks with kill -9 at random moments; torchrun starts them again. The run must end as if untouched.

    python benchmarks/kill_ranks.py        # 20 kills -> benchmarks/results/kill-ranks.json

Exit status 1 where a loss or the model differs in a bit. A rank is killed after up to twice the work that a start
takes, so about half of the moments come before the first new step.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hasten.machine.files import save_json
from hasten.training.checkpoint_state import INDEX
from hasten.training.journal import read
from hasten.training.run_folder import RunFolder

RESULT = Path(__file__).parent / "results" / "kill-ranks.json"
EVERY = 5  # steps from one checkpoint to the next
OPTIONS = "--model.layers 2 --model.hidden-size 64 --model.heads 2 --data.vocab-size 512 --data.context 64"
OPTIONS += " --data.batch-size 4 --dropout 0.1 --minutes None --data.limit-bytes 300000 --techniques.no-compile"
OPTIONS += " --threads 1 --device cpu --techniques.precision float32 --parallel.zero 3 --run.validate-every 30"
OPTIONS += f" --run.background-checkpoints --run.checkpoint-every {EVERY}"


def train(folder: RunFolder, steps: int, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hasten", "train", "demo", *OPTIONS.split(), "--steps", str(steps)]
    command += ["--name", folder.path.name, "--run.folder", str(folder.path.parent), "--no-progress"]
    command += ["--processes", "2", "--max-restarts", str(restarts)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def outcome(folder: RunFolder) -> tuple[object, bytes]:
    keys = ("step", "loss", "gradient_norm", "validation_loss")
    kept = [{key: line.get(key) for key in keys} for line in read(folder.journal)]
    return kept, (folder.model / "model.safetensors").read_bytes()


def workers(run: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The ranks that are there now."""
    found = {}
    with suppress(psutil.Error):  # they end, or begin
        for one in psutil.Process(run.pid).children():
            if "RANK" in (variables := one.environ()):
                found[int(variables["RANK"])] = one
    return found


def work(process: psutil.Process) -> float:
    """Seconds it has computed: a clock that stands where a busy machine lets it wait. 0 where it is gone."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def kill(run: subprocess.Popen[str], folder: RunFolder, rank: int, after: float) -> dict[str, Any] | None:
    """Kill a rank when it has worked for so long; what the run was at, or None where it was not there."""
    while (process := workers(run).get(rank)) is not None and work(process) < after:
        time.sleep(0.05)
    if process is None:
        return None
    lines, index = read(folder.journal), folder.last / INDEX
    writing = folder.last.is_dir() and any(path.suffix == ".partial" for path in folder.last.iterdir())
    kept = json.loads(index.read_text())["progress"]["step"] if index.exists() else 0
    with suppress(psutil.Error):
        process.kill()
        return {"rank": rank, "step": lines[-1]["step"] if lines else 0, "checkpoint": kept, "while_writing": writing}
    return None


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for docs/distributed.md: what the run was at when a rank was killed."""
    names = ("starting", "training", "training, a checkpoint half written")
    counts, last = dict.fromkeys(names, 0), 0
    for kill in report["kills"]:
        counts[names[2 if kill["while_writing"] else int(kill["step"] != last)]] += 1
        last = kill["step"]
    head = [f"{len(report['kills'])} kills in a run of {report['steps']} steps, while it was", "kills"]
    return head, [[name, str(count)] for name, count in counts.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    draw, kills = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed = (RunFolder(path=Path(temporary) / name) for name in ("whole", "killed"))
        run = train(whole, arguments.steps, 0)
        while not whole.journal.exists() and run.poll() is None:
            time.sleep(0.1)
        starting = max(map(work, workers(run).values()), default=0.0)
        if run.wait():
            raise SystemExit(f"the untouched run failed: {run.communicate()[1][-2000:]}")
        run = train(killed, arguments.steps, arguments.moments)
        while run.poll() is None and len(kills) < arguments.moments:
            if found := kill(run, killed, draw.randrange(2), draw.uniform(0, 2 * starting)):
                kills.append(found)
                print(found, flush=True)
            time.sleep(0.5)  # or the one that was killed would be found again
        _, errors = run.communicate()
        same = run.returncode == 0 and outcome(killed) == outcome(whole)
    print(f"{len(kills)} kills; the run ended with status {run.returncode}; bit for bit the same: {same}")
    facts = {"kind": "kills", "steps": arguments.steps, "checkpoint_every": EVERY, "status": run.returncode}
    save_json(arguments.json, facts | {"same": same, "kills": kills}, indent=1)
    if not same or len(kills) < arguments.moments:
        print(errors[-2000:], file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
