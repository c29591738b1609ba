"""The command line on a GPU with a tiny model: each command a process, all at once, beside the preparing of jobs."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from gpu.harness import BENCHMARKS, Background, Run

PROMPT = ("--prompt", "def add(", "--max-new-tokens", "24", "--ignore-eos", "--seed", "1")


def command_lines(model: str, gguf: str, device: str) -> dict[str, list[str]]:
    """Name -> what comes after `hasten`."""
    on = ["--device", device]
    generate = ["generate", model, *on, *PROMPT]
    shape = ["--dtype", "bfloat16", "--shape", "1,4096,16,128"]
    return {
        "doctor": ["doctor", "--quick"],
        "explain": ["explain", model, *on],
        "explain-int4": ["explain", model, *on, "--dtype", "bfloat16", "--quantize", "int4"],
        "explain-attention": ["explain", "attention", *on, *shape],
        "generate": generate,
        "generate-compiled": [*generate, "--dtype", "bfloat16", "--compile", "--no-fuse"],
        "generate-int4": [*generate, "--dtype", "bfloat16", "--quantize", "int4", "--kv-cache-dtype", "int8"],
        "generate-drafts": [*generate, "--draft", "suffix"],
        "generate-gguf": ["generate", gguf, *on, *PROMPT],
        "plan": ["plan", "llama-7b", "--device", "h100"],
    }


class Commands(Background):
    """Starts at once; `finish` keeps status, seconds and the end of the output of each."""

    def __init__(self, run: Run, device: str, only: tuple[str, ...] = ()) -> None:
        self.run, self.started, self.threads = run, [], []
        super().__init__(lambda: list(self.started))
        self.found: dict[str, dict[str, Any]] = {}
        self.folder = run.scratch / "tiny"
        self.thread = threading.Thread(target=self._all, args=(device, only), daemon=True)
        self.thread.start()

    def _all(self, device: str, only: tuple[str, ...]) -> None:
        model, gguf = str(self.folder / "model"), str(self.folder / "tiny-q8_0.gguf")
        self._one("make", [sys.executable, "-m", "gpu.commands", "make", model, gguf])
        lines = {
            name: [sys.executable, "-m", "hasten", *rest] for name, rest in command_lines(model, gguf, device).items()
        }
        lines["serve"] = [sys.executable, "-m", "gpu.commands", "serve", model, device]
        chosen = {name: line for name, line in lines.items() if not only or name in only}
        for name, line in chosen.items():
            self.threads.append(threading.Thread(target=self._one, args=(name, line), daemon=True))
            self.threads[-1].start()

    def _one(self, name: str, command: list[str]) -> None:
        begin = time.time()
        output = self.run.logs / f"command-{name}.log"
        with open(output, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self.run.environment, start_new_session=True
            )
            self.started.append(process)
            status = process.wait()
        text = output.read_text(errors="replace")
        self.found[name] = {"status": status, "seconds": round(time.time() - begin, 1), "output": text[-1200:]}

    def finish(self, wait: float) -> None:
        self.resume()
        limit = time.time() + wait
        self.thread.join(timeout=max(0.1, limit - time.time()))
        for thread in list(self.threads):
            thread.join(timeout=max(0.1, limit - time.time()))
        self.kill()
        self.run.results["commands"] = self.found
        self.run.say("commands: " + " ".join(f"{n}={f['status']}({f['seconds']:.0f}s)" for n, f in self.found.items()))
        for name, one in self.found.items():
            if one["status"] != 0:
                self.run.say(f"  {name}: {one['output'][-250:]!r}")
        self.run.save()


def make(model: str, gguf: str) -> None:
    """A tiny model of random weights as a folder and as a GGUF file."""
    sys.path.insert(0, str(BENCHMARKS.parent / "tests"))
    import hasten
    from tiny_model import tiny_llama

    hasten.save(tiny_llama(), Path(model))
    command = ["quantize", model, "--scheme", "int8", "--format", "gguf", "--output", gguf]
    subprocess.run([sys.executable, "-m", "hasten", *command], check=True)


def ask_server(model: str, device: str) -> None:
    """`hasten serve`: four requests at once and /metrics, then SIGTERM. Raises where an answer is missing."""
    port, answers = 8731, []
    server = subprocess.Popen(
        [sys.executable, "-m", "hasten", "serve", model, "--device", device, "--port", str(port), "--log", "warning"]
    )
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(480):
            try:
                urllib.request.urlopen(f"{base}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.25)
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with {server.returncode}") from None
        name = json.load(urllib.request.urlopen(f"{base}/v1/models"))["data"][0]["id"]

        def ask(index: int) -> None:
            body = {"model": name, "prompt": "def add(" + "a" * index, "max_tokens": 16, "temperature": 0.7, "seed": 3}
            data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{base}/v1/completions", data, head)
            answers.append(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = urllib.request.urlopen(f"{base}/metrics").read()
        print(len(answers), "answers", len(metrics), "bytes of metrics")
        if len(answers) != 4:
            raise SystemExit("answers are missing")
    finally:
        server.terminate()
        try:
            print("the server ended with", server.wait(timeout=10))
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    {"make": make, "serve": ask_server}[sys.argv[1]](*sys.argv[2:])
