"""What llama.cpp makes of a GGUF file, as JSON: python benchmarks/peers/llama_cpp_answers.py FILE.gguf < QUESTIONS.

Run it with a Python that has llama-cpp-python; hasten is not needed. QUESTIONS is JSON: "texts", which are tokenized
(special tokens in them are recognised), and "prompt", token ids: their logits at every place, and 16 greedy tokens.
"""

import ctypes
import json
import sys

import llama_cpp
import numpy as np


def main() -> None:
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    questions = json.load(sys.stdin)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit("llama.cpp does not load the file")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def tokens_of(text: str) -> list[int]:
        raw = text.encode()
        room = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
        return list(room[:count])

    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_threads = 512, 512, 1
    context = llama_cpp.llama_init_from_model(model, params)

    def logits(tokens: list[int], start: int) -> np.ndarray:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        found = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(tokens), size)).copy()
        llama_cpp.llama_batch_free(batch)
        return found

    prompt = questions["prompt"]
    whole = logits(prompt, 0)
    greedy = [int(whole[-1].argmax())]
    while len(greedy) < 16:
        greedy.append(int(logits(greedy[-1:], len(prompt) + len(greedy) - 1)[-1].argmax()))
    answers = {"tokens": [tokens_of(text) for text in questions["texts"]], "logits": whole.tolist(), "greedy": greedy}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
