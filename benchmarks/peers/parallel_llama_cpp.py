"""llama.cpp's parallel sampling through its C interface: n answers to each prompt, drawn at temperature 0.8.

MODEL KIND N PROMPTS PROMPT_TOKENS NEW_TOKENS SLOTS THREADS. KIND shared: the sequences of a prompt share its cells, as
its program `batched` does it; alone: each has a prompt of its own. As many prompts at a time as SLOTS cells hold.
"""

import json
import random
import sys
import time

import llama_cpp as llama

path, kind = sys.argv[1:3]
n, prompts, length, new, slots, threads = map(int, sys.argv[3:])
quiet = llama.llama_log_callback(lambda *_: None)  # held: llama.cpp calls it later, too
llama.llama_log_set(quiet, None)
llama.llama_backend_init()
model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
each = length + n * new if kind == "shared" else n * (length + new)
together = max(1, slots // each)
params = llama.llama_context_default_params()
params.n_ctx = max(slots, each)
params.n_batch = params.n_ubatch = 512
params.n_seq_max = together * n
params.kv_unified = True
params.n_threads = params.n_threads_batch = threads
context = llama.llama_init_from_model(model, params)
memory = llama.llama_get_memory(context)
batch = llama.llama_batch_init(512, 0, together * n)
chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(0.8))
llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(0))


def decode(rows):
    """rows: (token, position, sequences, scored)."""
    for first in range(0, len(rows), 512):
        part = rows[first : first + 512]
        batch.n_tokens = len(part)
        for i, (token, position, sequences, scored) in enumerate(part):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, scored
            batch.n_seq_id[i] = len(sequences)
            for j, sequence in enumerate(sequences):
                batch.seq_id[i][j] = sequence
        if status := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        yield from (i for i, row in enumerate(part) if row[3])


random.seed(0)
texts = [[random.randrange(3, vocabulary - 1) for _ in range(length)] for _ in range(prompts)]
start = time.perf_counter()
for first in range(0, prompts, together):
    group = texts[first : first + together]
    llama.llama_memory_clear(memory, True)
    tokens = {}
    for p, text in enumerate(group):
        own = list(range(p * n, p * n + n))
        for sequences in [own] if kind == "shared" else [[one] for one in own]:
            rows = [(token, i, sequences, i == length - 1) for i, token in enumerate(text)]
            for row in decode(rows):
                tokens |= {one: llama.llama_sampler_sample(chain, context, row) for one in sequences}
    for step in range(new - 1):
        rows = [(token, length + step, [one], True) for one, token in tokens.items()]
        scored = list(decode(rows))
        tokens = {one: llama.llama_sampler_sample(chain, context, row) for one, row in zip(tokens, scored, strict=True)}
seconds = time.perf_counter() - start
print(json.dumps({"tokens_per_second": prompts * n * new / seconds, "most_sequences": together * n}))
