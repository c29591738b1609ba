"""How long `hasten serve` takes to start on a GPU: until it listens, to its first token, until steps are captured."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from gpu.models import random_model
from gpu.worker import DEVICE, TINY, serve

STILL = 3.0  # seconds without a new captured step, after which all are there
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def server(shape: str) -> None:
    """Measured twice: `measure cold` with empty caches of compiled kernels, then `measure warm` with what is there."""
    import hasten

    folder = Path(tempfile.mkdtemp(prefix="hasten-start-"))
    hasten.save(random_model(shape), folder / "model")  # what was written stays in the page cache
    caches = {name: str(folder / name.lower()) for name in CACHES}

    def measure(which: str) -> dict[str, Any]:
        if which == "cold":
            for place in caches.values():
                shutil.rmtree(place, ignore_errors=True)
        return start_once(folder / "model", os.environ | caches, captured=DEVICE != "cpu")

    try:
        serve({"measure": measure})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_once(model: Path, environment: dict[str, str], *, captured: bool, limit: float = 70) -> dict[str, Any]:
    """Seconds from the command to each mark; `captured`: wait for the steps that are captured while it is idle."""
    command = [sys.executable, "-m", "hasten", "serve", str(model), "--port", "0", "--log", "error"]
    command += ["--device", DEVICE, "--cache-gib", "2" if not TINY else "0.01"]
    command += ["--max-length", "64", "--max-sequences", "4"] if TINY else []
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def seconds() -> float:
        return round(time.perf_counter() - begin, 2)

    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found: dict[str, Any] = {"listening_s": seconds()}
        url = next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
        name = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=limit))["data"][0]["id"]
        found["models_s"] = seconds()
        body = {"model": name, "prompt": list(range(20, 36)), "max_tokens": 1, "temperature": 0}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
        urllib.request.urlopen(request, timeout=limit).read()
        found["first_token_s"] = seconds()
        last = 0.0
        while captured and seconds() < limit and seconds() - found.get("captured_s", found["first_token_s"]) < STILL:
            text = urllib.request.urlopen(f"{url}/metrics", timeout=limit).read().decode()
            steps = re.search(r"^hasten:captured_steps\S* (\S+)$", text, re.MULTILINE)
            if steps and float(steps[1]) > last:
                last = found["captured_steps"] = float(steps[1])
                found["captured_s"] = seconds()
            time.sleep(0.1)
        return found
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
