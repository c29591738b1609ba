"""llama.cpp on a GGUF file, through the server of the `xllamacpp` wheel (an AVX2 build): its own timings of requests.

A request of one new token gives the speed of the prefill; one of a short prompt that of the decode.
"""

import json
from typing import Any

import protocol
import xllamacpp

given = protocol.arguments()
work = given.work
params = xllamacpp.CommonParams()
params.model.path, params.verbosity, params.n_parallel = given.model, 0, 1
params.n_ctx = params.n_batch = params.n_ubatch = 2 * work.prefill
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
server = xllamacpp.Server(params)
VOCABULARY = 30_000  # ids below this are words in every file that is measured


def timings(prompt: int, answer: int) -> dict[str, Any]:
    """What the server measured of one request of random tokens."""
    ids = protocol.tokens(prompt, VOCABULARY)
    request = {"prompt": ids, "n_predict": answer, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    found: Any = server.handle_completions(request)
    found = json.loads(found) if isinstance(found, str) else found
    assert found["timings"]["prompt_n"] >= prompt, found["timings"]
    return dict(found["timings"])


def turn() -> tuple[float, float]:
    prefill = timings(work.prefill, 1)["prompt_per_second"]
    return prefill, timings(work.before, work.decode)["predicted_per_second"]


protocol.take_turns(
    turn,
    packages=["xllamacpp"],
    system_info=str(xllamacpp.get_system_info()).strip(" |"),
)
