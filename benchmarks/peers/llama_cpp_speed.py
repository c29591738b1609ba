"""How fast llama.cpp decodes a GGUF file: python benchmarks/peers/llama_cpp_speed.py FILE PROMPT NEW THREADS.

Run it with a Python that has llama-cpp-python; hasten is not needed. For each line on standard input it takes in a
prompt of PROMPT tokens, decodes NEW, greedy, and writes a line of JSON: tokens per second of both.
"""

import ctypes
import json
import sys
import time

import llama_cpp
import numpy as np


def main() -> None:
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    file, (prompt, new, threads) = sys.argv[1], map(int, sys.argv[2:])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit("llama.cpp does not load the file")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = prompt + new, prompt, prompt
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)

    def decode(tokens: list[int]) -> int:
        """The most likely token behind these."""
        held = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(held, len(tokens))):
            sys.exit("llama.cpp does not decode")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (size,)).argmax())

    for _ in sys.stdin:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        token = decode([3 + 7919 * i % (size - 3) for i in range(prompt)])
        began = time.perf_counter()
        for _ in range(new):
            token = decode([token])
        found = {"prefill_tokens_per_second": prompt / (began - start)}
        found["decode_tokens_per_second"] = new / (time.perf_counter() - began)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
