"""ik_llama.cpp on a GGUF file, repacked at load, through its C interface: `pip install ik-llama-cpp-python`.

The wheel is an AVX2 build; docs/in-depth/peers.md says how to build one for the machine itself.
"""

import ctypes

import protocol
from ik_llama_cpp import _ctypes_api as ik

given = protocol.arguments()
ik.llama_backend_init()
ik._lib.llama_print_system_info.restype = ctypes.c_char_p  # the binding leaves it out
system_info = ik._lib.llama_print_system_info().decode().strip(" |")

model_params = ik.llama_model_default_params()
model_params.repack_tensors = True
model_params.use_mmap = False  # what is repacked cannot stay in the file's pages
model = ik.llama_model_load_from_file(given.model.encode(), model_params)
if not model:
    raise SystemExit(f"ik_llama.cpp cannot load {given.model}")
params = ik.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = 2 * given.work.prefill
params.n_threads = params.n_threads_batch = given.threads
params.flash_attn = "VNNI = 1" in system_info  # not measured both ways yet; the settings say which
context = ik.llama_init_from_model(model, params)
past = 0


def reset() -> None:
    global past
    ik.llama_kv_cache_clear(context)
    past = 0


def feed(ids: list[int]) -> None:
    """Append to sequence 0, whose positions count up by one from `past`; the last token is scored."""
    global past
    array = (ik.llama_token * len(ids))(*ids)  # held here: the batch only points to it
    batch = ik.llama_batch(n_tokens=len(ids), token=array, all_pos_0=past, all_pos_1=1, all_seq_id=0)
    if status := ik.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode: {status}")
    ik.llama_get_logits_ith(context, -1)  # waits
    past += len(ids)


vocabulary = ik.llama_vocab_n_tokens(ik.llama_model_get_vocab(model))
protocol.take_turns(
    protocol.steps(given.work, reset, feed, vocabulary=vocabulary),
    packages=["ik-llama-cpp-python"],
    system_info=system_info,
    repack_tensors=model_params.repack_tensors,
    use_mmap=model_params.use_mmap,
    flash_attention=params.flash_attn,
)
