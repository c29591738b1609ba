"""hasten.LLM, many requests at once: answers the orders of serving.py on its standard input."""

import serve_protocol


def main() -> None:
    given = serve_protocol.arguments()
    import torch

    import hasten

    torch.set_num_threads(given.threads)
    # No prefix cache, as in the peer: prompts are random, and repeated ones are there to measure without sharing.
    llm = hasten.LLM(given.model, dtype="bfloat16", prefix_cache=False, cache_bytes=2 << 30)

    def generate(prompts: list[list[int]], answer: int, samples: int) -> int:
        # Samples differ only with a temperature.
        params = hasten.SamplingParams(
            temperature=0.0 if samples == 1 else 1.0, seed=0, max_new_tokens=answer, ignore_eos=True
        )
        answers = llm.generate(prompts, params, n=samples)
        return sum(len(one.tokens) for answer in answers for one in answer.completions)

    serve_protocol.serve(generate, vocabulary=llm.model.config.vocab_size, packages=["hasten", "torch"])


if __name__ == "__main__":
    main()
