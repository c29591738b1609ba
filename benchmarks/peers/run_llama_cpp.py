"""llama.cpp on a GGUF file, through its C interface: `pip install llama-cpp-python`, built on the machine itself."""

import llama_cpp as llama
import protocol

given = protocol.arguments()
llama.llama_backend_init()
model = llama.llama_model_load_from_file(given.model.encode(), llama.llama_model_default_params())
params = llama.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = 2 * given.work.prefill
params.n_threads = params.n_threads_batch = given.threads
context = llama.llama_init_from_model(model, params)


def feed(ids: list[int]) -> None:
    array = (llama.llama_token * len(ids))(*ids)  # held here: the batch only points to it
    if status := llama.llama_decode(context, llama.llama_batch_get_one(array, len(ids))):
        raise RuntimeError(f"llama_decode: {status}")
    llama.llama_synchronize(context)


def reset() -> None:
    llama.llama_memory_clear(llama.llama_get_memory(context), True)


vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
protocol.take_turns(
    protocol.steps(given.work, reset, feed, vocabulary=vocabulary),
    packages=["llama-cpp-python"],
    system_info=llama.llama_print_system_info().decode().strip(" |"),
)
