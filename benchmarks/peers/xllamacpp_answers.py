"""What llama.cpp makes of GGUF files, a line of JSON each: python benchmarks/peers/xllamacpp_answers.py < QUESTIONS.

Run it with a Python that has xllamacpp; hasten is not needed. QUESTIONS is JSON: "files"; "prompt", token ids, of which
the answer has the greedy tokens that follow and at each step the log-probability of every token, in the order of ids;
and "texts", which are tokenized (special tokens in them are recognised).
"""

import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp

STEPS = 8
running: list[Any] = []  # servers: the end of one sometimes waits for its own thread for ever


def server_of(file: str) -> Any:
    """llama.cpp's server of one file, in this process."""
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity, params.n_parallel, params.n_ctx, params.warmup = file, 0, 1, 512, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def predictions(server: Any, prompt: list[int]) -> dict[str, Any]:
    """Greedy tokens and log-probabilities after the prompt."""
    request = {"prompt": prompt, "n_predict": STEPS, "temperature": 0, "n_probs": 1 << 20, "ignore_eos": True}
    found = server.handle_completions(request | {"cache_prompt": False})
    steps = found["choices"][0]["logprobs"]["content"]
    by_id = [{one["id"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
    return {"greedy": [step["id"] for step in steps], "logprobs": [[row[i] for i in sorted(row)] for row in by_id]}


def tokens_of(server: Any, text: str) -> list[int]:
    """The tokens of a text."""
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["tokens"])


def answer(file: str, questions: dict[str, Any]) -> dict[str, Any]:
    """The answers to all questions about one file, or why llama.cpp does not load it."""
    try:
        server = server_of(file)
    except RuntimeError as error:
        return {"error": f"{file}: {error}"}
    running.append(server)
    found = predictions(server, questions["prompt"]) if questions["prompt"] else {}
    return found | {"tokens": [tokens_of(server, text) for text in questions["texts"]]}


def main() -> None:
    questions = json.load(sys.stdin)
    for file in questions["files"]:
        print("ANSWER " + json.dumps(answer(file, questions)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
