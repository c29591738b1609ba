"""vLLM's engine as both of its scripts have it: on the CPU, in bfloat16, without its tokenizer and its network."""

import os
from typing import Any


def make(model: str, *, threads: int, length: int, sequences: int) -> Any:
    """A vllm.LLM of a folder: texts of at most `length` tokens, at most `sequences` at once, on `threads` cores."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The cores themselves: by itself vLLM may leave one of them to its front end.
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM  # it reads the environment when it is imported

    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=sequences,
        enable_prefix_caching=False,
    )
