"""What vLLM makes of a folder, as JSON: python benchmarks/peers/vllm_answers.py FOLDER < QUESTIONS.

Run it with a Python that has vLLM; hasten is not needed. QUESTIONS is JSON: "prompt", token ids. Answered are 16 greedy
tokens, and the log-probability of each of the prompt's tokens after those before it.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    prompt = json.load(sys.stdin)["prompt"]
    model = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    (answer,) = model.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    steps = answer.prompt_logprobs[1:]
    found = [step[token].logprob for step, token in zip(steps, prompt[1:], strict=True)]
    print("RESULT", json.dumps({"tokens": list(answer.outputs[0].token_ids), "logprobs": found}), flush=True)


if __name__ == "__main__":
    main()
