"""Kills one of two ranks with kill -9 at random moments; torchrun starts them again. The run must end as if untouched.

python benchmarks/kill_ranks.py --moments 20        # exit status 1 where a loss or the model differs in a bit
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

OPTIONS = "--model.layers 2 --model.hidden-size 64 --model.heads 2 --data.vocab-size 512 --data.context 64"
OPTIONS += " --data.batch-size 4 --dropout 0.1 --minutes None --steps 120 --run.checkpoint-every 5"
OPTIONS += " --techniques.no-compile --threads 1 --device cpu --techniques.precision float32 --parallel.zero 3"
OPTIONS += " --run.validate-every 30 --run.background-checkpoints --data.limit-bytes 300000"


def train(name: str, folder: Path, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hasten", "train", "demo", *OPTIONS.split(), "--name", name, "--no-progress"]
    command += ["--run.folder", str(folder), "--processes", "2", "--max-restarts", str(restarts)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def outcome(folder: Path) -> tuple[object, bytes]:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    kept = [{key: line.get(key) for key in ("step", "loss", "gradient_norm", "validation_loss")} for line in lines]
    return kept, (folder / "model/model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.monotonic()
        if train("whole", folder, 0).wait():
            raise SystemExit("the untouched run failed")
        whole, seconds = outcome(folder / "whole"), time.monotonic() - started
        run, kills = train("killed", folder, arguments.moments), 0
        while run.poll() is None and kills < arguments.moments:
            time.sleep(draw.uniform(0.3, 0.8) * seconds)
            workers = [one for one in psutil.Process(run.pid).children() if one.environ().get("RANK")]
            if run.poll() is None and workers:
                draw.choice(workers).kill()
                kills += 1
        _, errors = run.communicate()
        same = run.returncode == 0 and outcome(folder / "killed") == whole
        print(f"{kills} kills; the run ended with status {run.returncode}; bit for bit the same: {same}")
        if not same:
            print(errors[-2000:], file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    main()
